"""Card kernels as C++ for HLS: the stages of ``hls/include`` wired around a body.

Invariant: the text depends only on the table of `jaxinf.kernels.card_kernels`, and has
  no arithmetic. That is in the body, which hosts and cards share.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from jaxinf.kernels.card_kernels import CARD_ALIGNMENT_BYTES, CardArgument, CardKernel

_COSIM_ELEMENTS = 4096  # longest subgroup of a cosimulation, which needs depth=

_FORMATS = {"float32": "F32", "bfloat16": "Bf16", "float16": "F16", "uint8": "Codes"}


def card_source(cards: Sequence[CardKernel]) -> str:
    """Returns the translation unit of kernels that share one body.

    Args:
      cards: kernels of one body; a single one for synthesis.
    """
    (body,) = {card.body for card in cards}
    lines = [f"// {card.name}." for card in cards]
    lines += [
        "//",
        "// Written by jaxinf from its table of card kernels; picture: shell.hpp.",
        '#include "shell.hpp"',
        f'#include "{body}.cpp"',
    ]
    for card in cards:
        lines += ["", *_kernel(card)]
    return "\n".join(lines) + "\n"


def _kernel(card: CardKernel) -> Iterator[str]:
    arguments = [_parameter(argument) for argument in card.arguments]
    yield f"JAXINF_CARD_KERNEL void {card.name}("
    yield ",\n".join(f"    {argument}" for argument in arguments) + ") {"
    for pointer in card.pointers:
        yield f"#pragma HLS INTERFACE m_axi port={pointer.name} " + _port(card, pointer)
    yield "  using namespace jaxinf;"
    wiring = _Wiring(card)
    stages = list(wiring.stages())
    for kind in sorted({kind for _, kind in wiring.streams}):
        names = [name for name, other in wiring.streams if other == kind]
        yield f"  {kind} {', '.join(names)};"
    yield "#pragma HLS DATAFLOW"
    yield "  JAXINF_REGION;"
    yield from (f"  JAXINF_STAGE({stage});" for stage in stages)
    yield "  JAXINF_RUN;"
    yield "}"


def _parameter(argument: CardArgument) -> str:
    if argument.kind == "scalar":
        return f"jaxinf::Word {argument.name}"
    const = "" if argument.is_output else "const "
    return f"{const}jaxinf::Wide* {argument.name}"


def _bundle(card: CardKernel, pointer: CardArgument) -> str:
    """Returns the port of a pointer. Each port has one reader and one writer."""
    for end in ("_in", "_out"):
        if pointer.name.endswith(end):
            return pointer.name.removesuffix(end)
    if pointer.name == "out":
        return "gradient"
    # Short pointers share the status's port. If two inputs are short, the table gets a
    # port of its own.
    if pointer.name == "rsqrt_estimates" and card.compressed:
        return pointer.name
    return "gradient" if pointer.name == "gradient" else "status"


def _port(card: CardKernel, pointer: CardArgument) -> str:
    way = "write" if pointer.is_output else "read"
    bursts = f"num_{way}_outstanding=16 max_{way}_burst_length=64"
    depth = pointer.num_bytes(_COSIM_ELEMENTS, _COSIM_ELEMENTS) // CARD_ALIGNMENT_BYTES
    return f"bundle={_bundle(card, pointer)} offset=slave depth={depth} {bursts}"


@dataclass
class _Wiring:
    card: CardKernel

    def __post_init__(self) -> None:
        self.streams: list[tuple[str, str]] = []

    def stages(self) -> Iterator[str]:
        """Returns the calls in the order of the data; fills `streams`."""
        card = self.card
        self._stream("Words", f"read[{len(card.extents)}]")
        self._stream("Words", f"written[{len(card.extents)}]")
        self._stream("Words", "finite")
        self._stream("Words", "valid")
        yield from self._gradient()
        yield from self._load_state()
        yield from self._update()
        yield from self._store_state()
        (out,) = (a for a in card.pointers if a.name == "out")
        format_ = _FORMATS[out.type]
        self._stream("Wides", "out_words")
        yield f"narrow<{format_}>(out_beats, num_elements, out_words)"
        yield f"store<{format_}>(out, num_elements, out_words)"
        yield "report(finite, valid, read, written, status)"

    def _gradient(self) -> Iterator[str]:
        format_ = _FORMATS[self.card.pointers[0].type]
        self._stream("Wides", "gradient_words")
        self._stream("Beats", "gradient_beats")
        if not self.card.compressed:
            yield f"load<{format_}>(gradient, num_elements, gradient_words)"
            yield f"widen<{format_}>(gradient_words, num_elements, gradient_beats)"
            yield "no_positions(valid)"
            return
        self._stream("Wides", "indices_words")
        yield f"load<{format_}>(gradient, num_selected, gradient_words)"
        yield "load<Indices>(indices, num_selected, indices_words)"
        yield (
            f"decompress<{format_}>(gradient_words, indices_words, num_elements, "
            "num_selected, gradient_beats, valid)"
        )

    def _load_state(self) -> Iterator[str]:
        for number, extent in enumerate(self.card.extents):
            self._stream("Wides", f"{extent}_words")
            yield (
                f"load_checked<{self._format(extent)}>({extent}_in, num_elements, "
                f"{extent}_words, read[{number}])"
            )
        self._stream("Beats", "params_beats")
        yield "widen<F32>(params_words, num_elements, params_beats)"
        if self.card.slots:
            self._stream("Beats", f"slots[{len(self.card.slots)}]")
        for number, slot in enumerate(self.card.slots):
            to = f"slots[{number}]"
            if self.card.state == "int8":
                words = f"{slot}_words, {slot}_scales_words"
                yield f"decode_int8({words}, num_elements, {to})"
            else:
                format_ = self._format(slot)
                yield f"widen<{format_}>({slot}_words, num_elements, {to})"

    def _update(self) -> Iterator[str]:
        card = self.card
        if card.has_rsqrt:
            self._stream("Wides", "estimates_words")
            yield "load<Table>(rsqrt_estimates, table_words, estimates_words)"
        self._stream("Beats", "new_params_beats")
        self._stream("Beats", "out_beats")
        if card.slots:
            self._stream("Beats", f"new_slots[{len(card.slots)}]")
        is_update = "true" if card.out == "update" else "false"
        arguments = [
            *(["estimates_words"] if card.has_rsqrt else []),
            "gradient_beats", "params_beats", *(["slots"] if card.slots else []),
            "num_elements", "new_params_beats", *(["new_slots"] if card.slots else []),
            "out_beats", "finite", *_body_arguments(card),
        ]  # fmt: skip
        template = f"{is_update}, Body, {len(card.constants)}"
        yield f"update<{template}>({', '.join(arguments)})"

    def _store_state(self) -> Iterator[str]:
        for extent in self.card.extents:
            self._stream("Wides", f"new_{extent}_words")
        yield "narrow<F32>(new_params_beats, num_elements, new_params_words)"
        for number, slot in enumerate(self.card.slots):
            yield from self._encode(number, slot)
        for number, extent in enumerate(self.card.extents):
            yield (
                f"store_checked<{self._format(extent)}>({extent}_out, num_elements, "
                f"new_{extent}_words, written[{number}])"
            )

    def _encode(self, number: int, slot: str) -> Iterator[str]:
        beats, words = f"new_slots[{number}]", f"new_{slot}_words"
        rounding = "rounding_key, rounding_first"
        if self.card.state == "f32":
            yield f"narrow<F32>({beats}, num_elements, {words})"
        elif self.card.state == "bf16":
            yield (
                f"narrow_bf16_stochastic<{number}>({beats}, num_elements, {rounding}, "
                f"{words})"
            )
        else:
            self._stream("WaitingBeats", f"{slot}_waiting")
            self._stream("BlockHeaders", f"{slot}_headers")
            waiting = f"{slot}_waiting, {slot}_headers"
            yield (
                f"measure({beats}, num_elements, {waiting}, new_{slot}_scales_words)"
            )
            yield (f"quantise<{number}>({waiting}, num_elements, {rounding}, {words})")

    def _format(self, extent: str) -> str:
        if self.card.state == "int8" and extent.endswith("_scales"):
            return "Scales"
        (pointer,) = (a for a in self.card.pointers if a.name == f"{extent}_in")
        return _FORMATS[pointer.type]

    def _stream(self, kind: str, name: str) -> None:
        self.streams.append((name, kind))


def _body_arguments(card: CardKernel) -> list[str]:
    names = [argument.name for argument in card.scalars]
    return names[names.index("rounding_first") + 1 :]
