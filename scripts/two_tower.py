"""Trains a two-tower policy of 3.2 billion params in 2 GiB of memory and 52 GB of disk.

The sizes are those of public robot policies (`two_tower_model.py`). Params are in
bfloat16 and their own master, moments have 8 bits, and an average of the params in
bfloat16 is kept beside them. The table of 257,152 rows is read and updated in blocks.
The run gets SIGKILL in the middle of a step, goes on from the last commit, is verified,
and the average is exported.

    python scripts/two_tower.py --store /mnt/nvme0/policy
    python scripts/two_tower.py --plan    # from shapes alone; writes nothing

The limit holds for each process.
"""

import json
import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Annotated, Any, Literal

import jax
import optax
import tyro
from big_rig import BYTES, Watcher, check_disk, committed_step, killed_in_a_step
from two_tower_model import CONFIGS, Config, init, loss_fn, new_batch, num_params

import jaxinf
from jaxinf.streaming import StreamedStep
from jaxinf.terminal import format_bytes

# Two slots of 16-bit params and average, and of two moments in 8 bits with a scale for
# each 256.
BYTES_A_PARAM = 2 * (2 + 2 + 2 * (1 + 4 / 256))
EXPORTED_BYTES_A_PARAM = 4  # the average as the float32 numbers that it stands for


@dataclass(frozen=True)
class Options:
    """Trains a two-tower policy, kills it, trains on, verifies and exports.

    Attributes:
      store: Directory on the drive, for all files; removed at the end.
      config: Sizes of the model.
      images, patches: Images of the batch, and patches of each; 0 for the model's.
      memory: Budget of a step.
      chunk_elements: The most elements of a chunk, of which blocks of rows are made.
      limit: Limit of resident memory.
      steps: Number of steps in all.
      kill_after: Number of the step after whose commit the run is killed.
      kill_delay_s: Time from that commit to the kill, so that it falls into a step.
      plan: Whether to print the plan and the least budget, from shapes, and no more.
      keep: Whether the files stay.
    """

    store: Path = Path("runs/policy")
    config: Literal["full", "small"] = "full"
    images: int = 0
    patches: int = 0
    memory: Annotated[int, BYTES] = 1300 << 20
    chunk_elements: int = 4 << 20
    limit: Annotated[int, BYTES] = 2 << 30
    steps: int = 3
    kill_after: int = 1
    kill_delay_s: float = 20.0
    plan: bool = False
    keep: bool = False

    @cached_property
    def sizes(self) -> Config:
        """The sizes of the model, and of the batch."""
        own = CONFIGS[self.config]
        return replace(
            own,
            num_images=self.images or own.num_images,
            num_patches=self.patches or own.num_patches,
        )


def stream(options: Options) -> StreamedStep:
    """Returns the step; nothing is written yet."""
    store = jaxinf.open_store(
        options.store / "store",
        state="int8",
        master="none",
        chunk_elements=options.chunk_elements,
    )
    return jaxinf.stream(
        partial(loss_fn, options.sizes),
        optax.adamw(1e-4),
        store,
        memory_bytes=options.memory,
        policy="offload",  # a layer is cut where its values are large
        average=jaxinf.ema(0.999, form="bf16"),
    )


def plan(options: Options) -> None:
    """Prints what a step takes, from shapes."""
    params = jax.eval_shape(partial(init, options.sizes), jax.random.key(0))
    with stream(options) as step:
        dry = step.dry_run(new_batch(options.sizes), params=params)
        print(f"{dry.plan}\n{dry}", flush=True)
        least = dry.least["memory_bytes"]
        print(f"least   {format_bytes(least)} for a step")


def train(options: Options) -> None:
    """Trains until the last step, from the one that is committed."""
    sizes = options.sizes
    with stream(options) as step:
        began_s = time.monotonic()
        step.init(partial(init, sizes), jax.random.key(0), batch=new_batch(sizes))
        print(
            f"begun   at step {step.store.step} after {time.monotonic() - began_s:.0f} "
            f"s; {'; '.join(step.plan.tables) if step.plan else ''}",
            flush=True,
        )
        for number in range(step.store.step, options.steps):
            began_s = time.monotonic()
            loss, _ = step(new_batch(sizes, seed=number))
            seconds = time.monotonic() - began_s
            print(f"step    {number + 1} loss {loss:.6f} {seconds:.0f} s", flush=True)


def run(options: Options) -> int:
    """Trains, kills, resumes, verifies, exports; returns the peak of resident memory.

    Raises:
      SystemExit: Something failed, or passed the limit.
    """
    place = options.store / "store"
    fields = {**asdict(options), "store": str(options.store)}
    command = [sys.executable, __file__, "--child", json.dumps(fields)]
    kill = options.kill_after, options.kill_delay_s
    first = killed_in_a_step(command, options.limit, place, *kill)
    _say("trained", first)
    exported = options.store / "exported"
    words = ("--format", "safetensors", "--average")
    peaks = [
        first.peak_bytes,
        _watch("resumed", command, options.limit),
        _watch("verify", _jaxinf("verify", str(place)), options.limit),
        _watch(
            "export",
            _jaxinf("checkpoint", "export", str(place), str(exported), *words),
            options.limit,
        ),
    ]
    if committed_step(place) != options.steps:
        raise SystemExit(
            f"expected step {options.steps}, found {committed_step(place)}"
        )
    num_bytes = sum(file.stat().st_size for file in exported.rglob("*.safetensors"))
    if num_bytes < EXPORTED_BYTES_A_PARAM * num_params(options.sizes):
        raise SystemExit(f"expected all params in the export, found {num_bytes} bytes")
    print(f"export  {format_bytes(num_bytes)} of average")
    return max(peaks)


def _watch(name: str, command: Sequence[str], limit: int) -> int:
    began_s = time.monotonic()
    watcher = Watcher(command, limit)
    try:
        if status := watcher.wait():
            raise SystemExit(f"{name} failed with {status}")
    finally:
        watcher.kill()
    _say(name, watcher, f", {time.monotonic() - began_s:.0f} s")
    return watcher.peak_bytes


def _say(name: str, watcher: Watcher, seconds: str = "") -> None:
    peak = format_bytes(watcher.peak_bytes)
    print(f"{name:7} {peak} resident at most{seconds}", flush=True)


def _jaxinf(*words: str) -> list[str]:
    return [sys.executable, "-m", "jaxinf", *words]


def main() -> None:
    """Plans, or trains and prints."""
    options = tyro.cli(Options, description=__doc__)
    count = num_params(options.sizes)
    print(f"model   {count:,} params", flush=True)
    if options.plan:
        plan(options)
        return
    options.store.mkdir(parents=True, exist_ok=True)
    check_disk(options.store, int((BYTES_A_PARAM + EXPORTED_BYTES_A_PARAM) * count))
    began_s = time.monotonic()
    try:
        peak_bytes = run(options)
    finally:
        if not options.keep:
            for name in ("store", "exported"):
                shutil.rmtree(options.store / name, ignore_errors=True)
    print(
        f"peak    {format_bytes(peak_bytes)} resident, limit "
        f"{format_bytes(options.limit)}; {time.monotonic() - began_s:.0f} s in all"
    )


def child(text: str) -> None:
    """Trains with options given as JSON."""
    fields: dict[str, Any] = json.loads(text)
    fields["store"] = Path(fields["store"])
    train(Options(**fields))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        child(sys.argv[2])
    else:
        main()
