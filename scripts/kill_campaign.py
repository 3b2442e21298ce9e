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

import itertools
import os
import random
import shutil
import signal
import statistics
import struct
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro

import jaxinf
from jaxinf.engine import shape
from jaxinf.engine.options import Durability
from jaxinf.errors import StoreCorruptError
from jaxinf.layout import choose
from jaxinf.store import StoreDirectory, checkpoint_names, verify_step

choose.DEFAULT_CHUNK_ELEMENTS = 4096  # so little data has several
shape._QUICK_BYTES = 0  # so little memory holds a part of the state
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


@dataclass(frozen=True)
class Options:
    """Kills training runs at random instants, and compares later steps bit for bit.

    Attributes:
      directory: directory for the stores, on the drive to test.
      kills: number of processes to kill.
      num_steps: number of steps of a store before it is made anew.
      seed: seed of the instants, which also depend on the machine.
    """

    directory: Path
    kills: int = 200
    num_steps: int = 40
    seed: int = 0


@dataclass
class Run:
    """One setting: a store that is trained, killed and opened again.

    Attributes:
      lost: number of steps that had to be repeated, for each kill.
      faults: the errors found.
    """

    name: str
    optimizer: str
    num_csds: int
    durability: Durability
    memory_bytes: int
    place: Path
    counts: Counter[str] = field(default_factory=Counter)
    lost: list[int] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)

    @property
    def store(self) -> Path:
        """The store's directory."""
        return self.place / "store"

    @property
    def roots(self) -> list[Path]:
        """Its CSD roots."""
        return [self.place / f"csd{number}" for number in range(self.num_csds)]

    def start_over(self) -> None:
        """Removes the store: the next process makes another."""
        shutil.rmtree(self.place, ignore_errors=True)
        for root in self.roots:
            root.mkdir(parents=True)
        self.counts["stores"] += 1


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


def train(run: Run, until: int, restore: str | None, say) -> None:
    """Trains a store from its last commit or a checkpoint; reports by `say`."""
    is_made = (run.store / "current").is_symlink()
    say("restoring" if restore else "opening" if is_made else "creating", 0)
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
        say("loss", step, struct.unpack("<I", struct.pack("<f", float(loss)))[0])
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
    finally:
        if status:
            import traceback

            traceback.print_exc()
        os._exit(status)


# --- the campaign ------------------------------------------------------------------


@dataclass
class Said:
    """The messages of a process before it died or ended.

    Attributes:
      losses: bits of the losses by step.
      held, may_hold: first and last step that the store may be at.
      phase: the last phase that began.
      started: the last step that began.
      status: exit status in the form of ``os.waitstatus_to_exitcode``.
    """

    losses: dict[int, int] = field(default_factory=dict)
    held: int = -1
    may_hold: int = -1
    phase: str = "opening"
    started: int = -1
    status: int = 0


class Campaign:
    """Kills processes and compares their losses.

    Args:
      options: the command line's options.
    """

    def __init__(self, options: Options):
        self.options = options
        self.random = random.Random(options.seed)
        self.durations: dict[str, list[float]] = defaultdict(lambda: [0.5])
        self.runs = list(_runs(options.directory))
        self.references: dict[str, dict[int, int]] = {}

    def run(self) -> bool:
        """Runs the campaign; returns whether there was no error."""
        for name in OPTIMIZERS:
            self.references[name] = self._reference(name)
        for run in self.runs:
            run.start_over()
        began = time.monotonic()
        for number in range(self.options.kills):
            run = self.runs[number % len(self.runs)]
            while not self._attempt(run):
                pass
            if (number + 1) % 10 == 0 or number + 1 == self.options.kills:
                elapsed = time.monotonic() - began
                print(f"{number + 1} kills, {elapsed:.0f} s", flush=True)
        for run in self.runs:
            self._listen(*start(run, self.options.num_steps), run, None)
        return self._report()

    def _reference(self, optimizer: str) -> dict[int, int]:
        run = Run(
            "reference",
            optimizer,
            0,
            "step",
            MEMORY["enough"],
            self.options.directory / "reference",
        )
        run.start_over()
        said = self._listen(*start(run, self.options.num_steps), None, None)
        shutil.rmtree(run.place)
        if said.status or len(said.losses) != self.options.num_steps:
            raise SystemExit(f"the undisturbed run ended with status {said.status}")
        return said.losses

    def _attempt(self, run: Run) -> bool:
        """Starts a process and kills it; returns whether that was before its end."""
        phase = self.random.choice(PHASES)
        before, restore = _step_of(run), None
        if before >= self.options.num_steps or phase == "creating":
            run.start_over()
            before = 0
        at = before
        if phase == "restoring":
            restore = self._checkpoint_of(run)
            phase, at = ("step", at) if restore is None else (phase, int(restore))
        elif phase == "opening" and not (run.store / "current").is_symlink():
            phase = "creating"
        until = min(self.options.num_steps, at + self.random.randint(1, 8))
        said = self._listen(*start(run, until, restore), run, phase)
        said.held = max(said.held, min(before, at))
        said.may_hold = max(before, at, said.started + 1)
        killed = said.status == -signal.SIGKILL
        if said.status and not killed:
            run.faults.append(f"a run ended with status {said.status}")
            run.start_over()
        elif killed:
            run.counts.update(("kills", said.phase))
            self._examine(run, said)
        return killed or bool(said.status)

    def _checkpoint_of(self, run: Run) -> str | None:
        """Returns a checkpoint to restore, or None if there is none."""
        if not (run.store / "current").is_symlink():
            return None
        names = checkpoint_names(StoreDirectory.open(run.store))
        return self.random.choice(names) if names else None

    def _listen(self, pid: int, fd: int, run: Run | None, phase: str | None) -> Said:
        """Reads a process's messages until its end; kills it in a phase."""
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
                    if run is not None:
                        self._compare(run, int(numbers[0]), int(numbers[1]))
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
                        kill_at = now
                        self._kill_later(pid, word)
        said.status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        return said

    def _kill_later(self, pid: int, phase: str) -> None:
        """Kills a process during the usual time of a phase, or a little later."""
        usual_s = statistics.median(self.durations[phase][-20:])
        time.sleep(self.random.random() * 2 * usual_s)
        os.kill(pid, signal.SIGKILL)

    def _compare(self, run: Run, step: int, bits: int) -> None:
        run.counts["losses"] += 1
        difference = bits ^ self.references[run.optimizer][step]
        if difference:
            run.counts["bits"] += difference.bit_count()
            run.faults.append(f"the loss of step {step} differs")

    def _examine(self, run: Run, said: Said) -> None:
        """Opens the store of a killed process and verifies it."""
        try:
            step = _step_of(run)
            _verify(run)
        except Exception as error:
            run.faults.append(f"{type(error).__name__}: {error}")
            run.start_over()
            return
        if not said.held <= step <= said.may_hold:
            run.faults.append(
                f"opened at step {step}, expected {said.held} to {said.may_hold}"
            )
        if said.started >= 0:
            run.lost.append(max(0, said.started + (said.started in said.losses) - step))

    def _report(self) -> bool:
        columns = ("kills", *PHASES, "stores", "losses", "bits")
        for run in self.runs:
            counts = ", ".join(f"{run.counts[name]} {name}" for name in columns)
            lost = statistics.fmean(run.lost) if run.lost else 0.0
            most = max(run.lost, default=0)
            print(f"{run.name}: {counts}; {lost:.2f} steps lost, {most} at most")
        faults = [f"{run.name}: {fault}" for run in self.runs for fault in run.faults]
        kills, bits = (sum(r.counts[n] for r in self.runs) for n in ("kills", "bits"))
        print(f"{kills} kills, {bits} mismatching bits, {len(faults)} faults")
        for fault in faults:
            print(f"FAULT {fault}")
        return not faults


def _runs(directory: Path) -> Iterator[Run]:
    cases = itertools.product(MEMORY, ("step", 4, "checkpoint"), (1, 3), OPTIMIZERS)
    for number, (memory, durability, num_csds, optimizer) in enumerate(cases):
        name = f"{memory} memory, {durability}, {num_csds} CSDs, {optimizer}"
        place = directory / f"run-{number}"
        yield Run(name, optimizer, num_csds, durability, MEMORY[memory], place)


def _step_of(run: Run) -> int:
    """Returns the step that a store opens at; 0 if none is committed yet."""
    with jaxinf.open_store(run.store) as store:
        return store.step


def _verify(run: Run) -> None:
    """Compares the committed step and the checkpoints with their checksums."""
    if not (run.store / "current").is_symlink():
        return
    directory = StoreDirectory.open(run.store)
    damages = verify_step(directory, run.store / "current")
    for name in checkpoint_names(directory):
        damages += verify_step(directory, run.store / "checkpoints" / name)
    if damages:
        raise StoreCorruptError("; ".join(f"{d.what}: {d.problem}" for d in damages))


def main(options: Options) -> int:
    options.directory.mkdir(parents=True, exist_ok=True)
    return 0 if Campaign(options).run() else 1


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Options, description=__doc__)))
