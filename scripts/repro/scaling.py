"""Smart-Infinity's scaling over CSDs: published, modelled, and run on emulated cards.

    python scripts/repro/scaling.py --store DIR      # --model-only: no emulation

The model (smart_infinity.py) has the testbed's rates. The emulation has the same rates,
each divided by --slower, and really updates: steps of Adam by cards' kernels, which
this machine's CPU runs, on files of this machine's drive.
  BASE      one array of all drives behind the link, gradients on it, Adam on the CPU
  SU        updates beside the drives, one subgroup at a time on each card
  SU+O      the same without the time for making buffers
  SU+O+C    the same with gradients compressed to --ratio of their bytes
  overlap   jaxinf's own handler: loads, kernel and writes at the same time
As in the published times, the first four do one thing after another: a card writes when
all results have crossed the link. The emulation's share of the CPU is printed: near
100 % the CPU is the limit, so raise --slower.
"""

import argparse
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import smart_infinity as model
from smart_infinity import METHODS, Workload, compare_with_paper, update_s
from throttled import CsdRates, throttled

import jaxinf
from jaxinf.compress import compress_leaf
from jaxinf.csd import CsdSpec
from jaxinf.layout import grid

sys.path.append(str(Path(__file__).parents[1]))
import bench
from update_rig import UpdateRig

CHUNK_ELEMENTS = grid.DEFAULT_CHUNK_ELEMENTS = 1 << 16  # a card has many
OVERLAP = "overlap"
NAMES = [*METHODS, OVERLAP]
PUBLISHED = ("9", "GPT2 4.0B", "update_s")
PUBLISHED_PARAMS = 4e9


def cards(method: str, count: int, slower: float) -> CsdSpec:
    """Returns the value of `csd=` with the testbed's rates; BASE is one array."""
    if method == "BASE":
        rates = {
            "drive_read": min(count * model.READ, model.LINK),
            "drive_write": min(count * model.WRITE, model.LINK),
            "kernel": 16 / model.UPDATE_S,  # bytes of state and gradient
        }
    else:
        rates = {
            "drive_read": model.CARD_READ,
            "drive_write": model.CARD_WRITE,
            "kernel": model.KERNEL,
            "decompress": model.DECOMPRESSOR,
            "link": model.LINK,
        }
        if method == "SU":
            rates["allocate"] = 12 / model.BUFFERS_S  # bytes of state
    own = CsdRates(
        **{name: rate / slower for name, rate in rates.items()},
        is_joined=method != OVERLAP,
        has_stored_gradients=True,
    )
    return throttled("emulated" if method == OVERLAP else "emulated:buffers=1", own)


def measure_one(
    place: Path, method: str, count: int, arguments: argparse.Namespace
) -> dict[str, float]:
    """Measures a step's seconds, link bytes a param, and share of the CPU."""
    roots = [place / f"csd{n}" for n in range(1 if method == "BASE" else count)]
    for root in roots:
        root.mkdir(parents=True)
    csd = cards(method, count, arguments.slower)
    rig = UpdateRig(place / "store", arguments.params, csds=roots, csd=csd)
    if method == "SU+O+C":
        for number, gradient in enumerate(rig.gradients):
            grid = rig.engine.directory.manifest.leaves[number].grid
            top_k = jaxinf.top_k(arguments.ratio)
            sent, _ = compress_leaf(jnp.asarray(gradient), grid, top_k)
            rig.gradients[number] = jax.device_get(sent)
    times, busy = [], []
    for _ in range(arguments.reps + 1):
        began, cpu = time.perf_counter(), time.process_time()
        rig.step()
        rig.engine.steps.join()
        times.append(time.perf_counter() - began)
        busy.append((time.process_time() - cpu) / times[-1] / (os.cpu_count() or 1))
    metrics = rig.store.metrics
    assert metrics is not None
    link_bytes = metrics.traffic.link_down_bytes + metrics.traffic.link_up_bytes
    rig.close()
    times, busy = times[1:], busy[1:]  # the first only warms up and compiles
    return {
        "link_bytes_per_param": link_bytes / arguments.params,
        "emulated_s": statistics.median(times),
        "spread_s": max(times) - min(times),
        "cpu_share": statistics.median(busy),
    }


def emulated(arguments: argparse.Namespace, place: Path) -> list[dict[str, Any]]:
    """Returns a row for each number of CSDs and method, with speedups over its BASE."""
    paper = {
        (row.method, row.num_csds): row.published
        for row in compare_with_paper()
        if (row.figure, row.model, row.quantity) == PUBLISHED
    }
    scale = arguments.params / PUBLISHED_PARAMS * arguments.slower
    workload = Workload(arguments.params, sent_ratio=arguments.ratio)
    rows = []
    for count in arguments.csds:
        base: dict[str, Any] = {}
        for method in NAMES:
            name, overlap = ("SU+O", True) if method == OVERLAP else (method, False)
            modelled = update_s(workload, name, count, overlap=overlap)
            row = {"csds": count, "method": method}
            row |= measure_one(place / f"{count} {method}", method, count, arguments)
            row["model_s"] = modelled * arguments.slower
            row["error"] = row["emulated_s"] / row["model_s"] - 1
            base = base or row
            row["speedup"] = base["emulated_s"] / row["emulated_s"]
            row["model_speedup"] = base["model_s"] / row["model_s"]
            if (method, count) in paper:
                row["paper_s"] = paper[method, count] * scale
                row["paper_speedup"] = paper["BASE", count] / paper[method, count]
            rows.append(row)
    return rows


def measure(arguments: argparse.Namespace, place: Path) -> dict[str, Any]:
    """Models, and runs every method on every number of CSDs."""
    if not arguments.model_only and arguments.store is None:
        sys.exit("expected --store DIR for the emulation, or --model-only")
    modelled = [*compare_with_paper()]
    near = [r for r in modelled if r.figure in ("9", "10", "11a")]
    speedups = [abs(row.error) for row in near if row.quantity == "speedup"]
    times = [abs(row.error) for row in near if row.quantity == "update_s"]
    return {
        "model": [{**r._asdict(), "error": r.error} for r in modelled],
        "emulation": [] if arguments.model_only else emulated(arguments, place),
        "summary": (
            f"{sum(error <= 0.1 for error in speedups)} of {len(speedups)} published "
            f"speedups within 10 %, median error of {len(times)} update times "
            f"{statistics.median(times):.1%}, greatest {max(times):.1%}"
        ),
    }


def show(found: dict[str, Any]) -> None:
    """Prints each published number beside the model's; then the emulation."""
    bench.print_table(found["model"])
    bench.print_table(found["emulation"])
    print(found["summary"])


if __name__ == "__main__":
    bench.run(
        __doc__,
        measure,
        show,
        needs_store=False,
        model_only=bench.FLAG,
        params=120 * CHUNK_ELEMENTS,
        csds={"type": int, "nargs": "+", "default": [1, 2, 4, 6, 10]},
        slower=100.0,
        ratio={"type": float, "default": 0.02, "help": "SmartComp's"},
        reps=3,
    )
