"""Smart-Infinity's published figures beside the model's.

Invariant: published numbers come from one data file, and nothing here changes them.
"""

import functools
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, cast

from smart_infinity import (
    A100,
    A5000,
    TESTBED,
    Gpu,
    Method,
    Workload,
    gpus_of_figure_17,
    iteration_s,
    update_s,
)

_TOKENS = 4 * 1024
_FLOPS_PER_PARAM = 8 * _TOKENS
"""Forward, recomputation and backward of the released scripts' batch."""


class Comparison(NamedTuple):
    """One published number and the model's.

    Attributes:
      figure: a figure of the paper, such as ``"9"``.
      model: the trained model.
      num_csds: number of CSDs.
      method: method of the update.
      quantity: ``"speedup"``, ``"update_s"``, ``"iteration_s"`` or
        ``"gflops_per_$"``.
      published: the paper's number.
      modelled: our model's number.
    """

    figure: str
    model: str
    num_csds: int
    method: Method
    quantity: str
    published: float
    modelled: float

    @property
    def error(self) -> float:
        """Signed error relative to the published number."""
        return self.modelled / self.published - 1


def compare_with_paper() -> list[Comparison]:
    """Compares the numbers of figures 9 to 12 and 17, and of the cost.

    Of figures 11b and 17 and of the cost only some are known. Figure 14 has the rates
    in the model. For figures 13, 15 and 16 only the cost at ten CSDs is available.
    """
    return [
        *_figure_9(),
        *_figure_10(),
        *_figure_11("11a", A5000),
        *_figure_11("11b", A100),
        *_figure_12(),
        *_figure_17(),
        *_cost(),
    ]


def gflops_per_dollar(method: Method, num_csds: int) -> float:
    """Returns the work per second and dollar of a system, for GPT-2 4.0B on an A5000.

    The paper does not name the model of its figure; this one is assumed.
    """
    prices = published()["cost"]["dollars"]
    workload = Workload(4e9)
    drive = prices["ssd" if method == "BASE" else "smartssd"]
    dollars = prices["server"] + prices["a5000"] + num_csds * drive
    seconds = iteration_s(TESTBED, A5000, workload, method, num_csds)
    return workload.num_params * _FLOPS_PER_PARAM / seconds / dollars / 1e9


@functools.cache
def published() -> Mapping[str, Any]:
    """The data file."""
    file = Path(__file__).with_name("smart_infinity_published.json")
    return json.loads(file.read_text())


def _cells(cells: Mapping[str, Any]) -> Iterator[tuple[int, Method, Any]]:
    for key, value in cells.items():
        num_csds, method = key.split()
        yield int(num_csds), cast(Method, method), value


def _figure_9() -> Iterator[Comparison]:
    for model, data in published()["figure_9"].items():
        cells = data["forward_backward_update_s"]
        yield from _bars("9", model, Workload(data["params"]), cells)


def _figure_10() -> Iterator[Comparison]:
    data = published()["figure_10"]
    for params, cells in data["backward_update_s"].items():
        forward_s = data["forward_s_per_1e9_params"] * float(params) / 1e9
        whole = {key: [forward_s, *seconds] for key, seconds in cells.items()}
        name = f"GPT2 {float(params) / 1e9:.1f}B"
        yield from _bars("10", name, Workload(float(params)), whole)


def _figure_12() -> Iterator[Comparison]:
    data = published()["figure_12"]
    workload = Workload(data["params"], state_bytes=data["state_bytes"])
    for optimizer, cells in data["backward_update_s"].items():
        whole = {key: [data["forward_s"], *value] for key, value in cells.items()}
        yield from _bars("12", f"GPT2 4.0B, {optimizer}", workload, whole)


def _bars(
    figure: str, model: str, workload: Workload, cells: Mapping[str, Any]
) -> Iterator[Comparison]:
    """Returns update seconds, and speedups of whole iterations over BASE."""
    totals = {(n, method): sum(seconds) for n, method, seconds in _cells(cells)}
    for num, method, (_, _, seconds) in _cells(cells):
        modelled = update_s(TESTBED, workload, method, num)
        yield Comparison(figure, model, num, method, "update_s", seconds, modelled)
        if method == "BASE":
            continue
        base_s = iteration_s(TESTBED, A5000, workload, "BASE", num)
        modelled = base_s / iteration_s(TESTBED, A5000, workload, method, num)
        speedup = totals[num, "BASE"] / totals[num, method]
        yield Comparison(figure, model, num, method, "speedup", speedup, modelled)


def _figure_11(figure: str, gpu: Gpu) -> Iterator[Comparison]:
    data = published()[f"figure_{'11b_a100' if figure == '11b' else figure}"]
    workload = Workload(data["params"])
    base_s = iteration_s(TESTBED, gpu, workload, "BASE", 1)
    counts = data["num_csds"] if figure == "11a" else [data["num_csds"]]
    for method, values in data["speedup_over_base_on_1"].items():
        values = values if figure == "11a" else [values]
        for num, speedup in zip(counts, values, strict=True):
            modelled = base_s / iteration_s(TESTBED, gpu, workload, method, num)
            yield Comparison(
                figure, "GPT2 4.0B", num, method, "speedup", speedup, modelled
            )


def _figure_17() -> Iterator[Comparison]:
    data = published()["figure_17_a4000"]
    workload, num = Workload(data["params"]), data["num_csds"]
    for num_gpus, seconds in data["iteration_s_by_num_gpus"].items():
        gpu = gpus_of_figure_17(seconds["BASE"], workload, num)
        modelled = iteration_s(TESTBED, gpu, workload, "SU+O+C", num)
        yield Comparison(
            "17", f"GPT2 1.16B, {num_gpus} A4000", num, "SU+O+C", "iteration_s",
            seconds["SU+O+C"], modelled,
        )  # fmt: skip


def _cost() -> Iterator[Comparison]:
    for method, value in published()["cost"]["gflops_per_dollar_at_10"].items():
        yield Comparison(
            "cost", "GPT2 4.0B", 10, method, "gflops_per_$", value,
            gflops_per_dollar(method, 10),
        )  # fmt: skip
