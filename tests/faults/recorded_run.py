"""Records a small run, and recovers its crash states with the real code.

Invariant: a crash state has the store's directory at its recorded path, because the
symlinks to CSD roots are absolute.
"""

import shutil
from functools import cache, partial

import optax
import store_driver
from disk_model import frozen, materialise
from disk_recorder import Recorder
from store_driver import Driver

from jaxinf.errors import JaxinfError
from jaxinf.kernels import compiled
from jaxinf.store import (
    checkpoint_names,
    find_step,
    other_slot,
    read_held_steps,
    verify_step,
)

LEAVES = {
    "bias": ((129,), "float32"),
    "embed": ((5, 1025), "float32"),
    "half": ((33, 65), "bfloat16"),
    "scale": ((), "float32"),
}
NEW = "new"
FROZEN = ("bias", "half")


class Mixture(AssertionError):
    """A crash state was recovered as neither of the two possible steps."""


class FrozenDriver(Driver):
    """A driver of a store with leaves that no step changes, without momentum."""

    def expected(self, step):
        states = super().expected(step)
        for name in FROZEN:
            states[name] = (self.initial[name].astype("float32"),)
        return states


@cache
def _described(is_partly_frozen):
    """Traces and compiles once, outside the recording: it takes longer than a recovery,
    and writes files that are not the store's."""
    tx = store_driver.TX
    if is_partly_frozen:
        labels = {name: "freeze" if name in FROZEN else "train" for name in LEAVES}
        tx = optax.partition({"train": tx, "freeze": optax.set_to_zero()}, labels)
    description = Driver("/nonexistent/store", LEAVES, tx).description
    for leaf in description.leaves:
        compiled(leaf.kernel)
    return description


def small_driver(path, *, is_partly_frozen=False, **options):
    kind = FrozenDriver if is_partly_frozen else Driver
    traced = store_driver.described
    description = _described(is_partly_frozen)
    store_driver.described = lambda params, tx: description
    try:
        options = {"memory_bytes": 1 << 20} | options
        return kind(path, LEAVES, num_workers=1, **options)
    finally:
        store_driver.described = traced


class RecordedRun:
    """A run below a directory, recorded from the creation of its store on.

    Each CSD root is a file system of its own. The script is called with the driver and
    the log's `mark`; the options are also those of a recovery.
    """

    def __init__(self, place, num_csds, script, *, is_partly_frozen=False, **options):
        self.place = place
        self._make = partial(small_driver, is_partly_frozen=is_partly_frozen, **options)
        roots = [place / f"csd{number}" for number in range(num_csds)]
        for root in roots:
            root.mkdir()
        _described(is_partly_frozen)
        with Recorder(place, roots) as recorder:
            driver = self._make(place / "store", csds=roots)
            script(driver, lambda step, *names: recorder.log.mark((step, names)))
            driver.engine.close()
            recorder.check()
        self.log = recorder.log
        self.num_mixed_spares = 0  # spare slots with an old record but newer chunks
        self._outcomes: dict[frozenset, object] = {}

    def _spare_is_whole(self, driver):
        """Whether the step of the spare slot is complete."""
        files = driver.files.directory
        slot = other_slot(files.committed_slot())
        if (spare := read_held_steps(files).spare) is None:
            return True
        if verify_step(files, files.step_path(slot)):
            self.num_mixed_spares += 1
            return True
        return holds(driver, slot, spare.step)

    @property
    def num_states(self):
        return len(self._outcomes)

    def check(self, cut, chosen, *, goes_on=False):
        """Recovers a crash state, whose chosen pending pieces reached the drive.

        It must be the last commit known to be durable, or the next one.
        """
        disk = cut.state(chosen)
        state = frozen(disk)
        if state not in self._outcomes or goes_on:
            self.put(disk)
            self._outcomes[state] = self._recovered(goes_on=goes_on)
        found, (last, coming) = self._outcomes[state], self.log.known_at(cut.number)
        allowed = ((NEW, ()) if last is None else last, coming)
        if found not in allowed:
            raise Mixture(
                f"cut after operation {cut.number}, with {sorted(chosen)} of "
                f"{cut.pending}: expected {allowed}, found {found}"
            )

    def put(self, disk):
        for entry in self.place.iterdir():
            shutil.rmtree(entry)
        materialise(self.log.kinds, disk, self.place)

    def _recovered(self, *, goes_on):
        """Returns the recovered step or `NEW`, and the checkpoints; or the error."""
        try:
            driver = self._make(self.place / "store")
        except JaxinfError as error:
            return f"{type(error).__name__}: {error}"
        try:
            if not driver.store.exists:
                driver.init()
                is_new = is_whole(driver, 0)
                return (NEW, ()) if is_new else "no new store could be made"
            step = driver.store.step
            if not is_whole(driver, step):
                return f"a mixture that says it is step {step}"
            if not self._spare_is_whole(driver):
                return f"step {step}, and a mixture in the other slot that verifies"
            names = "*.new", "slots/*/.*.tmp"
            if leftovers := [f for name in names for f in self.place.rglob(name)]:
                return f"step {step}, and {leftovers}"
            if goes_on and not is_whole(driver.init().steps(1), step + 1):
                return f"step {step}, and a mixture after it"
            return step, checkpoints_of(driver)
        finally:
            driver.engine.close()


def checkpoints_of(driver):
    files, names = driver.files.directory, []
    for name in checkpoint_names(files):
        path = files.step_path(f"checkpoints/{name}")
        damages = verify_step(files, path, num_threads=1)
        step = find_step(files, name).commit.step
        label = name if name == str(step) else f"{name} of {step}"
        names.append(f"{label}, damaged" if damages else label)
    return tuple(names)


def is_whole(driver, step):
    """Whether the committed slot holds a step, bit for bit, and its record agrees."""
    driver.store.wait()
    files = driver.files.directory
    slot = files.committed_slot()
    if verify_step(files, files.step_path(slot), num_threads=1):
        return False
    return holds(driver, slot, step) and driver.store.step == step


def holds(driver, slot, step):
    found = driver.found(driver.files.directory.step_path(slot))
    for name, arrays in driver.expected(step).items():
        for held, wanted in zip(found[name], arrays, strict=True):
            if held.tobytes() != wanted.astype(held.dtype).tobytes():
                return False
    return True
