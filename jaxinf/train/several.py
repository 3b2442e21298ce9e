"""What a run in several processes would take: bytes of hosts and links, and failures.

     members of N processes ─► updates of each ─► bytes of its drives ─┐
     leaves ─► what is summed and gathered ─► bytes of its link ───────┴─► a step's time

Invariant: nothing is written. Bytes of drives are those of the members' layout; the
  time is that of the process that moves most, on the same clock as that of one process.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

import jax
from rich.console import Console

from jaxinf.command_line import UsageError
from jaxinf.plan import Machine, Rate, read_machine
from jaxinf.terminal import format_bytes, printable
from jaxinf.train.config import TrainConfig
from jaxinf.train.data.loader import Batch
from jaxinf.train.forecast import Forecast, forecast, on_drives
from jaxinf.train.freezing import names_of
from jaxinf.train.processes import sharded_dimension
from jaxinf.train.sizes import LeafUpdate, Sizes, member_sizes, steps_per_commit
from jaxinf.train.work import Rates, Sketch, num_operations
from jaxinf.typing import FLOAT32, JsonValue

_ROUND_TRIPS = 2
"""Of a commit: to the meeting of all, and to hear that none has failed."""

_YEAR_S = 365.25 * 86_400


@dataclass(frozen=True)
class Host:
    """What a process moves in a step, and keeps."""

    disk_bytes: int
    read_bytes: tuple[int, ...]
    written_bytes: tuple[int, ...]


@dataclass(frozen=True)
class Links:
    """What collectives move in a step.

    Attributes:
      summed_bytes: Arrays that are summed over all processes, which all have then:
        gradients and updates of leaves that are replicated.
      parts_bytes: Arrays of which each has a part before, or after: params that are
        gathered, and sums of gradients of sharded leaves.
      sent_bytes: What each process sends, and receives: of whole sums twice a share of
        (N - 1) / N, of parts once.
    """

    summed_bytes: int
    parts_bytes: int
    sent_bytes: int

    @classmethod
    def of(cls, summed: int, parts: int, count: int) -> "Links":
        """Returns those of so many processes."""
        share = (count - 1) / count
        return cls(summed, parts, round((2 * summed + parts) * share))


@dataclass(frozen=True)
class Failures:
    """What failures take, each of which stops all processes.

    Attributes:
      lost_s: Seconds that one takes, on average, with the restart.
    """

    per_day: float
    lost_steps: float
    lost_s: float
    share: float

    @classmethod
    def of(
        cls,
        per_year: float,
        count: int,
        *,
        step_s: float,
        commit_s: float,
        steps_per_commit: float,
        restart_s: float,
    ) -> "Failures":
        """Computes them.

        A step is durable `commit_s` after it ends, and commits are `steps_per_commit`
        steps apart. So a failure at any time finds half of these steps undone, on
        average, and as much more as is done while a commit is under way.

        Args:
          restart_s: Time from a failure to the next step.
        """
        lost_steps = steps_per_commit / 2 + commit_s / step_s
        lost_s = lost_steps * step_s + restart_s
        per_s = per_year * count / _YEAR_S
        share = per_s * lost_s / (1 + per_s * lost_s)
        return cls(per_s * 86_400, lost_steps, lost_s, share)


@dataclass(frozen=True)
class SeveralPlan:
    """A run in several processes, one on each host, and what it takes.

    Attributes:
      machine: What each host is; None if that is not said, and times are unknown.
      found: The forecast of the process that moves most, with links and round trips.
      link_s: Seconds of collectives in a step, beside which nothing else is counted.
      commit_s: Seconds of a commit, with its round trips.
      failures: What failures take; None if no rate is given.
    """

    hosts: Sequence[Host]
    links: Links
    memory_bytes: int
    machine: Machine | None = None
    found: Forecast | None = None
    link_s: float = 0.0
    commit_s: float = 0.0
    failures: Failures | None = None

    def to_json(self) -> dict[str, JsonValue]:
        """For ``--json``."""
        document: dict[str, JsonValue] = {
            "processes": len(self.hosts),
            "hosts": [asdict(one) for one in self.hosts],
            "links": asdict(self.links),
            "memory_bytes": self.memory_bytes,
            "commit_round_trips": _ROUND_TRIPS if len(self.hosts) > 1 else 0,
        }
        if self.machine is not None and self.found is not None:
            document["machine"] = self.machine.name
            document["forecast"] = asdict(self.found)
            document["link_s"] = self.link_s
            document["commit_s"] = self.commit_s
        if self.failures is not None:
            document["failures"] = asdict(self.failures)
        return document

    def print(self, console: Console) -> None:
        links = self.links
        lines = [
            f"hosts   {len(self.hosts)}, with a process each",
            f"memory  {format_bytes(self.memory_bytes)} of buffers, params, gradients, "
            "and updates, on each",
            f"disk    {_range([one.disk_bytes for one in self.hosts])} on each",
            f"drives  {_range([sum(one.read_bytes) for one in self.hosts])} read and "
            f"{_range([sum(one.written_bytes) for one in self.hosts])} written a step, "
            "on each",
            f"links   {format_bytes(links.sent_bytes)} sent by each a step: sums of "
            f"{format_bytes(links.summed_bytes)}, parts of "
            f"{format_bytes(links.parts_bytes)}",
        ]
        if self.found is None or self.machine is None:
            lines.append(
                "time    unknown: give --machine FILE, with the rates network and "
                "round_trips"
            )
        else:
            phases = [f"{n} {s:.3g} s" for n, s in self.found.phases.items()]
            lines += [
                f"time    {self.found.step_s:.3g} s a step, predicted for "
                f"{printable(self.machine.name)}",
                f"        {', '.join(phases)}, links {self.link_s:.3g} s",
                f"commit  {self.commit_s:.3g} s, {_ROUND_TRIPS} round trips in it",
            ]
            if self.found.guesses:
                guesses = ", ".join(self.found.guesses)
                lines.append(f"guess   rests on guesses: {guesses}")
        if self.failures is not None:
            lost = self.failures
            lines.append(
                f"failure {lost.per_day:.3g} a day, each of which takes "
                f"{lost.lost_steps:.3g} steps and the restart, {lost.lost_s:.3g} s: "
                f"{100 * lost.share:.2g} % of the time"
            )
        lines.append("nothing was trained or written")
        console.print("\n".join(lines), markup=False, highlight=False)


def plan_several(
    config: TrainConfig,
    batch: Batch,
    count: int,
    *,
    is_sharded: bool = False,
    failures: float | None = None,
    restart_s: float = 60.0,
) -> SeveralPlan:
    """Plans a run in several processes, each with one JAX device and its own drives.

    Args:
      config: A run in ``--mode update`` that `check` has returned; its `machine` is
        each host.
      batch: The batch of one process; only its shapes count.
      failures: Failures of one host in a year; None for none.
      restart_s: Time from a failure to the next step.

    Raises:
      UsageError: ``--machine`` names none, or one that lacks a rate; or failures are
        asked for without times, or without commits.
      JaxinfError: As `sizes_of`.
    """
    found = member_sizes(config, count, is_sharded=is_sharded)
    links = _links(config, count, is_sharded=is_sharded)
    num_drives = max(1, len(config.csd_root))
    plan = SeveralPlan(
        [_host(sizes, updates, num_drives) for sizes, updates in found],
        links,
        found[0][0].memory_bytes,
    )
    if config.machine is None:
        if failures is not None:
            raise UsageError("--failures: expected with --machine; name one")
        return plan
    busiest = max(found, key=lambda one: one[0].read_bytes + one[0].written_bytes)
    try:
        given = on_drives(read_machine(config.machine), len(config.csd_root))
        machine = given if count == 1 else _with_round_trips(given)
        sketch = Sketch(config, batch, num_operations(config, batch), busiest)
        alone = forecast(sketch, config, machine)
        rates, link_s = Rates(config, machine), 0.0
        if count > 1:
            link_s = links.sent_bytes / _needed(given, "network").value
        commit_s = sketch.work(rates).commit_s
    except ValueError as error:
        raise UsageError(f"--machine {config.machine}: {error}") from error
    names = [n for n in ("network", "round_trips") if count > 1]
    guesses = [n for n in names if _needed(given, n).basis == "guessed"]
    step_s = alone.step_s + link_s
    forecasted = replace(alone, step_s=step_s, guesses=(*alone.guesses, *guesses))
    lost = None
    if failures is not None:
        lost = Failures.of(
            failures,
            count,
            step_s=step_s,
            commit_s=commit_s,
            steps_per_commit=_mean_steps_per_commit(config),
            restart_s=restart_s,
        )
    return replace(
        plan,
        machine=given,
        found=forecasted,
        link_s=link_s,
        commit_s=commit_s,
        failures=lost,
    )


def _host(sizes: Sizes, updates: Sequence[LeafUpdate], num_drives: int) -> Host:
    read: defaultdict[int, float] = defaultdict(float)
    written: defaultdict[int, float] = defaultdict(float)
    for one in updates:
        read[one.drive] += one.read_bytes
        written[one.drive] += one.written_bytes
    drives = range(num_drives)
    return Host(
        sizes.disk_bytes,
        tuple(round(read[n]) for n in drives),
        tuple(round(written[n]) for n in drives),
    )


def _links(config: TrainConfig, count: int, *, is_sharded: bool) -> Links:
    """Returns what one step sums and gathers.

    All sum the gradients. The owner of a chunk of a replicated leaf has its updates,
    and the sum of the bits gives them to all. A sharded leaf is gathered before forward
    and kept until its backward, and each has its part of the gradient.
    """
    params, frozen = config.abstract[1], config.frozen
    summed = parts = 0
    for name, leaf in zip(names_of(params), jax.tree.leaves(params), strict=True):
        is_trained = not frozen or name not in frozen
        num_bytes = leaf.size * leaf.dtype.itemsize
        if is_sharded and sharded_dimension(leaf.shape, count) is not None:
            parts += (1 + is_trained) * num_bytes
        elif is_trained:
            summed += num_bytes + leaf.size * FLOAT32.itemsize
    return Links.of(summed, parts, count)


def _with_round_trips(machine: Machine) -> Machine:
    trip = _needed(machine, "round_trips")
    commit_s = _ROUND_TRIPS / trip.value
    if machine.commits is not None:
        commit_s += 1 / machine.commits.value
    commits = Rate(1 / commit_s, f"with round trips: {trip.source}", trip.basis)
    return replace(machine, commits=commits)


def _needed(machine: Machine, field: str) -> Rate:
    rate: Rate | None = getattr(machine, field)
    if rate is None:
        raise ValueError(f"machine {machine.name}: expected a rate {field}, found none")
    return rate


def _mean_steps_per_commit(config: TrainConfig) -> float:
    found = steps_per_commit(config)
    if found is None:
        raise UsageError(
            "--failures: expected commits, found --durability checkpoint without "
            "--checkpoint-every; a failure would take the whole run"
        )
    return found


def _range(values: Sequence[int]) -> str:
    least, most = min(values), max(values)
    if format_bytes(least) == format_bytes(most):
        return format_bytes(most)
    return f"{format_bytes(least)} to {format_bytes(most)}"
