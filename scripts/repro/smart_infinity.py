"""A model of Smart-Infinity's testbed (HPCA 2024), beside the published figures.

    forward ─► backward ─► gradients to the drives ─► update ─► forward

    BASE       state and gradients over the shared link, Adam on the host's CPU, back
    SU, SU+O   on each CSD: read gradient and state, kernel, write state;
               then the new params over the shared link
    SU+O+C     the same with compressed gradients, which a decompressor expands

Each resource is one server: a drive either reads or writes, and the CSDs share a link.
The phases of an update follow one another, because the published times require it: if
only the busiest server counted (`overlap`), SU+O would take 0.56 to 0.71 of the seconds
in figures 9 and 10.

Invariant: seconds are linear in the number of params; no rate depends on a method;
published numbers come from one data file, and nothing here changes them.
"""

import functools
import json
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

METHODS = ("BASE", "SU", "SU+O", "SU+O+C")
"""ZeRO-Infinity; update near storage; with the overlapping handler; compressed."""

# The testbed, in bytes a second: up to ten SmartSSDs behind one PCIe 3.0 x16
# expansion, and a Xeon Gold 6342.
READ = 3.2e9  # of a drive as the host has it; fitted near section III: about 3 GB/s
WRITE = 2.47e9  # fitted to the times of BASE
CARD_READ, CARD_WRITE = 2.79e9, 1.65e9  # published in figure 14
KERNEL = 8.22e9  # by its input of state and gradient; published in figure 14
DECOMPRESSOR = 2.93e9  # by its output of dense gradient; published in figure 14
LINK = 8e9  # published in section III: measured over the expansion's one link

# Seconds a param, fitted to those of figure 9, GPT-2 4.0B.
UPDATE_S = 0.9e-9  # of Adam in fp32 on all cores of the host
BUFFERS_S = 0.22e-9  # of SU for allocating its buffers
SELECT_S = 0.19e-9  # for choosing the largest gradients, on any GPU

FORWARD_S, BACKWARD_S = 0.165e-9, 0.85e-9  # of an A5000 for the paper's batch of 4


class Workload(NamedTuple):
    """A model, its optimizer's state, and the share that compression sends.

    State is in bytes a param, with the master: 12 for Adam, 8 for SGD with momentum.
    Gradients, and params that return, have 4; what is sent has indices.
    """

    num_params: float
    state_bytes: float = 12
    sent_ratio: float = 0.02


Phase = tuple[str, str, float]
"""Its name, the resource in use, for CSDs each one's own, and its seconds."""


def phases(workload: Workload, method: str, num_csds: int) -> list[Phase]:
    """Returns the phases of an iteration, in order, before those of the update."""
    num = workload.num_params
    sent_bytes = 4 * num * (workload.sent_ratio if method == "SU+O+C" else 1)
    found = [
        ("forward", "gpu", num * FORWARD_S),
        ("backward", "gpu", num * BACKWARD_S),
        ("write gradients", "link", sent_bytes / min(num_csds * WRITE, LINK)),
    ]
    if method == "SU+O+C":
        found.append(("select", "gpu", num * SELECT_S))
    return found


def update_phases(workload: Workload, method: str, num_csds: int) -> list[Phase]:
    """Returns the phases of an update; `num_csds` are drives for BASE."""
    num, state_bytes = workload.num_params, workload.num_params * workload.state_bytes
    if method == "BASE":
        read, write = (min(num_csds * rate, LINK) for rate in (READ, WRITE))
        return [
            ("read states and gradients", "link", (state_bytes + 4 * num) / read),
            ("update", "cpu", num * UPDATE_S),
            ("write states", "link", state_bytes / write),
        ]
    own_bytes, dense_bytes = state_bytes / num_csds, 4 * num / num_csds
    sent = workload.sent_ratio if method == "SU+O+C" else 1
    found = [("read gradients", "drive", sent * dense_bytes / CARD_READ)]
    found.append(("read states", "drive", own_bytes / CARD_READ))
    if method == "SU+O+C":
        found.append(("decompress", "kernel", dense_bytes / DECOMPRESSOR))
    found += [
        ("update", "kernel", (own_bytes + dense_bytes) / KERNEL),
        ("write states", "drive", own_bytes / CARD_WRITE),
        ("read params", "link", 4 * num / LINK),
    ]
    if method == "SU":
        found.append(("buffers", "cpu", num * BUFFERS_S))
    return found


def update_s(
    workload: Workload, method: str, num_csds: int, *, overlap: bool = False
) -> float:
    """Returns seconds of the update alone, from the last gradient's write on.

    With `overlap` servers work at the same time, so that the busiest counts.
    """
    busy_s: defaultdict[str, float] = defaultdict(float)
    for _, server, seconds in update_phases(workload, method, num_csds):
        busy_s[server if overlap else "all"] += seconds
    return max(busy_s.values())


def iteration_s(workload: Workload, method: str, num_csds: int) -> float:
    """Returns seconds of an iteration."""
    before_s = sum(seconds for *_, seconds in phases(workload, method, num_csds))
    return before_s + update_s(workload, method, num_csds)


# --- the published figures ----------------------------------------------------------


class Comparison(NamedTuple):
    """One published number and ours; its quantity is ``speedup`` or ``update_s``."""

    figure: str
    model: str
    num_csds: int
    method: str
    quantity: str
    published: float
    modelled: float

    @property
    def error(self) -> float:
        """Signed error relative to the published number."""
        return self.modelled / self.published - 1


@functools.cache
def published() -> Mapping[str, Any]:
    """The data file."""
    file = Path(__file__).with_name("smart_infinity_published.json")
    return json.loads(file.read_text())


def compare_with_paper() -> Iterator[Comparison]:
    """Compares the numbers of figures 9, 10, 11a and 12."""
    for model, data in published()["figure_9"].items():
        cells = data["forward_backward_update_s"]
        yield from _bars("9", model, Workload(data["params"]), cells)
    data = published()["figure_10"]
    for params, cells in data["backward_update_s"].items():
        forward_s = data["forward_s_per_1e9_params"] * float(params) / 1e9
        name = f"GPT2 {float(params) / 1e9:.1f}B"
        yield from _bars("10", name, Workload(float(params)), cells, forward_s)
    yield from _figure_11(published()["figure_11a"])
    data = published()["figure_12"]
    workload = Workload(data["params"], state_bytes=data["state_bytes"])
    for optimizer, cells in data["backward_update_s"].items():
        name = f"GPT2 4.0B, {optimizer}"
        yield from _bars("12", name, workload, cells, data["forward_s"])


def _bars(
    figure: str,
    model: str,
    workload: Workload,
    cells: Mapping[str, Any],
    *forward_s: float,
) -> Iterator[Comparison]:
    """Returns update seconds, and speedups of whole iterations over BASE."""
    for key, seconds in cells.items():
        num, method = int(key.split()[0]), key.split()[1]
        where = figure, model, num, method
        modelled = update_s(workload, method, num)
        yield Comparison(*where, "update_s", seconds[-1], modelled)
        if method == "BASE":
            continue
        speedup = (sum(cells[f"{num} BASE"]) + sum(forward_s)) / (
            sum(seconds) + sum(forward_s)
        )
        modelled = iteration_s(workload, "BASE", num)
        modelled /= iteration_s(workload, method, num)
        yield Comparison(*where, "speedup", speedup, modelled)


def _figure_11(data: Mapping[str, Any]) -> Iterator[Comparison]:
    """Speedups over BASE on one CSD."""
    workload = Workload(data["params"])
    base_s = iteration_s(workload, "BASE", 1)
    for method, values in data["speedup_over_base_on_1"].items():
        for num, speedup in zip(data["num_csds"], values, strict=True):
            modelled = base_s / iteration_s(workload, method, num)
            where = "11a", "GPT2 4.0B", num, method
            yield Comparison(*where, "speedup", speedup, modelled)
