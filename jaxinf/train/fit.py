"""The settings of a run that are fastest within limits.

    open flags ─► candidates ─► forecasts ─► those within limits ─► fastest

Invariant: a flag that the user has set stays as it is, and one that may lose bits is
chosen only if the user allows it. What is found obeys every limit.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, get_args

import jax

from jaxinf.command_line import UsageError
from jaxinf.engine import DEFAULT_MEMORY_BYTES
from jaxinf.errors import JaxinfError
from jaxinf.plan import Machine, Rate, read_machine
from jaxinf.program import UpdateProgram
from jaxinf.streaming import Known, LeastMemory
from jaxinf.terminal import exact_bytes, parse_bytes
from jaxinf.train.checks import check
from jaxinf.train.config import TrainConfig
from jaxinf.train.data.loader import Batch
from jaxinf.train.forecast import Forecast, forecast, on_drives
from jaxinf.train.limits import Candidate, Fit, Limits, LossyFlag, difference
from jaxinf.train.optimizers import check_optimizer
from jaxinf.train.progress import Say, unsaid
from jaxinf.train.run_file import words_of_run
from jaxinf.train.sizes import describe_store, optimizer_of, sizes_of
from jaxinf.train.step import loss_of
from jaxinf.train.work import Sketch, num_operations, planned_step

_COMPRESSION = "top_k:0.02"  # as Smart-Infinity's own runs
_PARTS = (2, 4, 8)
_RESIDENT = (1 / 4, 1 / 2)  # of params, beside all and none
_NUM_PLANNED, _NUM_OTHERS = 8, 3
_MIB = 1 << 20
_SHARE = 0.9  # of memory, where no limit is given
_LEAST_BUFFERS_BYTES = 64 * _MIB


def limits_of(
    config: TrainConfig,
    years: float | None = None,
    allowed: Iterable[LossyFlag] = (),
) -> tuple[TrainConfig, Limits]:
    """Returns a run without its limits, and these.

    Args:
      config: Its ``memory`` and ``device_memory`` are limits; by default nine tenths of
        what the machine has.

    Raises:
      UsageError: There is no machine, or a limit has no meaning for it.
    """
    machine = machine_of(config)
    if years is not None and not 0 < years < math.inf:
        raise UsageError(f"--years: expected a finite number above 0, got {years}")
    if machine.device is None and config.device_memory is not None:
        raise UsageError(
            f"--device-memory: machine {machine.name} computes in the host's memory; "
            "give --memory instead"
        )
    device_bytes = config.device_memory
    if machine.device is not None:
        device_bytes = device_bytes or _most(machine.device.memory)
    memory_bytes = config.memory or _most(machine.memory)
    limits = Limits(memory_bytes, device_bytes, years, frozenset(allowed))
    return replace(config, memory=None, device_memory=None), limits


def _most(memory: Rate) -> int:
    return int(memory.value * _SHARE) // _MIB * _MIB


def machine_of(asked: TrainConfig) -> Machine:
    """Reads the machine of a run.

    Raises:
      UsageError: There is none.
    """
    if asked.machine is None:
        raise UsageError(
            "--fit: expected --machine, for what is fastest there; give a file that "
            "'jaxinf doctor --machine FILE' wrote, or a name such as workstation"
        )
    try:
        return read_machine(asked.machine)
    except ValueError as error:
        raise UsageError(f"--machine {asked.machine}: {error}") from error


def first_way(asked: TrainConfig, limits: Limits) -> TrainConfig:
    """Returns the run with settings that do not contradict its flags.

    Raises:
      UsageError: None are; that of the last ones.
    """
    refusal: UsageError | None = None
    for changes in _ways(asked, limits):
        try:
            return check(replace(asked, **changes))
        except UsageError as error:
            refusal = error
    assert refusal is not None, "every mode has settings"
    raise refusal


# --- search --------------------------------------------------------------------------


class Search:
    """Settings of a run, their forecasts, and what is slow to find for both.

    Args:
      config: The run with what its data decides, as `load` returns it.
      asked: The run as the user asks for it, without limits; see `limits_of`.
      batch: A batch of it; only its shapes count.
      machine: Where it shall run; by default the user's ``--machine``.

    Raises:
      UsageError: ``--machine`` names none.
    """

    def __init__(
        self,
        config: TrainConfig,
        asked: TrainConfig,
        batch: Batch,
        machine: Machine | None = None,
        say: Say = unsaid,
    ) -> None:
        self._say = say
        self._config, self._asked, self._batch = config, asked, batch
        self._machine = machine_of(asked) if machine is None else machine
        self._kept: dict[Any, Any] = {}
        self._refusals: list[UsageError | JaxinfError] = []

    def fit(self, limits: Limits, *, measures: bool = False) -> Fit:
        """Finds the fastest settings within limits; blocks, for a minute or so.

        Args:
          measures: Whether the programs of the fastest are compiled and run, and their
            times decide between these.

        Raises:
          UsageError: The machine lacks a rate, or flags contradict each other.
        """
        fitting: list[Candidate] = []
        tried: set[tuple[Any, ...]] = set()
        for candidate in self._fastest_first(limits):
            config, seconds = candidate.config, f"{candidate.found.step_s:.3g}"
            # A sketch does not tell policies apart that compute nothing again.
            key = seconds, config.policy, config.activations
            if key in tried or candidate.excess(limits):
                continue
            tried.add(key)
            self._tell(f"planned {len(fitting)} of {_NUM_PLANNED}; next", config)
            if (planned := self._planned(candidate)) is not None:
                fitting.append(planned)
            if len(fitting) == _NUM_PLANNED:
                break
        fitting.sort(key=lambda one: one.found.step_s)
        if measures:
            fitting = self._measured(_differing(fitting))
        if fitting:
            best, *others = _differing(fitting)
            return Fit(limits, self._machine, best, others[:_NUM_OTHERS])
        refusals = [*self._refusals]  # of plans; candidates begin their own
        found = self.candidates(limits)
        over = [one for one in found if one.excess(limits)]
        nearest = min(over, key=lambda c: _distance(c, limits), default=None)
        changes = dict(self._changes(limits, found))
        refusal = "" if over else str([*refusals, *self._refusals][-1])
        return Fit(limits, self._machine, None, (), nearest, changes, refusal)

    def _measured(self, planned: Sequence[Candidate]) -> list[Candidate]:
        """Returns the first ones with times of their programs, fastest first."""
        found: list[Candidate] = []
        for one in planned:
            self._tell("measuring the programs of", one.config)
            if (measured := self._planned(one, measures=True)) is not None:
                found.append(measured)
            if len(found) == 1 + _NUM_OTHERS:
                break
        return sorted(found, key=lambda one: one.found.step_s)

    def _planned(
        self, sketched: Candidate, *, measures: bool = False
    ) -> Candidate | None:
        """Returns a candidate as its run is planned; None if that is refused."""
        config = replace(self._config, **_changed(sketched.config, self._asked))
        machine = on_drives(self._machine, len(config.csd_root))
        forms = config.mode, config.compress, config.dtype, config.param_dtype
        known = self._kept.get(("known", *forms), Known())
        if config.mode == "stream":
            known = self._least(config).known.over(known)
        try:
            step = planned_step(
                config, self._batch, machine, measures=measures, known=known
            )
        except JaxinfError as error:
            self._refusals.append(error)
            return None
        self._kept["known", *forms] = step.known
        found = forecast(step, config, machine)
        if config.mode != "stream":  # what it takes beside is in the sketch
            found = replace(found, sizes=sketched.found.sizes)
        return replace(sketched, found=found)

    def candidates(self, limits: Limits) -> list[Candidate]:
        """Returns all that can be planned, whether they fit or not; fastest first."""
        return list(self._fastest_first(limits))

    def _fastest_first(self, limits: Limits) -> Iterator[Candidate]:
        """Yields candidates; the memory of each is found when it is its turn."""
        forecasts: list[tuple[TrainConfig, TrainConfig, Machine, Forecast]] = []
        self._refusals.clear()
        params_bytes = sum(x.size * x.dtype.itemsize for x in _leaves(self._config))
        for changes in _ways(self._asked, limits, params_bytes):
            self._say(f"estimated {len(forecasts)} settings")
            try:
                forecasts.append(self._forecast(changes))
            except (UsageError, JaxinfError) as error:
                self._refusals.append(error)
        if not forecasts and all(isinstance(e, UsageError) for e in self._refusals):
            raise self._refusals[-1]
        for asked, config, machine, found in sorted(forecasts, key=_order):
            self._tell("estimating the memory of", asked)
            try:
                yield self._candidate(asked, config, machine, found, limits)
            except JaxinfError as error:  # a program that cannot be streamed
                self._refusals.append(error)

    def _forecast(
        self, changes: Mapping[str, Any]
    ) -> tuple[TrainConfig, TrainConfig, Machine, Forecast]:
        asked = check(replace(self._asked, **changes))
        config = replace(self._config, **changes)
        forms = config.mode, config.compress, config.dtype, config.param_dtype
        self._once(("optimizer", *forms), lambda: check_optimizer(asked))
        operations = self._once(
            ("operations", *forms[2:]), lambda: num_operations(config, self._batch)
        )
        description = None
        if config.mode != "memory":
            description = self._once(
                ("store", *forms[1:]),
                lambda: describe_store(config, update=self._update(config)),
            )
        machine = on_drives(self._machine, len(asked.csd_root))
        stored = config.state, config.master, config.csd_root, config.resident
        sized = *forms, *stored, config.micro_batches, config.order, config.memory

        def sketched() -> Forecast:
            sizes = self._once(("sizes", *sized), lambda: sizes_of(config, description))
            step = Sketch(config, self._batch, operations, sizes)
            return forecast(step, config, machine)

        try:  # beside these a sketch depends on whether it computes again, alone
            again = config.policy == "recompute"
            found = self._once(("sketch", *sized, again), sketched)
        except ValueError as error:
            raise UsageError(f"--machine {asked.machine}: {error}") from error
        return asked, config, machine, found

    def _candidate(
        self,
        asked: TrainConfig,
        config: TrainConfig,
        machine: Machine,
        found: Forecast,
        limits: Limits,
    ) -> Candidate:
        if config.mode == "stream":
            return Candidate(asked, found, *self._streamed_bytes(config, machine))
        host, device = self._held_bytes(config, found), 0
        if machine.device is not None:
            host, device = 0, host
        if config.mode == "update":  # the buffers that there is room for
            most = min(DEFAULT_MEMORY_BYTES, limits.memory_bytes - host)
            buffers = max(_LEAST_BUFFERS_BYTES, most // _MIB * _MIB)
            if buffers != DEFAULT_MEMORY_BYTES:
                asked = replace(asked, memory=buffers)
            host += buffers
        sizes = replace(found.sizes, memory_bytes=host + device)
        return Candidate(asked, replace(found, sizes=sizes), host, device)

    def _held_bytes(self, config: TrainConfig, found: Forecast) -> int:
        """Params, gradients, updates, and activations of a step that is not streamed.

        In mode memory the optimizer's state, too.
        """
        params_bytes = sum(x.size * x.dtype.itemsize for x in _leaves(config))
        buffers = config.buffer_bytes if config.mode == "update" else 0
        working = self._least(config).whole_bytes - params_bytes
        return found.sizes.memory_bytes - buffers + max(0, working)

    def _streamed_bytes(self, config: TrainConfig, machine: Machine) -> tuple[int, int]:
        resident_bytes = 0
        if config.resident == "params":
            resident_bytes = sum(x.size * x.dtype.itemsize for x in _leaves(config))
        elif config.resident is not None:
            resident_bytes = parse_bytes(config.resident)
        return self._least(config).of(
            config.policy,
            config.order,
            resident_bytes,
            has_device=machine.device is not None,
            num_drives=max(1, len(config.csd_root)),
        )

    def _least(self, config: TrainConfig) -> LeastMemory:
        graphdef, params = config.abstract
        loss_fn = loss_of(graphdef, config.task_name, config.frozen)
        parts, has_rows = config.micro_batches, config.compress is None
        update = partial(self._update, config) if has_rows else None
        return self._once(
            ("least", parts, config.dtype, config.param_dtype, has_rows),
            lambda: LeastMemory(loss_fn, params, self._batch, parts, update),
        )

    def _update(self, config: TrainConfig) -> UpdateProgram:
        forms = config.compress, config.dtype, config.param_dtype
        return self._once(("update", *forms), lambda: optimizer_of(config))

    def _tell(self, what: str, asked: TrainConfig) -> None:
        self._say(f"{what} {difference(asked, self._asked) or 'these settings'}")

    def _once(self, key: Any, make: Callable[[], Any]) -> Any:
        if key not in self._kept:
            self._kept[key] = make()
        return self._kept[key]

    # --- where nothing fits ---------------------------------------------------------

    def _changes(
        self, limits: Limits, found: Sequence[Candidate]
    ) -> Iterator[tuple[str, Candidate]]:
        """Yields changes with which something fits, each alone."""
        for name, more in _relaxed(limits, found):
            if (best := self._best(more)) is not None:
                yield name, best
        if limits.years is not None and self._machine.drives:
            drives = self._machine.drives
            more = replace(self._machine, drives=(*drives, replace(drives[0], count=1)))
            asked = self._asked
            if asked.csd_root:
                asked = replace(asked, csd_root=(*asked.csd_root, Path("DRIVE")))
            other = Search(self._config, asked, self._batch, more, self._say)
            if (best := other._best(limits)) is not None:
                yield "one more drive", best
        size = self._asked.batch_size
        while size > 1:
            size //= 2
            batch = jax.tree.map(lambda x, n=size: x[:n], self._batch)
            config = replace(self._config, batch_size=size)
            asked = replace(self._asked, batch_size=size)
            other = Search(config, asked, batch, self._machine, self._say)
            if (best := other._best(limits)) is not None:
                yield f"--batch-size {size}", best
                return

    def _best(self, limits: Limits) -> Candidate | None:
        found = self._fastest_first(limits)
        return next((one for one in found if not one.excess(limits)), None)


def _relaxed(
    limits: Limits, found: Sequence[Candidate]
) -> Iterator[tuple[str, Limits]]:
    """Yields limits in one of which something may fit, with their flag."""
    alone = {
        name: [c for c in found if {*c.excess(limits)} == {name}] for name in _OVER
    }
    if least := min((c.host_bytes for c in alone["--memory"]), default=0):
        least = -(-least // _MIB) * _MIB
        yield f"--memory {exact_bytes(least)}", replace(limits, memory_bytes=least)
    if least := min((c.device_bytes for c in alone["--device-memory"]), default=0):
        least = -(-least // _MIB) * _MIB
        name = f"--device-memory {exact_bytes(least)}"
        yield name, replace(limits, device_bytes=least)
    lives = [c.found.years for c in alone["--years"] if c.found.years is not None]
    if longest := max(lives, default=0.0):
        digits = 10 ** (1 - math.floor(math.log10(longest)))
        years = math.floor(longest * digits) / digits
        yield f"--years {years:g}", replace(limits, years=years)
    for flag in get_args(LossyFlag):
        if flag not in limits.allowed:
            allowed = limits.allowed | {flag}
            yield f"--allow {flag}", replace(limits, allowed=allowed)


def _differing(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Returns the first of those whose times are printed as the same."""
    found: dict[str, Candidate] = {}
    for one in candidates:
        found.setdefault(f"{one.found.step_s:.3g}", one)
    return [*found.values()]


def _changed(one: TrainConfig, other: TrainConfig) -> dict[str, Any]:
    """Returns the fields of a run in which it differs from another."""
    names = [field.name for field in fields(TrainConfig)]
    pairs = {name: (getattr(one, name), getattr(other, name)) for name in names}
    return {name: mine for name, (mine, its) in pairs.items() if mine != its}


_OVER = ("--memory", "--device-memory", "--years")


def _ways(
    asked: TrainConfig, limits: Limits, params_bytes: int = 0
) -> Iterator[dict[str, Any]]:
    """Yields changes of a run that its flags leave open.

    Args:
      params_bytes: Its params, if a part of them may stay.
    """
    default = {f.name: f.default for f in fields(TrainConfig)}

    def free(name: str, *others: Any) -> Sequence[Any]:
        mine = getattr(asked, name)
        return (mine, *others) if mine == default[name] else (mine,)

    def lossy(flag: LossyFlag, *others: Any) -> Sequence[Any]:
        name = flag.replace("-", "_")
        return free(name, *others) if flag in limits.allowed else free(name)

    roots = [asked.csd_root[:n] for n in range(1, len(asked.csd_root) + 1)] or [()]
    exact: dict[str, Sequence[Any]] = {
        "dtype": lossy("dtype", "bfloat16"),
        "param_dtype": lossy("param-dtype", "bfloat16"),
    }
    stored = {
        **exact,
        "store": [asked.store or Path("STORE")],
        "csd_root": roots,
        "state": lossy("state", "bf16", "int8"),
        "compress": lossy("compress", _COMPRESSION),
        "master": lossy("master", "none"),
    }
    parts_bytes = (int(share * params_bytes) // _MIB * _MIB for share in _RESIDENT)
    some = [exact_bytes(num_bytes) for num_bytes in parts_bytes if num_bytes]
    parts = [n for n in _PARTS if asked.batch_size % n == 0]
    streamed = {
        **stored,
        "memory": [limits.memory_bytes],
        "device_memory": [limits.device_bytes],
        "policy": free("policy", "keep", "offload", "plan"),
        "activations": lossy("activations", "bf16", "int8"),
        "resident": free("resident", "params", *some),
        "micro_batches": free("micro_batches", *parts),
        "order": free("order", "layers"),
    }
    for mode in free("mode", "memory", "stream"):
        dims = {"memory": exact, "update": stored, "stream": streamed}[mode]
        for values in product(*dims.values()):
            yield dict(zip(dims, values, strict=True), mode=mode)


def _leaves(config: TrainConfig) -> list[Any]:
    return jax.tree.leaves(config.abstract[1])


def _order(
    one: tuple[TrainConfig, TrainConfig, Machine, Forecast],
) -> tuple[float, int, int]:
    """The fastest first; of equally fast ones those with the fewest flags."""
    asked, _, _, found = one
    return float(f"{found.step_s:.4g}"), len(words_of_run(asked)), asked.micro_batches


def _distance(candidate: Candidate, limits: Limits) -> float:
    whole = {
        "--memory": limits.memory_bytes,
        "--device-memory": limits.device_bytes or 1,
        "--years": limits.years or 1,
    }
    return sum(amount / whole[n] for n, amount in candidate.excess(limits).items())
