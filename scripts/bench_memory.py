"""Prints the bytes that a step reads and writes, and its memory, over `memory_bytes`.

For each share of the state's bytes a new store is updated by AdamW; the steps are those
between two commits, of which there is one in `--durability` steps. The first commit is
not counted: the first step reads everything.

The memory is the greatest RSS of a jitted program with `smart_update`, less that of the
same program whose callback only fills its results with zeros.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from update_rig import UpdateRig

import jaxinf
from jaxinf.engine import UpdateRequest, engine_of

SHARES = (0.1, 0.25, 0.5, 0.75, 1.05)


class Row(NamedTuple):
    """The mean step with an amount of memory.

    Attributes:
      memory_bytes: `memory_bytes` of the store.
      hit_share: the part of the state that was in memory.
      rss_bytes: the memory that the steps take beside JAX's arrays.
    """

    memory_bytes: int
    hit_share: float
    read_bytes: float
    written_bytes: float
    rss_bytes: int


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
                rss_bytes(place, num_params, memory_bytes, durability),
            )
            rig.store.close()


def rss_bytes(place: Path, num_params: int, memory_bytes: int, durability: int) -> int:
    """Returns the memory that steps take beside JAX's arrays, by two programs."""
    peaks = []
    for is_empty in (False, True):
        with tempfile.TemporaryDirectory(dir=place) as directory:
            numbers = map(str, (num_params, memory_bytes, durability, int(is_empty)))
            command = [sys.executable, __file__, "--peak", directory, *numbers]
            peaks.append(int(subprocess.check_output(command)))
    return peaks[0] - peaks[1]


def peak_rss_bytes(
    place: Path, num_params: int, memory_bytes: int, durability: int, is_empty: int
) -> int:
    """Trains in this process; returns its greatest RSS in steps after `init`."""
    store = jaxinf.open_store(
        place / "store", memory_bytes=memory_bytes, durability=durability
    )
    tx = jaxinf.smart_update(optax.adamw(1e-3), store)
    params = {str(n): jnp.full(num_params // 12, 0.5) for n in range(12)}
    state = tx.init(params)
    engine = engine_of(store)
    if is_empty:
        engine.opened.fleet.limit_memory(0)
        nothing = _do_nothing
        vars(engine.binding).update(begin=nothing, compare=nothing, finish=nothing)
        vars(engine.opened).update(update=_fill_with_zeros, finish=_do_nothing)

    def step(params: dict[str, jax.Array], state: optax.OptState) -> tuple:
        updates, state = tx.update(jax.tree.map(jnp.sin, params), state, params)
        return optax.apply_updates(params, updates), state

    jitted = jax.jit(step, donate_argnums=(0, 1))
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    for _ in range(2 * durability + 1):
        params, state = jitted(params, state)
    jax.block_until_ready(params)
    lines = Path("/proc/self/status").read_text().splitlines()
    [peak] = [line.split()[1] for line in lines if line.startswith("VmHWM:")]
    if not is_empty:
        store.close()
    return int(peak) << 10


def _do_nothing(*arguments: object, **options: object) -> None: ...


def _fill_with_zeros(step: int, *requests: UpdateRequest) -> list[bool]:
    for request in requests:
        if request.out is not None:
            request.out[...] = 0
    return [True] * len(requests)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--store", type=Path, required=True, metavar="DIR")
    parser.add_argument("--params", type=float, default=64e6)
    parser.add_argument("--durability", type=int, default=8)
    arguments = parser.parse_args()
    print(
        "| `memory_bytes` | stays | read a step | written a step | memory |\n"
        "|---|---|---|---|---|"
    )
    found = measure(arguments.store, int(arguments.params), arguments.durability)
    for memory, share, read, written, rss in found:
        print(
            f"| {memory / 1e6:.0f} MB | {share * 100:.0f} % | {read / 1e6:.1f} MB "
            f"| {written / 1e6:.1f} MB | {rss / 1e6:.0f} MB |"
        )


if __name__ == "__main__":
    if sys.argv[1:2] == ["--peak"]:
        print(peak_rss_bytes(Path(sys.argv[2]), *map(int, sys.argv[3:])))
        sys.stdout.flush()
        os._exit(0)  # an empty callback leaves the store behind the program
    main()
