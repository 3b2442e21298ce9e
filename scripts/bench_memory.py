"""Prints the bytes that a step reads and writes, and its memory, over `memory_bytes`.

For each share of the state's bytes a new store is updated by AdamW; the steps are those
between two commits, of which there is one in `--durability` steps. The first commit is
not counted: the first step reads everything.

The memory is the peak of resident memory in these steps, beside the caller's arrays and
what Python, JAX and its compiler take, which is that after steps of a small store.
"""

import argparse
import gc
from pathlib import Path
from typing import Any

import bench
from update_rig import UpdateRig

SHARES = (0.1, 0.25, 0.5, 0.75, 1.05)


def measure(arguments: argparse.Namespace, place: Path) -> list[dict[str, Any]]:
    """Returns the mean step with each share of the state's bytes."""
    num_params, durability = int(arguments.params), arguments.durability
    small = UpdateRig(place / "small", 100_000)
    small.step()
    small.close()
    base_bytes = bench.resident_bytes() - small.caller_bytes
    rows = []
    for share in SHARES:
        memory_bytes = int(share * 12 * num_params)
        options = {"durability": durability, "memory_bytes": memory_bytes}
        rig = UpdateRig(place / f"{share}", num_params, **options)
        engine, moved = rig.engine, []
        bench.reset_peak()
        for _ in range(2):
            for _ in range(durability):
                rig.step()
            engine.steps.join()
            moved.append(engine.files.meters.snapshot())
        traffic, metrics = moved[1] - moved[0], rig.store.metrics
        assert metrics is not None
        peak_bytes = bench.resident_bytes("VmHWM") - rig.caller_bytes
        rows.append(
            {
                "memory_bytes": memory_bytes,
                "hit_share": metrics.hit_share,
                "read_bytes": traffic.drive_read_bytes / durability,
                "written_bytes": traffic.drive_write_bytes / durability,
                "rss_bytes": peak_bytes - base_bytes,
            }
        )
        rig.close()
        del rig, engine  # which refer to each other, and have the caller's arrays
        gc.collect()
    return rows


if __name__ == "__main__":
    bench.run(__doc__, measure, bench.print_table, params=64e6, durability=8)
