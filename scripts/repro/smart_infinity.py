"""A model of Smart-Infinity's testbed (HPCA 2024): the time of an iteration.

    forward ─► backward ─► gradients to the drives ─► update ─► forward

    BASE       state and gradients over the shared link, Adam on the host's CPU, back
    SU, SU+O   on each CSD: read gradient and state, kernel, write state;
               then the new params over the shared link
    SU+O+C     the same with compressed gradients, which a decompressor expands

Each resource is one server: a drive either reads or writes, and the CSDs share a link.
The phases of an update follow one another, because the published times require it: if
only the busiest server counted (`overlap`), SU+O would take 0.56 to 0.71 of the seconds
in figures 9 and 10.

Invariant: seconds are linear in the number of params; no rate depends on a method.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

Method = Literal["BASE", "SU", "SU+O", "SU+O+C"]
"""ZeRO-Infinity; update near storage; with the overlapping handler; compressed."""

METHODS: tuple[Method, ...] = ("BASE", "SU", "SU+O", "SU+O+C")

Server = Literal["gpu", "cpu", "link", "drive", "kernel"]


class Rate(NamedTuple):
    """A number, who says so, and how it is known ("fitted": to published times)."""

    value: float
    source: str
    basis: Literal["published", "fitted", "guessed"] = "published"


@dataclass(frozen=True)
class Testbed:
    """Drives, the processor beside each, the link that they share, and the host.

    Attributes:
      read, write: of a drive as its host has it, in bytes/s.
      card_read, card_write: of a drive by the processor beside it, in bytes/s.
      kernel: of an update's input of state and gradient, in bytes/s.
      decompressor: of its output of dense gradient, in bytes/s.
      link: in bytes/s.
      update: params/s of Adam in fp32 on all cores of the host.
    """

    read: Rate
    write: Rate
    card_read: Rate
    card_write: Rate
    kernel: Rate
    decompressor: Rate
    link: Rate
    update: Rate


@dataclass(frozen=True)
class Gpu:
    """An accelerator, for the paper's batch of 4 sequences.

    Attributes:
      forward_s: seconds of the forward pass, per param.
      backward_s: seconds of the backward pass with recomputation, per param.
      select_s: seconds for choosing the largest gradients, per param.
    """

    forward_s: Rate
    backward_s: Rate
    select_s: Rate


@dataclass(frozen=True)
class Workload:
    """A model and its optimizer.

    Attributes:
      num_params: number of params of the model.
      state_bytes: bytes of state per param, with the master: 12 for Adam, 8 for SGD
        with momentum.
      gradient_bytes: bytes of gradient per param, on the drives.
      param_bytes: bytes per param that return to the host.
      sent_ratio: share of the gradients' bytes that compression sends, with indices.
    """

    num_params: float
    state_bytes: float = 12
    gradient_bytes: float = 4
    param_bytes: float = 4
    sent_ratio: float = 0.02


class Phase(NamedTuple):
    """A part of an iteration.

    Attributes:
      name: its name.
      server: the resource in use; a drive or kernel stands for that of every CSD.
      seconds: its duration.
    """

    name: str
    server: Server
    seconds: float


_FIT = "fitted to the seconds of figure 9, GPT-2 4.0B"
_FIGURE_14 = "Smart-Infinity, figure 14"

TESTBED = Testbed(
    read=Rate(3.2e9, "fitted near section III: about 3 GB/s", "fitted"),
    write=Rate(2.47e9, "fitted to the times of BASE", "fitted"),
    card_read=Rate(2.79e9, _FIGURE_14),
    card_write=Rate(1.65e9, _FIGURE_14),
    kernel=Rate(8.22e9, _FIGURE_14),
    decompressor=Rate(2.93e9, _FIGURE_14),
    link=Rate(8e9, "section III: measured over the expansion's one link"),
    update=Rate(1 / 0.9e-9, _FIT, "fitted"),
)
"""Up to ten SmartSSDs behind one PCIe 3.0 x16 expansion, a Xeon Gold 6342."""

BUFFERS_S = Rate(0.22e-9, _FIT, "fitted")
"""Seconds of SU for allocating its buffers, per param."""

A5000 = Gpu(
    forward_s=Rate(0.165e-9, _FIT, "fitted"),
    backward_s=Rate(0.85e-9, _FIT, "fitted"),
    select_s=Rate(0.19e-9, _FIT, "fitted"),
)

A100 = Gpu(
    forward_s=Rate(0.04e-9, "fitted, in the A5000's proportion", "fitted"),
    backward_s=Rate(0.21e-9, "fitted to +C over BASE at 10 CSDs, 2.11", "fitted"),
    select_s=Rate(0.19e-9, "that of the A5000: the paper has no other", "fitted"),
)


def gpus_of_figure_17(base_s: float, workload: Workload, num_csds: int) -> Gpu:
    """Returns the GPUs of figure 17, with the rest of BASE's iteration as their time.

    There tensor parallelism shares the expansion's link with the CSDs. The GPUs' part
    of the link is not published, so it counts as their time.
    """
    none = Rate(0.0, "counted in backward_s")
    idle = Gpu(none, none, none)
    left_s = base_s - iteration_s(TESTBED, idle, workload, "BASE", num_csds)
    backward = Rate(left_s / workload.num_params, "from BASE of figure 17", "fitted")
    return Gpu(none, backward, A5000.select_s)


def phases(
    testbed: Testbed, gpu: Gpu, workload: Workload, method: Method, num_csds: int
) -> tuple[Phase, ...]:
    """Returns the phases of an iteration, in order.

    Args:
      testbed: storage and host.
      gpu: the accelerator.
      workload: the model and its optimizer.
      method: the method of the update.
      num_csds: number of drives for BASE, of CSDs for the others.

    Raises:
      ValueError: the method is unknown, or there is less than one CSD.
    """
    if method not in METHODS:
        raise ValueError(f"method={method!r}: expected one of {', '.join(METHODS)}")
    if num_csds < 1:
        raise ValueError(f"num_csds={num_csds}: expected 1 or more")
    num = workload.num_params
    is_compressed = method == "SU+O+C"
    sent_bytes = num * workload.gradient_bytes
    sent_bytes *= workload.sent_ratio if is_compressed else 1
    to_drives = _host_write(testbed, num_csds)
    before = [
        Phase("forward", "gpu", num * gpu.forward_s.value),
        Phase("backward", "gpu", num * gpu.backward_s.value),
        Phase("write gradients", "link", sent_bytes / to_drives),
    ]
    if is_compressed:
        before.append(Phase("select", "gpu", num * gpu.select_s.value))
    if method == "BASE":
        return (*before, *_update_on_host(testbed, workload, num_csds))
    update = _update_on_csds(testbed, workload, sent_bytes, num_csds, is_compressed)
    if method == "SU":
        update.append(Phase("buffers", "cpu", num * BUFFERS_S.value))
    return (*before, *update)


def update_s(
    testbed: Testbed,
    workload: Workload,
    method: Method,
    num_csds: int,
    *,
    overlap: bool = False,
) -> float:
    """Returns seconds of the update alone, from the last gradient's write on.

    Args:
      testbed: storage and host.
      workload: the model and its optimizer.
      method: the method of the update.
      num_csds: number of drives for BASE, of CSDs for the others.
      overlap: whether servers work at the same time, so that the busiest counts.

    Raises:
      ValueError: as `phases`.
    """
    none = Rate(0.0, "not part of an update")
    parts = phases(testbed, Gpu(none, none, none), workload, method, num_csds)
    update = [part for part in parts if part.name not in _BEFORE_UPDATE]
    return _served_s(update, in_turn=not overlap)


def iteration_s(
    testbed: Testbed, gpu: Gpu, workload: Workload, method: Method, num_csds: int
) -> float:
    """Returns seconds of an iteration; see `phases` for the arguments and errors."""
    return _served_s(phases(testbed, gpu, workload, method, num_csds))


def _served_s(parts: Sequence[Phase], *, in_turn: bool = True) -> float:
    busy_s: defaultdict[str, float] = defaultdict(float)
    for part in parts:
        busy_s["all" if in_turn else part.server] += part.seconds
    return max(busy_s.values())


_BEFORE_UPDATE = ("forward", "backward", "write gradients", "select")


def _host_write(testbed: Testbed, num_csds: int) -> float:
    return min(num_csds * testbed.write.value, testbed.link.value)


def _update_on_host(testbed: Testbed, workload: Workload, num_csds: int) -> list[Phase]:
    num, state_bytes = workload.num_params, workload.state_bytes
    read = min(num_csds * testbed.read.value, testbed.link.value)
    read_bytes = num * (state_bytes + workload.gradient_bytes)
    write_s = num * state_bytes / _host_write(testbed, num_csds)
    return [
        Phase("read states and gradients", "link", read_bytes / read),
        Phase("update", "cpu", num / testbed.update.value),
        Phase("write states", "link", write_s),
    ]


def _update_on_csds(
    testbed: Testbed,
    workload: Workload,
    sent_bytes: float,
    num_csds: int,
    is_compressed: bool,
) -> list[Phase]:
    num = workload.num_params / num_csds
    state_bytes, gradient_bytes = num * workload.state_bytes, sent_bytes / num_csds
    dense_bytes = num * workload.gradient_bytes
    read, write = testbed.card_read.value, testbed.card_write.value
    kernel_s = (state_bytes + dense_bytes) / testbed.kernel.value
    result = [
        Phase("read gradients", "drive", gradient_bytes / read),
        Phase("read states", "drive", state_bytes / read),
        Phase("update", "kernel", kernel_s),
        Phase("write states", "drive", state_bytes / write),
    ]
    if is_compressed:
        seconds = dense_bytes / testbed.decompressor.value
        result.insert(2, Phase("decompress", "kernel", seconds))
    params_bytes = workload.num_params * workload.param_bytes
    return [*result, Phase("read params", "link", params_bytes / testbed.link.value)]
