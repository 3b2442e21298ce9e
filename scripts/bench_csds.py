"""Steps on 1, 2, 4, … CSDs of a system that is not there, slower by a stated factor.

By default the testbed of Smart-Infinity: drives of 3.2 GB/s read and 1.6 written, a
host link of 8 GB/s that all share, kernels of 8.2 GB/s, each divided by --slower.
`host` moves all state over the link; `emulated` gradients and results alone, and its
kernels are the cards', run by this machine's CPU. Steps of adamw; medians. Where the
CPU was busy for most of a step, its time is the CPU's, not the system's.
"""

import argparse
import json
import os
import shutil
import statistics
import tempfile
import time
from pathlib import Path

from update_rig import UpdateRig

RATES = {"drive_read": 3.2e9, "drive_write": 1.6e9, "kernel": 8.2e9, "link": 8e9}


def measure(place, kind, count, arguments):
    """Seconds a step, link bytes a step, and the share of the CPU that it took."""
    rates = {name: rate / arguments.slower for name, rate in RATES.items()}
    options = ",".join(f"{name}={rate:.0f}B/s" for name, rate in rates.items())
    roots = [place / f"csd{n}" for n in range(count)]
    for root in roots:
        root.mkdir(parents=True)
    rig = UpdateRig(
        place / "store",
        arguments.params,
        csds=roots,
        csd=f"{kind}:{options}",
        master="stored",
        verify="always",
        num_workers=2 * count + 2,
        chunk_elements=1 << 18,
    )
    times, busy = [], []
    for repetition in range(arguments.reps + 1):
        began, cpu = time.perf_counter(), time.process_time()
        rig.step()
        rig.store.steps.join()
        if repetition:  # the first warms up, and compiles
            times.append(time.perf_counter() - began)
            busy.append((time.process_time() - cpu) / times[-1] / os.cpu_count())
    rig.store.wait()
    metrics = rig.store.metrics
    assert metrics is not None
    traffic = metrics.traffic
    rig.close()
    link = traffic.link_down_bytes + traffic.link_up_bytes
    if kind == "host":
        link += traffic.drive_read_bytes + traffic.drive_write_bytes
    return {
        "step_s": statistics.median(times),
        "link_bytes": link,
        "cpu_share": statistics.median(busy),
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--store", type=Path, required=True, help="where files go")
    parser.add_argument("--params", type=int, default=8 << 20)
    parser.add_argument("--csds", type=int, nargs="+", default=[1, 2, 4, 6, 10])
    parser.add_argument("--slower", type=float, default=100.0)
    parser.add_argument("--reps", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    arguments.store.mkdir(parents=True, exist_ok=True)
    found = {}
    for kind in ("host", "emulated"):
        for count in arguments.csds:
            place = Path(tempfile.mkdtemp(dir=arguments.store))
            try:
                found[f"{kind} {count}"] = measure(place, kind, count, arguments)
            finally:
                shutil.rmtree(place)
    if arguments.json:
        print(json.dumps(found))
        return
    print(f"{arguments.params:,} params, bandwidths divided by {arguments.slower:g}")
    print("CSDs  host step  emulated step  ratio  CPU share host/emulated")
    for count in arguments.csds:
        host, card = found[f"host {count}"], found[f"emulated {count}"]
        print(
            f"{count:4}  {host['step_s']:7.2f} s  {card['step_s']:11.2f} s  "
            f"{host['step_s'] / card['step_s']:5.2f}  "
            f"{host['cpu_share']:.0%} / {card['cpu_share']:.0%}"
        )


if __name__ == "__main__":
    main()
