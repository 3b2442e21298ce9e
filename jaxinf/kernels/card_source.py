"""Card kernels as C++ for HLS: the stages of ``hls/include`` wired around a body.

Invariant: the text depends only on the table of `jaxinf.kernels.card_kernels`, and has
  no arithmetic. That is in the body, which hosts and cards share.
"""

from collections.abc import Iterator, Sequence

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
    words = [f"    jaxinf::Word {scalar.name}" for scalar in card.scalars]
    memory = [
        f"    {'' if one.is_output else 'const '}jaxinf::Wide* {one.name}"
        for one in card.pointers
    ]
    yield f"JAXINF_CARD_KERNEL void {card.name}("
    yield ",\n".join([*memory, *words]) + ") {"
    for one in card.pointers:
        way = "write" if one.is_output else "read"
        bursts = f"num_{way}_outstanding=16 max_{way}_burst_length=64"
        num_bytes = one.num_bytes(_COSIM_ELEMENTS, _COSIM_ELEMENTS)
        depth = f"depth={num_bytes // CARD_ALIGNMENT_BYTES}"
        port = f"bundle={_bundle(card, one)} offset=slave {depth} {bursts}"
        yield f"#pragma HLS INTERFACE m_axi port={one.name} {port}"
    yield "  using namespace jaxinf;"
    for kind, names in sorted(_streams(card).items()):
        if names:
            yield f"  {kind} {', '.join(names)};"
    yield "#pragma HLS DATAFLOW"
    yield "  JAXINF_REGION;"
    yield from (f"  JAXINF_STAGE({stage});" for stage in _stages(card))
    yield "  JAXINF_RUN;"
    yield "}"


def _bundle(card: CardKernel, pointer: CardArgument) -> str:
    """Returns the port of a pointer. Each port has one reader and one writer."""
    for end in ("_in", "_out"):
        if pointer.name.endswith(end):
            return pointer.name.removesuffix(end)
    if pointer.name in ("gradient", "out"):
        return "gradient"
    # Short pointers share the status's port. If two inputs are short, the table gets a
    # port of its own.
    is_alone = pointer.name == "rsqrt_estimates" and card.compressed
    return pointer.name if is_alone else "status"


def _streams(card: CardKernel) -> dict[str, list[str]]:
    """Returns the streams between the stages by their kind."""
    count, extents = len(card.slots), card.extents
    coded = card.slots if card.state == "int8" else ()
    return {
        "Words": [
            f"read[{len(extents)}]",
            f"written[{len(extents)}]",
            "finite",
            "valid",
        ],
        "Wides": [
            "gradient_words",
            *(["indices_words"] if card.compressed else []),
            *(f"{extent}_words" for extent in extents),
            *(["estimates_words"] if card.has_rsqrt else []),
            *(f"new_{extent}_words" for extent in extents),
            "out_words",
        ],
        "Beats": [
            "gradient_beats",
            "params_beats",
            *([f"slots[{count}]"] if count else []),
            "new_params_beats",
            "out_beats",
            *([f"new_slots[{count}]"] if count else []),
        ],
        "WaitingBeats": [f"{slot}_waiting" for slot in coded],
        "BlockHeaders": [f"{slot}_headers" for slot in coded],
    }


def _stages(card: CardKernel) -> Iterator[str]:
    """Yields the calls in the order of the data."""
    formats = {one.name: _FORMATS.get(one.type, "") for one in card.pointers}
    if card.state == "int8":
        formats |= {f"{slot}_scales_in": "Scales" for slot in card.slots}
    gradient, out, num = formats["gradient"], formats["out"], "num_elements"
    if card.compressed:
        yield f"load<{gradient}>(gradient, num_selected, gradient_words)"
        yield "load<Indices>(indices, num_selected, indices_words)"
        yield (
            f"decompress<{gradient}>(gradient_words, indices_words, {num}, "
            "num_selected, gradient_beats, valid)"
        )
    else:
        yield f"load<{gradient}>(gradient, {num}, gradient_words)"
        yield f"widen<{gradient}>(gradient_words, {num}, gradient_beats)"
        yield "no_positions(valid)"
    for number, extent in enumerate(card.extents):
        format_ = formats[f"{extent}_in"]
        yield (
            f"load_checked<{format_}>({extent}_in, {num}, {extent}_words, "
            f"read[{number}])"
        )
    yield f"widen<F32>(params_words, {num}, params_beats)"
    for number, slot in enumerate(card.slots):
        words, beats = f"{slot}_words", f"slots[{number}]"
        if card.state == "int8":
            yield f"decode_int8({words}, {slot}_scales_words, {num}, {beats})"
        else:
            yield f"widen<{formats[f'{slot}_in']}>({words}, {num}, {beats})"
    if card.has_rsqrt:
        yield "load<Table>(rsqrt_estimates, table_words, estimates_words)"
    names = [argument.name for argument in card.scalars]
    arguments = [
        *(["estimates_words"] if card.has_rsqrt else []),
        "gradient_beats", "params_beats", *(["slots"] if card.slots else []),
        num, "new_params_beats", *(["new_slots"] if card.slots else []),
        "out_beats", "finite", *names[names.index("rounding_first") + 1 :],
    ]  # fmt: skip
    is_update = "true" if card.out == "update" else "false"
    template = f"{is_update}, Body, {len(card.constants)}"
    yield f"update<{template}>({', '.join(arguments)})"
    yield f"narrow<F32>(new_params_beats, {num}, new_params_words)"
    rounding = "rounding_key, rounding_first"
    for number, slot in enumerate(card.slots):
        beats, words = f"new_slots[{number}]", f"new_{slot}_words"
        if card.state == "f32":
            yield f"narrow<F32>({beats}, {num}, {words})"
        elif card.state == "bf16":
            to = f"{num}, {rounding}, {words}"
            yield f"narrow_bf16_stochastic<{number}>({beats}, {to})"
        else:
            waiting = f"{slot}_waiting, {slot}_headers"
            yield f"measure({beats}, {num}, {waiting}, new_{slot}_scales_words)"
            yield f"quantise<{number}>({waiting}, {num}, {rounding}, {words})"
    for number, extent in enumerate(card.extents):
        format_ = formats[f"{extent}_in"]
        yield (
            f"store_checked<{format_}>({extent}_out, {num}, new_{extent}_words, "
            f"written[{number}])"
        )
    yield f"narrow<{out}>(out_beats, {num}, out_words)"
    yield f"store<{out}>(out, {num}, out_words)"
    yield "report(finite, valid, read, written, status)"
