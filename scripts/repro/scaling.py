"""Smart-Infinity's scaling over CSDs: published, modelled, and run on emulated cards.

    python scripts/repro/scaling.py --store DIR

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
100 % the CPU is the limit, so raise --slower. --model-only leaves the emulation out.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, cast

import jax
import jax.numpy as jnp
from rich.console import Console
from rich.progress import track
from smart_infinity import BUFFERS_S, METHODS, TESTBED, Method, Workload, update_s
from smart_infinity_figures import Comparison, compare_with_paper
from throttled import CsdRates, throttled

import jaxinf
from jaxinf.compress import compress_leaf
from jaxinf.csd import CsdSpec
from jaxinf.layout import choose

sys.path.append(str(Path(__file__).parents[1]))
from update_rig import UpdateRig

CHUNK_ELEMENTS = choose.DEFAULT_CHUNK_ELEMENTS = 1 << 16  # a card has many
OVERLAP = "overlap"
NAMES = [*METHODS, OVERLAP]
PUBLISHED = "GPT2 4.0B"
PUBLISHED_PARAMS = 4e9


def rates(method: str, count: int) -> dict[str, float]:
    """Returns the testbed's rates, bytes a second, by the names of `CsdRates`."""
    link = TESTBED.link.value
    if method == "BASE":
        state_and_gradient_bytes = 16
        return {
            "drive_read": min(count * TESTBED.read.value, link),
            "drive_write": min(count * TESTBED.write.value, link),
            "kernel": state_and_gradient_bytes * TESTBED.update.value,
        }
    found = {
        "drive_read": TESTBED.card_read.value,
        "drive_write": TESTBED.card_write.value,
        "kernel": TESTBED.kernel.value,
        "decompress": TESTBED.decompressor.value,
        "link": link,
    }
    if method == "SU":
        state_bytes = 12
        found["allocate"] = state_bytes / BUFFERS_S.value
    return found


def compress(rig: UpdateRig, ratio: float) -> None:
    """Replaces the rig's gradients by the elements that are sent."""
    compression = jaxinf.top_k(ratio)
    for number, gradient in enumerate(rig.gradients):
        grid = rig.store._manifest.leaves[number].grid
        sent, _ = compress_leaf(jnp.asarray(gradient), grid, compression)
        rig.gradients[number] = jax.device_get(sent)


def cards(method: str, count: int, slower: float) -> CsdSpec:
    """Returns the value of `csd=`."""
    own = {name: rate / slower for name, rate in rates(method, count).items()}
    in_turn = method != OVERLAP
    return throttled(
        "emulated:buffers=1" if in_turn else "emulated",
        CsdRates(**own, is_joined=in_turn, has_stored_gradients=True),
    )


def measure(
    place: Path, method: str, count: int, arguments: argparse.Namespace
) -> dict[str, float]:
    """Measures a step's seconds, link bytes a param, and share of the CPU."""
    num_csds = 1 if method == "BASE" else count
    roots = [place / f"csd{n}" for n in range(num_csds)]
    for root in roots:
        root.mkdir(parents=True)
    rig = UpdateRig(
        place / "store",
        arguments.params,
        csds=roots,
        csd=cards(method, count, arguments.slower),
    )
    if method == "SU+O+C":
        compress(rig, arguments.ratio)
    times, busy = [], []
    for repetition in range(arguments.reps + 1):
        began, cpu = time.perf_counter(), time.process_time()
        rig.step()
        rig.store._engine.join()
        if repetition:  # the first only warms up and compiles
            times.append(time.perf_counter() - began)
            busy.append((time.process_time() - cpu) / times[-1] / (os.cpu_count() or 1))
    metrics = rig.store.metrics
    assert metrics is not None
    link_bytes = metrics.traffic.link_down_bytes + metrics.traffic.link_up_bytes
    rig.close()
    return {
        "link_bytes_per_param": link_bytes / arguments.params,
        "emulated_s": statistics.median(times),
        "spread_s": max(times) - min(times),
        "cpu_share": statistics.median(busy),
    }


def model_s(method: str, count: int, arguments: argparse.Namespace) -> float:
    """Returns the model's seconds for the same update, at this size and slowness."""
    workload = Workload(arguments.params, sent_ratio=arguments.ratio)
    is_overlapped = method == OVERLAP
    name = cast(Method, "SU+O" if is_overlapped else method)
    seconds = update_s(TESTBED, workload, name, count, overlap=is_overlapped)
    return seconds * arguments.slower


def results(
    found: dict[tuple[str, int], dict[str, float]], arguments: argparse.Namespace
) -> list[dict[str, Any]]:
    """Returns a row for each number of CSDs and method, with speedups over its BASE."""
    paper = {
        (row.method, row.num_csds): row.published
        for row in compare_with_paper()
        if (row.figure, row.model, row.quantity) == ("9", PUBLISHED, "update_s")
    }
    scale = arguments.params / PUBLISHED_PARAMS * arguments.slower
    rows = []
    for (method, count), one in found.items():
        modelled = model_s(method, count, arguments)
        base, base_s = found["BASE", count], model_s("BASE", count, arguments)
        row: dict[str, Any] = {"csds": count, "method": method, **one}
        row["model_s"] = modelled
        row["error"] = one["emulated_s"] / modelled - 1
        row["speedup"] = base["emulated_s"] / one["emulated_s"]
        row["model_speedup"] = base_s / modelled
        if (method, count) in paper:
            row["paper_s"] = paper[cast(Method, method), count] * scale
            row["paper_speedup"] = paper["BASE", count] / paper[method, count]  # pyright: ignore
        rows.append(row)
    return rows


def show(rows: list[dict[str, Any]], arguments: argparse.Namespace) -> None:
    """Prints the table of the emulation."""
    print(f"{arguments.params:,} params, bandwidths divided by {arguments.slower:g}")
    print(
        "CSDs  method  published   model  emulated   error  CPU  speedup  model  paper"
    )
    for row in rows:
        paper_s = f"{row['paper_s']:7.2f} s" if "paper_s" in row else "        -"
        paper = f"{row['paper_speedup']:5.2f}" if "paper_s" in row else "    -"
        print(
            f"{row['csds']:4}  {row['method']:7} {paper_s} {row['model_s']:6.2f} s  "
            f"{row['emulated_s']:6.2f} s  {row['error']:+6.1%} "
            f"{row['cpu_share']:4.0%}  {row['speedup']:7.2f}  "
            f"{row['model_speedup']:5.2f}  {paper}"
        )


def show_model(rows: list[Comparison]) -> None:
    """Prints each published number beside the model's."""
    print(
        "figure  trained               CSDs  method   quantity      paper  model  error"
    )
    for row in rows:
        print(
            f"{row.figure:6}  {row.model:20}  {row.num_csds:4}  {row.method:7}  "
            f"{row.quantity:12}{row.published:6.2f}  {row.modelled:6.2f}  "
            f"{row.error:+5.1%}"
        )


def summary(rows: list[Comparison]) -> str:
    """Summarises the model's errors in figures 9, 10 and 11a."""
    near = [r for r in rows if r.figure in ("9", "10", "11a")]
    speedups = [abs(row.error) for row in near if row.quantity == "speedup"]
    times = [abs(row.error) for row in near if row.quantity == "update_s"]
    num_near = sum(error <= 0.1 for error in speedups)
    return (
        f"{num_near} of {len(speedups)} published speedups within 10 %, median error "
        f"of {len(times)} update times {statistics.median(times):.1%}, "
        f"greatest {max(times):.1%}"
    )


def emulate(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Runs every method on every number of CSDs."""
    arguments.store.mkdir(parents=True, exist_ok=True)
    found: dict[tuple[str, int], dict[str, float]] = {}
    todo = [(method, count) for count in arguments.csds for method in NAMES]
    progress = Console(stderr=True)
    for method, count in track(todo, "runs", console=progress, transient=True):
        with tempfile.TemporaryDirectory(dir=arguments.store) as place:
            found[method, count] = measure(Path(place), method, count, arguments)
    return results(found, arguments)


def main() -> None:
    """Models, measures, prints and draws, as the options say."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--store", type=Path, help="where files of the emulation go")
    parser.add_argument("--model-only", action="store_true", help="no emulation")
    parser.add_argument("--params", type=int, default=120 * CHUNK_ELEMENTS)
    parser.add_argument("--csds", type=int, nargs="+", default=[1, 2, 4, 6, 10])
    parser.add_argument("--slower", type=float, default=100.0)
    parser.add_argument("--ratio", type=float, default=0.02, help="SmartComp's")
    parser.add_argument("--reps", type=int, default=3)
    parser.add_argument("--json", action="store_true", help="rows, not tables")
    arguments = parser.parse_args()
    if not arguments.model_only and arguments.store is None:
        parser.error("expected --store DIR for the emulation, or --model-only")
    modelled = compare_with_paper()
    rows = [] if arguments.model_only else emulate(arguments)
    if arguments.json:
        comparisons = [{**r._asdict(), "error": r.error} for r in modelled]
        print(json.dumps({"model": comparisons, "emulation": rows}))
    else:
        show_model(modelled)
        if rows:
            show(rows, arguments)
    print(summary(modelled))


if __name__ == "__main__":
    main()
