"""Prints what a second process costs: seconds of commits.

    python tests/support/process_figures.py [--turns 3]
    python tests/support/process_figures.py --plans

Each pair runs in turns. Commits need idle cores to mean anything; the load is printed.
With --plans it prints the bytes of drives and links that were planned, and found.
"""

import argparse
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from processes import run_alone, running


def figure(name, output):
    return float(re.search(rf"^{name} (\S+)", output, re.M).group(1))


def alone(place, name, *arguments):
    return figure(name, run_alone(place / "store", *arguments, num_devices=2))


def together(place, name, *arguments):
    with running(place, place / "store", *arguments) as processes:
        assert processes.wait() == [0, 0], processes
        return max(figure(name, output) for output in processes.outputs())


def compared(root, turns, name, *arguments):
    """Returns a figure of one process and of two with the same mesh, turn by turn."""
    pairs = []
    for turn in range(turns):
        pair = []
        for run in (alone, together):
            place = Path(tempfile.mkdtemp(dir=root, prefix=f"{turn}-"))
            pair.append(run(place, name, *arguments))
        pairs.append(pair)
    return pairs


MODEL = {"model_type": "gpt2", "n_layer": 2, "n_head": 4, "n_embd": 128}
MODEL |= {"n_positions": 16, "vocab_size": 256}


def sent_bytes(pids):
    """Bytes that processes have sent to each other, as the system counts them."""
    words = ["ss", "-tinpOH", "state", "established"]
    found = subprocess.run(words, check=True, capture_output=True, text=True).stdout
    own = re.compile(rf"pid=(?:{'|'.join(map(str, pids))}),.*bytes_sent:(\d+)")
    return sum(map(int, own.findall(found)))


def lines_of(file):
    return list(map(json.loads, file.read_text().splitlines())) if file.exists() else []


def stopped_at(processes, logs, step):
    """Stops all processes after a step; returns the step and what they have sent."""
    while not (found := lines_of(logs)) or found[-1]["step"] < step:
        assert not any(one.poll() for one in processes.all), processes
        time.sleep(0.05)
    pids = [one.pid for one in processes.all]
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    taken = lines_of(logs)[-1]["step"], sent_bytes(pids)
    for pid in pids:
        os.kill(pid, signal.SIGCONT)
    return taken


def held_against_a_plan(place, count, *layout):
    """Prints what was planned for a run in so many processes, and what was found."""
    model, store, logs = place / "model.json", place / "store", place / "logs"
    model.write_text(json.dumps(MODEL))
    words = ["--model-config", model, "--data", __file__, "--seq-len", 16]
    words += ["--batch-size", 8, "--sample-bytes", 0, *layout]
    line = ["-m", "jaxinf", "plan", *words, "--processes", count, "--json"]
    told = subprocess.run(
        [sys.executable, *map(str, line)], check=True, capture_output=True, text=True
    )
    plan = json.loads(told.stdout)
    program = ("-m", "jaxinf.train", *(["--distributed"] if count > 1 else []))
    words += ["--store", store, "--log-dir", logs, "--steps", 4000]
    planned = plan["links"]["sent_bytes"]
    if count == 1:
        alone = [sys.executable, *map(str, [*program, *words[:-1], 20])]
        subprocess.run(alone, check=True, capture_output=True)
        own = [logs / "metrics.jsonl"]
        sent = 0
    else:
        with running(place, *words, program=program, count=count) as processes:
            own = [logs / f"process-{n:05d}" / "metrics.jsonl" for n in range(count)]
            sums = logs / "metrics.jsonl"
            first, before = stopped_at(processes, sums, 20)
            last, after = stopped_at(processes, sums, 120)
            sent = (after - before) / (last - first) / count
    off = f"{100 * (planned / sent - 1):+.1f} %" if sent else "-"
    name = " ".join(map(str, [count, *layout]))
    for host, file in zip(plan["hosts"], own, strict=True):
        last = lines_of(file)[-2]
        print(
            f"{name}: planned {sum(host['read_bytes'])} read, "
            f"{sum(host['written_bytes'])} written; found {last['drive_read_bytes']}, "
            f"{last['drive_write_bytes']}"
        )
    print(f"{name}: links planned {planned}, found {sent:.0f}, {off}")


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--plans", action="store_true")
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2, 4])
    given = parser.parse_args()
    for count in given.processes if given.plans else ():
        for layout in ([], ["--fsdp"]) if count > 1 else ([],):
            with tempfile.TemporaryDirectory() as root:
                held_against_a_plan(Path(root), count, *layout)
    if given.plans:
        return
    with tempfile.TemporaryDirectory() as root:
        pairs = compared(root, given.turns, "commit_s", "--steps", 20)
        added = [1e3 * (two - one) for one, two in pairs]
        print(f"commits, s: {pairs}; {statistics.median(added):+.1f} ms with two")
        print(f"load of the last minute: {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
