"""Kills training runs at random instants, and compares later steps bit for bit.

A small MLP is trained through jaxinf in a process that gets SIGKILL while it makes its
store, opens it, steps, saves a checkpoint or closes, at another instant each time; with
all its state on drives, or all or a part of it in the host's memory between commits.
After each kill the store must open at a step that the run had committed, and is
verified; then training goes on. Every loss of any process is compared, bit for bit,
with those of an undisturbed run.

    python scripts/kill_campaign.py --directory /mnt/nvme0/tmp --kills 200

Ends with a line for each kind of run, and exit status 1 if anything differed.
"""

import argparse
import itertools
import os
import random
import shutil
import signal
import statistics
import sys
import time
import traceback
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxinf
from jaxinf.engine import subgroup_table
from jaxinf.engine.options import Durability
from jaxinf.layout import grid
from jaxinf.store import StoreDirectory, checkpoint_names, verify_step

grid.DEFAULT_CHUNK_ELEMENTS = 4096  # so little data has several
subgroup_table._FULL_RATE_BYTES = 0  # so little memory holds a part of the state
SIZES = (32, 256, 256, 8)
SCHEDULE_STEPS = 40
CHECKPOINT_EVERY = 5
MEMORY = {"little": 600_000, "some": 900_000, "enough": 1 << 22}
"""Memory in which nothing stays, a part of the state, or all of it."""

PHASES = ("creating", "opening", "restoring", "step", "checkpoint", "closing")

_SCHEDULE = optax.warmup_cosine_decay_schedule(0.0, 1e-2, 5, SCHEDULE_STEPS)
OPTIMIZERS = {
    "adamw": optax.adamw(_SCHEDULE),
    "clip, adamw": optax.chain(
        optax.clip_by_global_norm(0.5), optax.adamw(_SCHEDULE, weight_decay=0.1)
    ),
}


@dataclass
class Run:
    """One setting: a store that is trained, killed and opened again.

    Attributes:
      counts: kills by phase, losses that were compared, bits that differed.
      faults: the errors found.
    """

    name: str
    optimizer: str
    num_csds: int
    durability: Durability
    memory_bytes: int
    place: Path
    counts: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)

    @property
    def store(self) -> Path:
        return self.place / "store"

    @property
    def is_made(self) -> bool:
        """Whether it has a committed step."""
        return (self.store / "current").is_symlink()

    @property
    def step(self) -> int:
        """The step that the store opens at; 0 if none is committed yet."""
        with jaxinf.open_store(self.store) as store:
            return store.step

    @property
    def roots(self) -> list[Path]:
        return [self.place / f"csd{number}" for number in range(self.num_csds)]

    def start_over(self) -> None:
        """Removes the store: the next process makes another."""
        shutil.rmtree(self.place, ignore_errors=True)
        for root in self.roots:
            root.mkdir(parents=True)
        self.counts["stores"] += 1

    def damages(self) -> Iterator[str]:
        """Compares the committed step and the checkpoints with their checksums."""
        if self.is_made:
            directory = StoreDirectory.open(self.store)
            names = checkpoint_names(directory)
            for name in ("current", *(f"checkpoints/{name}" for name in names)):
                for damage in verify_step(directory, self.store / name):
                    yield f"{damage.what}: {damage.problem}"


# --- the process that is killed ----------------------------------------------------


def batch_of(step: int):
    numbers = np.random.default_rng(step)
    x = numbers.normal(size=(16, SIZES[0])).astype(np.float32)
    return x, np.tanh(x[:, : SIZES[-1]] * 2).astype(np.float32)


def init_params():
    numbers = np.random.default_rng(0)
    layers = itertools.pairwise(SIZES)
    return [
        {
            "w": jnp.asarray(numbers.normal(size=s) / s[0] ** 0.5, jnp.float32),
            "b": jnp.zeros(s[1]),
        }
        for s in layers
    ]


def loss_of(params, x, y):
    for layer in params[:-1]:
        x = jax.nn.gelu(x @ layer["w"] + layer["b"])
    return jnp.mean((x @ params[-1]["w"] + params[-1]["b"] - y) ** 2)


def train(run: Run, until: int, restore: str | None, say: Callable[..., None]) -> None:
    """Trains a store from its last commit or a checkpoint; reports by `say`."""
    say("restoring" if restore else "opening" if run.is_made else "creating", 0)
    store = jaxinf.open_store(
        run.store,
        csds=run.roots,
        memory_bytes=run.memory_bytes,
        durability=run.durability,
        restore=restore,
        keep_steps=(0, 2),
    )
    tx = jaxinf.smart_update(OPTIMIZERS[run.optimizer], store)

    @jax.jit
    def train_step(params, state, x, y):
        loss, gradients = jax.value_and_grad(loss_of)(params, x, y)
        updates, state = tx.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, loss

    params = init_params()
    if store.exists:
        params = store.params(like=params)
    state = tx.init(params)
    say("held", store.step)
    for step in range(store.step, until):
        say("step", step, store.step)
        params, state, loss = train_step(params, state, *batch_of(step))
        say("loss", step, np.asarray(loss).view(np.uint32))
        if step % CHECKPOINT_EVERY == 2:
            say("checkpoint", step)
            store.checkpoint(state=state)
            say("held", step + 1)
    jax.block_until_ready(state)
    say("closing", until)
    store.close()
    say("closed", until)


def start(run: Run, until: int, restore: str | None = None) -> tuple[int, int]:
    """Forks a process that trains; returns its id and the pipe of its messages."""
    ours, theirs = os.pipe()
    pid = os.fork()
    if pid:
        os.close(theirs)
        return pid, ours
    status = 1
    try:

        def say(*words):
            os.write(theirs, (" ".join(map(str, words)) + "\n").encode())

        train(run, until, restore, say)
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


# --- the campaign ------------------------------------------------------------------


@dataclass
class Said:
    """What a process said before it died or ended.

    Bits of the losses by step, the first step that the store may be at, the last phase
    and step that began, and the status in the form of ``os.waitstatus_to_exitcode``.
    """

    losses: dict[int, int] = field(default_factory=dict)
    held: int = -1
    phase: str = "opening"
    started: int = -1
    status: int = 0


class Campaign:
    """Kills processes and compares their losses with those of undisturbed runs."""

    def __init__(self, options: argparse.Namespace):
        self.num_steps: int = options.num_steps
        self.random = random.Random(options.seed)
        self.durations: dict[str, list[float]] = defaultdict(lambda: [0.5])
        self.references: dict[str, dict[int, int]] = {}
        for name in OPTIMIZERS:
            place = options.directory / "reference"
            run = Run("", name, 0, "step", MEMORY["enough"], place)
            run.start_over()
            said = self.listen(run, None, self.num_steps)
            shutil.rmtree(run.place)
            if said.status or len(said.losses) != self.num_steps:
                raise SystemExit(f"the undisturbed run ended with {said.status}")
            self.references[name] = said.losses

    def attempt(self, run: Run) -> bool:
        """Starts a process and kills it; returns whether that was before its end."""
        phase = self.random.choice(PHASES)
        before, restore = run.step, None
        if before >= self.num_steps or phase == "creating":
            run.start_over()
            before = 0
        at = before
        if phase == "restoring":
            names = checkpoint_names(StoreDirectory.open(run.store)) if at else []
            restore = self.random.choice(names) if names else None
            phase, at = ("step", at) if restore is None else (phase, int(restore))
        elif phase == "opening" and not run.is_made:
            phase = "creating"
        until = min(self.num_steps, at + self.random.randint(1, 8))
        said = self.listen(run, phase, until, restore)
        if said.status == -signal.SIGKILL:
            run.counts.update(("kills", said.phase))
            held = max(said.held, min(before, at))
            self.examine(run, held, max(before, at, said.started + 1))
        elif said.status:
            run.faults.append(f"a run ended with status {said.status}")
            run.start_over()
        return bool(said.status)

    def listen(self, run: Run, phase: str | None, *how: int | str | None) -> Said:
        """Reads a process's messages until its end; kills it in a phase."""
        pid, fd = start(run, *how)  # type: ignore[arg-type]
        said, kill_at, count = Said(), None, self.random.randint(1, 4)
        last = time.monotonic()
        with os.fdopen(fd) as lines:
            for line in lines:
                word, *numbers = line.split()
                now = time.monotonic()
                self.durations[said.phase].append(now - last)
                last = now
                if word == "loss":
                    said.losses[int(numbers[0])] = int(numbers[1])
                    self.compare(run, int(numbers[0]), int(numbers[1]))
                elif word == "held":
                    said.held = max(said.held, int(numbers[0]))
                elif word != "closed":
                    said.phase = word
                    if word == "step":
                        said.started = int(numbers[0])
                        said.held = max(said.held, int(numbers[1]))
                if word == phase and kill_at is None:
                    count -= 1
                    if count < 0 or word != "step":
                        # During the usual time of the phase, or a little later.
                        usual_s = statistics.median(self.durations[word][-20:])
                        time.sleep(self.random.random() * 2 * usual_s)
                        kill_at = now
                        os.kill(pid, signal.SIGKILL)
        said.status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        return said

    def compare(self, run: Run, step: int, bits: int) -> None:
        """Compares a loss with that of the undisturbed run, if it is over."""
        run.counts["losses"] += 1
        difference = bits ^ self.references.get(run.optimizer, {}).get(step, bits)
        if difference:
            run.counts["bits"] += difference.bit_count()
            run.faults.append(f"the loss of step {step} differs")

    def examine(self, run: Run, held: int, may_hold: int) -> None:
        """Opens the store of a killed process and verifies it."""
        try:
            step, damages = run.step, [*run.damages()]
        except Exception as error:
            step, damages = -1, [f"{type(error).__name__}: {error}"]
        if damages:
            run.faults += damages
            run.start_over()
        elif not held <= step <= may_hold:
            run.faults.append(f"opened at step {step}, expected {held} to {may_hold}")


def runs(directory: Path) -> Iterator[Run]:
    """Yields a run for each kind of memory, durability, drives and optimizer."""
    cases = itertools.product(MEMORY, ("step", 4, "checkpoint"), (1, 3), OPTIMIZERS)
    for number, (memory, durability, num_csds, optimizer) in enumerate(cases):
        name = f"{memory} memory, {durability}, {num_csds} CSDs, {optimizer}"
        place = directory / f"run-{number}"
        yield Run(name, optimizer, num_csds, durability, MEMORY[memory], place)


def report(all_runs: list[Run]) -> int:
    """Prints what was found; returns the exit status."""
    for run in all_runs:
        print(
            f"{run.name}: {', '.join(f'{n} {what}' for what, n in run.counts.items())}"
        )
        print(*(f"FAULT {run.name}: {fault}\n" for fault in run.faults), sep="", end="")
    kills, bits = (sum(run.counts[n] for run in all_runs) for n in ("kills", "bits"))
    num_faults = sum(len(run.faults) for run in all_runs)
    print(f"{kills} kills, {bits} mismatching bits, {num_faults} faults")
    return int(num_faults > 0)


def main() -> int:
    """Runs the campaign."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--directory", type=Path, required=True, help="on the drive")
    parser.add_argument("--kills", type=int, default=200, help="processes to kill")
    parser.add_argument("--num-steps", type=int, default=40, help="of a store")
    parser.add_argument("--seed", type=int, default=0, help="of the instants")
    options = parser.parse_args()
    options.directory.mkdir(parents=True, exist_ok=True)
    campaign, all_runs = Campaign(options), [*runs(options.directory)]
    for run in all_runs:
        run.start_over()
    began = time.monotonic()
    for number in range(options.kills):
        while not campaign.attempt(all_runs[number % len(all_runs)]):
            pass
        if (number + 1) % 10 == 0 or number + 1 == options.kills:
            elapsed = time.monotonic() - began
            print(f"{number + 1} kills, {elapsed:.0f} s", flush=True)
    for run in all_runs:
        campaign.listen(run, None, options.num_steps)
    return report(all_runs)


if __name__ == "__main__":
    sys.exit(main())
