"""Estimates the resources of card kernels on a KU15P, and their speed.

Counts the operations of each body and the stages around it, and multiplies them by
assumed costs. Nothing was synthesised. Without arguments, prints the table of
hls/qor/README.md; with ``--write``, puts it there.
"""

import argparse
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from generate_kernels import HLS, listed_card_kernels

from jaxinf.kernels.card import CardKernel, named_card_kernel
from jaxinf.kernels.card_source import card_ports
from jaxinf.kernels.lowering import lower, uniform_results
from jaxinf.kernels.standard import standard_kernels

QOR = HLS / "qor" / "README.md"
BEGIN, END = "<!-- card_estimate.py -->\n", "<!-- end -->\n"

KU15P = {"LUT": 522_000, "BRAM": 984, "DSP": 1_968}
LANES = 4
FREQUENCY_HZ = 250e6
MEMORY_BYTES_S = 0.8 * 19.2e9
TOP_K = 0.01


@dataclass(frozen=True)
class Cost:
    """LUTs, 36-Kbit blocks of memory and DSP blocks."""

    lut: float = 0
    bram: float = 0
    dsp: float = 0

    def __add__(self, other: "Cost") -> "Cost":
        return Cost(self.lut + other.lut, self.bram + other.bram, self.dsp + other.dsp)

    def __mul__(self, times: float) -> "Cost":
        return Cost(self.lut * times, self.bram * times, self.dsp * times)


ADD, MUL = Cost(220, 0, 2), Cost(100, 0, 3)
FMA, DIV, SQRT = Cost(1200, 0, 2), Cost(800), Cost(460)
# Two Newton steps, the index and a copy of the table; and 1 / sqrt(x) without a table.
RSQRT = (FMA + MUL) * 4 + Cost(150, 4) + DIV + SQRT
OPERATORS = {
    "add": ADD,
    "sub": ADD,
    "mul": MUL,
    "square": MUL,
    "div": DIV,
    "reciprocal": DIV,
    "sqrt": SQRT,
    "rsqrt": RSQRT,
    "fma": FMA,
    "fms": FMA,
    "fnma": FMA,
    "gt": Cost(70),
    "select_n": Cost(16),
    "sign": Cost(70),
}
READER, WRITER = Cost(1100, 8), Cost(1000, 7)  # of a port, with its bursts
CHECKSUM = Cost(1800)
WIDE_STREAM, BEAT_STREAM = Cost(570), Cost(36 * LANES)
WAITING_STREAM = Cost(60, 0.5 * LANES)
RANDOM = Cost(150, 0, 6)
NARROW = {"f32": Cost(), "bf16": Cost(40), "f16": Cost(120)}
WIDEN = {"f32": Cost(), "bf16": Cost(), "f16": Cost(90)}
DECOMPRESS = Cost(1500)
DECODE_INT8 = Cost(40, 1) + MUL  # a table for each sign
CODER = MUL * 4 + ADD * 2 + Cost(350)  # for one sign
QUANTISE = RANDOM + MUL + CODER * 2
MEASURE = Cost(2500) + DIV


def cost_of(card: CardKernel) -> Cost:
    """Returns the cost of a whole kernel."""
    writes = sum(pointer.is_output for pointer in card.pointers)
    total = WRITER * writes + READER * (len(card.pointers) - writes)
    total += WIDE_STREAM * (len(card.pointers) - 1)
    total += BEAT_STREAM * (2 + 2 * len(card.slots) + 2)
    total += CHECKSUM * (2 * len(card.extents))
    total += body_cost(card) + ADD * LANES
    total += WIDEN[card.gradient] * LANES
    total += NARROW.get(card.out, Cost()) * LANES
    if card.compressed:
        total += DECOMPRESS
    if card.state == "bf16":
        total += (RANDOM + NARROW["bf16"]) * (LANES * len(card.slots))
    if card.state == "int8":
        each = (DECODE_INT8 + QUANTISE) * LANES + MEASURE + WAITING_STREAM
        total += each * len(card.slots)
    return total


def body_cost(card: CardKernel) -> Cost:
    """Returns the cost of all lanes; terms common to all elements occur once."""
    equations = lower(standard_kernels()[card.body]).equations
    total = Cost()
    for equation, once in zip(equations, uniform_results(equations), strict=True):
        total += OPERATORS[equation.op] * (1 if once else LANES)
    return total


def bytes_an_element(card: CardKernel, top_k: float) -> float:
    """Returns bytes of card memory per element, each of them written and read once.

    State comes from the drive and returns to it by P2P, gradients come from the host
    and results go there, all through the same bank.
    """
    count = 1 << 20
    pairs = round(count * top_k)
    return 2 * sum(p.num_bytes(count, pairs) for p in card.pointers) / count


def elements_a_second(card: CardKernel) -> tuple[float, str]:
    """Returns the lower of the rates of memory and pipeline, and its name."""
    by_memory = MEMORY_BYTES_S / bytes_an_element(card, TOP_K)
    cycles = 1 / LANES + (TOP_K if card.compressed else 0)
    by_pipeline = FREQUENCY_HZ / cycles
    return min((by_memory, "memory"), (by_pipeline, "pipeline"))


def operations(card: CardKernel) -> str:
    """Lists an element's operations, with the addition to the params."""
    body = lower(standard_kernels()[card.body])
    uniform = uniform_results(body.equations)
    found = Counter(
        e.op for e, once in zip(body.equations, uniform, strict=True) if not once
    )
    found["add"] += 1
    return ", ".join(f"{found[op]} {op}" for op in OPERATORS if found[op])


def table() -> str:
    """Returns the table as Markdown."""
    lines = [
        "| kernel | operations | ports | LUT | BRAM | DSP | bytes an element "
        "| G elements/s | bound by |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name in listed_card_kernels():
        card = named_card_kernel(name)
        cost = cost_of(card)
        needs = zip((cost.lut, cost.bram, cost.dsp), KU15P.values(), strict=True)
        shares = [f"{need:,.0f} ({need / has:.1%})" for need, has in needs]
        rate, bound = elements_a_second(card)
        size = bytes_an_element(card, TOP_K)
        ports = str(len(card_ports(card)))
        cells = [name.removeprefix("jaxinf_"), operations(card), ports, *shares]
        cells += [f"{size:.1f}", f"{rate / 1e9:.2f}", bound]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def with_table(text: str) -> str:
    """Returns the document with the table replaced."""
    before, _, rest = text.partition(BEGIN)
    return before + BEGIN + table() + END + rest.partition(END)[2]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help=f"update {Path(QOR.name)}")
    if parser.parse_args().write:
        QOR.write_text(with_table(QOR.read_text()))
    else:
        print(table(), end="")


if __name__ == "__main__":
    main()
