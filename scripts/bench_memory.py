"""Prints the bytes that a step reads and writes, over `memory_bytes`.

For each share of the state's bytes a new store is updated by AdamW; the steps are those
between two commits, of which there is one in `--durability` steps. The first commit is
not counted: the first step reads everything.
"""

import argparse
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from update_rig import UpdateRig

from jaxinf.engine import engine_of

SHARES = (0.1, 0.25, 0.5, 0.75, 1.05)


class Row(NamedTuple):
    """The mean step with an amount of memory.

    Attributes:
      memory_bytes: `memory_bytes` of the store.
      hit_share: the part of the state that was in memory.
    """

    memory_bytes: int
    hit_share: float
    read_bytes: float
    written_bytes: float


def measure(place: Path, num_params: int, durability: int) -> Iterator[Row]:
    """Yields a row for each share of the state's bytes."""
    for share in SHARES:
        memory_bytes = int(share * 12 * num_params)
        with tempfile.TemporaryDirectory(dir=place) as directory:
            rig = UpdateRig(
                Path(directory, "store"),
                num_params,
                durability=durability,
                memory_bytes=memory_bytes,
            )
            engine = engine_of(rig.store)
            moved = []
            for _ in range(2):
                for _ in range(durability):
                    rig.step()
                engine.join()
                moved.append(engine.opened.meters.snapshot())
            traffic, metrics = moved[1] - moved[0], rig.store.metrics
            assert metrics is not None
            yield Row(
                memory_bytes,
                metrics.hit_share,
                traffic.drive_read_bytes / durability,
                traffic.drive_write_bytes / durability,
            )
            rig.store.close()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--store", type=Path, required=True, metavar="DIR")
    parser.add_argument("--params", type=float, default=64e6)
    parser.add_argument("--durability", type=int, default=8)
    arguments = parser.parse_args()
    print(
        "| `memory_bytes` | stays | read a step | written a step |\n|---|---|---|---|"
    )
    found = measure(arguments.store, int(arguments.params), arguments.durability)
    for memory, share, read, written in found:
        print(
            f"| {memory / 1e6:.0f} MB | {share * 100:.0f} % | {read / 1e6:.1f} MB "
            f"| {written / 1e6:.1f} MB |"
        )


if __name__ == "__main__":
    main()
