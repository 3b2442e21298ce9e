"""Smart-Infinity's scaling over CSDs, on a system that is not there.

Its testbed, by token buckets: drives of 3.2 GB/s read and 1.6 written, one host link of
8 GB/s that all CSDs share, kernels of 8.2 GB/s, each divided by --slower. Adam steps of
  BASE      state crosses the link to the host's CPU, as with ZeRO-Infinity (csd "host")
  SU        updates beside the drives, one subgroup at a time on each card ("emulated")
  SU+O      loads, kernel and write-back of several subgroups at once
  SU+O+C    and gradients compressed to --ratio of their bytes
The update phase is measured. End to end adds, for each method, the seconds a param of
forward and backward that the paper has for it (GPT-2 4.0B on an A5000, figure 9).

The cards' kernels are run by this machine's CPU: its share is printed, and near 100 %
it is the CPU that is measured. Raise --slower then.
"""

import argparse
import json
import os
import shutil
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from rich.console import Console
from rich.progress import track
from update_rig import UpdateRig

import jaxinf
from jaxinf.compress import SparseLeaf, compress_leaf
from jaxinf.plan import Comparison, compare_with_paper

RATES = {"drive_read": 3.2e9, "drive_write": 1.6e9, "kernel": 8.2e9, "link": 8e9}
CHUNK_ELEMENTS = 1 << 16
WORKERS_PER_CSD = 3

PAPER_PARAMS = 4.0e9
# Of the methods in turn: seconds of forward and backward with gradient offload, and of
# the update.
_SIX = [(6.2, 17.6), (6.0, 13.0), (6.1, 12.3), (4.9, 10.8)]
_TEN = [(5.9, 17.8), (6.0, 9.6), (6.5, 8.3), (4.9, 7.3)]


@dataclass(frozen=True)
class Method:
    """One way of updating.

    Attributes:
      name: the paper's.
      kind: of CSD.
      is_serial: whether each CSD has one subgroup in hand at a time.
      is_compressed: whether gradients are sparse.
    """

    name: str
    kind: str
    is_serial: bool = False
    is_compressed: bool = False


METHODS = (
    Method("BASE", "host"),
    Method("SU", "emulated", is_serial=True),
    Method("SU+O", "emulated"),
    Method("SU+O+C", "emulated", is_compressed=True),
)
NAMES = [method.name for method in METHODS]
COLOURS = dict(zip(NAMES, ["#9a9a9a", "#2a78b5", "#3d9a50", "#d1662f"], strict=True))
PAPER = {
    6: dict(zip(NAMES, _SIX, strict=True)),
    10: dict(zip(NAMES, _TEN, strict=True)),
}


def compress(rig: UpdateRig, ratio: float) -> None:
    """Replaces the rig's gradients by what is sent of them."""
    compression = jaxinf.top_k(ratio)
    for number, gradient in enumerate(rig.gradients):
        grid = rig.store.manifest.leaves[number].grid
        sent, _ = compress_leaf(jnp.asarray(gradient), grid, compression)
        indices, values = jax.device_get((sent.indices, sent.values))
        lengths = [chunk.num_elements for chunk in grid.chunks()]
        rig.gradients[number] = SparseLeaf(
            gradient.shape, indices, values, sent.counts, lengths
        )


def measure(
    place: Path, method: Method, count: int, arguments: argparse.Namespace
) -> dict[str, float]:
    """Seconds a step, link bytes a param, and the share of the CPU that it took."""
    rates = {name: rate / arguments.slower for name, rate in RATES.items()}
    options = ",".join(f"{name}={rate:.0f}B/s" for name, rate in rates.items())
    if method.is_serial:
        options += ",buffers=1"
    roots = [place / f"csd{n}" for n in range(count)]
    for root in roots:
        root.mkdir(parents=True)
    rig = UpdateRig(
        place / "store",
        arguments.params,
        csds=roots,
        csd=f"{method.kind}:{options}",
        master="stored",
        verify="always",
        num_workers=WORKERS_PER_CSD * count,
        chunk_elements=CHUNK_ELEMENTS,
    )
    if method.is_compressed:
        compress(rig, arguments.ratio)
    times, busy = [], []
    for repetition in range(arguments.reps + 1):
        began, cpu = time.perf_counter(), time.process_time()
        rig.step()
        rig.store.steps.join()
        if repetition:  # the first warms up, and compiles
            times.append(time.perf_counter() - began)
            busy.append((time.process_time() - cpu) / times[-1] / (os.cpu_count() or 1))
    rig.store.wait()
    metrics = rig.store.metrics
    assert metrics is not None
    traffic = metrics.traffic
    rig.close()
    link = traffic.link_down_bytes + traffic.link_up_bytes
    if method.kind == "host":
        link = traffic.drive_read_bytes + traffic.drive_write_bytes
    return {
        "step_s": statistics.median(times),
        "spread_s": max(times) - min(times),
        "link_bytes_per_param": link / arguments.params,
        "cpu_share": statistics.median(busy),
    }


def model_s(method: str, count: int, arguments: argparse.Namespace) -> float:
    """Forward and backward, by the paper, at this size and slowness."""
    seconds = PAPER[6 if count <= 6 else 10][method][0]
    return seconds / PAPER_PARAMS * arguments.params * arguments.slower


def results(
    found: dict[str, dict[int, dict[str, float]]], arguments: argparse.Namespace
) -> list[dict[str, Any]]:
    """A row for each number of CSDs and method, with speedups over BASE there."""
    rows = []
    for count in arguments.csds:
        base = found["BASE"][count]["step_s"]
        base_whole = base + model_s("BASE", count, arguments)
        for method in METHODS:
            one = found[method.name][count]
            whole = one["step_s"] + model_s(method.name, count, arguments)
            row = {"csds": count, "method": method.name, **one}
            row["update_speedup"] = base / one["step_s"]
            row["whole_speedup"] = base_whole / whole
            if count in PAPER:
                (paper_model, paper_base), paper = PAPER[count]["BASE"], PAPER[count]
                own_model, own = paper[method.name]
                row["paper_update_speedup"] = paper_base / own
                row["paper_whole_speedup"] = (paper_model + paper_base) / (
                    own_model + own
                )
            rows.append(row)
    return rows


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    """Writes the picture: seconds of an update, and both speedups."""
    import matplotlib.pyplot as plt  # pyright: ignore[reportMissingImports]: an extra

    figure, panels = plt.subplots(1, 3, figsize=(11, 3.4), layout="constrained")
    titles = ["update, seconds", "update, speedup over BASE", "end to end, speedup"]
    keys = ["step_s", "update_speedup", "whole_speedup"]
    for axes, title, key in zip(panels, titles, keys, strict=True):
        for method in METHODS:
            own = [row for row in rows if row["method"] == method.name]
            colour = COLOURS[method.name]
            axes.plot(
                [row["csds"] for row in own],
                [row[key] for row in own],
                "o-", markersize=4, color=colour, label=method.name,
            )  # fmt: skip
            published = [row for row in own if f"paper_{key}" in row]
            axes.plot(
                [row["csds"] for row in published],
                [row[f"paper_{key}"] for row in published],
                "x", color=colour, markersize=8, markeredgewidth=2,
            )  # fmt: skip
        axes.set_title(title, fontsize=10)
        axes.set_xlabel("CSDs")
        axes.set_xticks(sorted({row["csds"] for row in rows}))
        axes.set_ylim(bottom=0)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
    panels[1].plot([], [], "x", color="black", label="published")
    panels[1].legend(frameon=False, fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def show(rows: list[dict[str, Any]], arguments: argparse.Namespace) -> None:
    """Prints the table."""
    print(f"{arguments.params:,} params, bandwidths divided by {arguments.slower:g}")
    print("CSDs  method   update  link B/param  CPU  speedup  paper  end to end  paper")
    for row in rows:
        published = [
            f"{row[key]:5.2f}" if key in row else "    -"
            for key in ("paper_update_speedup", "paper_whole_speedup")
        ]
        print(
            f"{row['csds']:4}  {row['method']:7} {row['step_s']:6.2f} s  "
            f"{row['link_bytes_per_param']:12.2f} {row['cpu_share']:4.0%}  "
            f"{row['update_speedup']:7.2f}  {published[0]}  "
            f"{row['whole_speedup']:10.2f}  {published[1]}"
        )


def show_model(rows: list[Comparison]) -> None:
    """Prints each published number beside the model's."""
    print(
        "figure  trained               CSDs  method   quantity     paper   model  error"
    )
    for row in rows:
        print(
            f"{row.figure:6}  {row.model:20}  {row.num_csds:4}  {row.method:7}  "
            f"{row.quantity:12}{row.published:6.2f}  {row.modelled:6.2f}  "
            f"{row.error:+5.1%}"
        )


def summary(rows: list[Comparison]) -> str:
    """How near the model comes to figures 9, 10 and 11a."""
    near = [r for r in rows if r.figure in ("9", "10", "11a")]
    speedups = [abs(row.error) for row in near if row.quantity == "speedup"]
    times = [abs(row.error) for row in near if row.quantity == "update_s"]
    num_near = sum(error <= 0.1 for error in speedups)
    return (
        f"{num_near} of {len(speedups)} published speedups within 10 %, median error "
        f"of {len(times)} update times {statistics.median(times):.1%}, "
        f"greatest {max(times):.1%}"
    )


def main() -> None:
    """Models, measures unless told not to, prints, and draws where asked to."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--store", type=Path, help="where files of the emulation go")
    parser.add_argument(
        "--model-only", action="store_true", help="no emulation: published and model"
    )
    parser.add_argument("--params", type=int, default=40 * CHUNK_ELEMENTS)
    parser.add_argument("--csds", type=int, nargs="+", default=[1, 2, 4, 6, 8, 10])
    parser.add_argument("--slower", type=float, default=150.0)
    parser.add_argument("--ratio", type=float, default=0.02, help="SmartComp's")
    parser.add_argument("--reps", type=int, default=3)
    parser.add_argument("--json", action="store_true", help="rows, not a table")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="the picture")
    arguments = parser.parse_args()
    modelled = compare_with_paper()
    if arguments.model_only:
        if not arguments.json:
            show_model(modelled)
        else:
            print(json.dumps([row._asdict() for row in modelled]))
        print(summary(modelled))
        return
    if arguments.store is None:
        parser.error("expected --store DIR for the emulation, or --model-only")
    arguments.store.mkdir(parents=True, exist_ok=True)
    found: dict[str, dict[int, dict[str, float]]] = {m.name: {} for m in METHODS}
    todo = [(method, count) for count in arguments.csds for method in METHODS]
    progress = Console(stderr=True)
    for method, count in track(todo, "runs", console=progress, transient=True):
        place = Path(tempfile.mkdtemp(dir=arguments.store))
        try:
            found[method.name][count] = measure(place, method, count, arguments)
        finally:
            shutil.rmtree(place)
    rows = results(found, arguments)
    if arguments.plot:
        plot(rows, arguments.plot)
    if arguments.json:
        print(json.dumps(rows))
    else:
        show_model(modelled)
        show(rows, arguments)
    print(summary(modelled))


if __name__ == "__main__":
    main()
