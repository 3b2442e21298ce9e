"""Card kernels as C++ for HLS: the stages of ``hls/include`` wired around a body.

Invariant: the text depends only on the table of `jaxinf.kernels.card_kernels`, and has
no arithmetic. That is in the body, which hosts and cards share.
"""

from collections.abc import Iterator, Sequence

from jaxinf.kernels.card_kernels import CARD_ALIGNMENT_BYTES, CardArgument, CardKernel

_COSIM_ELEMENTS = 4096  # longest subgroup of a cosimulation, which needs depth=

_FORMATS = {"float32": "F32", "bfloat16": "Bf16", "float16": "F16", "uint8": "Codes"}


def card_source(cards: Sequence[CardKernel]) -> str:
    """Returns the translation unit of kernels of one body; one kernel for synthesis."""
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
        f"    {'' if pointer.is_output else 'const '}jaxinf::Wide* {pointer.name}"
        for pointer in card.pointers
    ]
    yield f"JAXINF_CARD_KERNEL void {card.name}("
    yield ",\n".join([*memory, *words]) + ") {"
    yield from (_port(card, pointer) for pointer in card.pointers)
    yield "  using namespace jaxinf;"
    for kind, names in sorted(_streams(card).items()):
        if names:
            yield f"  {kind} {', '.join(names)};"
    yield "#pragma HLS DATAFLOW"
    yield "  JAXINF_REGION;"
    stages = *_load_stages(card), _update_stage(card), *_store_stages(card)
    yield from (f"  JAXINF_STAGE({stage});" for stage in stages)
    yield "  JAXINF_RUN;"
    yield "}"


def _port(card: CardKernel, pointer: CardArgument) -> str:
    direction = "write" if pointer.is_output else "read"
    bursts = f"num_{direction}_outstanding=16 max_{direction}_burst_length=64"
    num_bytes = pointer.num_bytes(_COSIM_ELEMENTS, _COSIM_ELEMENTS)
    depth = f"depth={num_bytes // CARD_ALIGNMENT_BYTES}"
    port = f"bundle={_bundle(card, pointer)} offset=slave {depth} {bursts}"
    return f"#pragma HLS INTERFACE m_axi port={pointer.name} {port}"


def _bundle(card: CardKernel, pointer: CardArgument) -> str:
    """Returns the name of a pointer's port. A port has one reader and one writer."""
    for end in ("_in", "_out"):
        if pointer.name.endswith(end):
            return pointer.name.removesuffix(end)
    if pointer.name in ("gradient", "out"):
        return "gradient"
    # Short pointers share the status's port. If two inputs are short, the table gets a
    # port of its own.
    is_alone = pointer.name == "rsqrt_estimates" and card.is_sparse
    return pointer.name if is_alone else "status"


def _streams(card: CardKernel) -> dict[str, list[str]]:
    num_slots, extents = len(card.slots), card.extents
    coded = card.slots if card.state == "int8" else ()
    checksums = f"read[{len(extents)}]", f"written[{len(extents)}]"
    inputs = ["gradient_beats", "params_beats"]
    results = ["new_params_beats", "out_beats"]
    if num_slots:
        inputs.append(f"slots[{num_slots}]")
        results.append(f"new_slots[{num_slots}]")
    return {
        "Words": [*checksums, "finite", "valid"],
        "Wides": [
            "gradient_words",
            *(["indices_words"] if card.is_sparse else []),
            *(f"{extent}_words" for extent in extents),
            *(["estimates_words"] if card.has_rsqrt else []),
            *(f"new_{extent}_words" for extent in extents),
            "out_words",
        ],
        "Beats": [*inputs, *results],
        "WaitingBeats": [f"{slot}_waiting" for slot in coded],
        "BlockHeaders": [f"{slot}_headers" for slot in coded],
    }


def _load_stages(card: CardKernel) -> Iterator[str]:
    formats = _formats(card)
    gradient = formats["gradient"]
    if card.is_sparse:
        yield f"load<{gradient}>(gradient, num_selected, gradient_words)"
        yield "load<Indices>(indices, num_selected, indices_words)"
        yield (
            f"decompress<{gradient}>(gradient_words, indices_words, num_elements, "
            "num_selected, gradient_beats, valid)"
        )
    else:
        yield f"load<{gradient}>(gradient, num_elements, gradient_words)"
        yield f"widen<{gradient}>(gradient_words, num_elements, gradient_beats)"
        yield "no_positions(valid)"
    for number, extent in enumerate(card.extents):
        yield (
            f"load_checked<{formats[f'{extent}_in']}>({extent}_in, num_elements, "
            f"{extent}_words, read[{number}])"
        )
    yield "widen<F32>(params_words, num_elements, params_beats)"
    for number, slot in enumerate(card.slots):
        to_beats = f"num_elements, slots[{number}]"
        if card.state == "int8":
            yield f"decode_int8({slot}_words, {slot}_scales_words, {to_beats})"
        else:
            yield f"widen<{formats[f'{slot}_in']}>({slot}_words, {to_beats})"
    if card.has_rsqrt:
        yield "load<Table>(rsqrt_estimates, table_words, estimates_words)"


def _update_stage(card: CardKernel) -> str:
    names = [scalar.name for scalar in card.scalars]
    body_scalars = names[names.index("rounding_first") + 1 :]
    arguments = [
        *(["estimates_words"] if card.has_rsqrt else []),
        "gradient_beats", "params_beats", *(["slots"] if card.slots else []),
        "num_elements", "new_params_beats", *(["new_slots"] if card.slots else []),
        "out_beats", "finite", *body_scalars,
    ]  # fmt: skip
    is_update = "true" if card.out == "update" else "false"
    template = f"{is_update}, Body, {len(card.constants)}"
    return f"update<{template}>({', '.join(arguments)})"


def _store_stages(card: CardKernel) -> Iterator[str]:
    formats = _formats(card)
    yield "narrow<F32>(new_params_beats, num_elements, new_params_words)"
    rounding = "num_elements, rounding_key, rounding_first"
    for number, slot in enumerate(card.slots):
        beats, words = f"new_slots[{number}]", f"new_{slot}_words"
        if card.state == "f32":
            yield f"narrow<F32>({beats}, num_elements, {words})"
        elif card.state == "bf16":
            yield f"narrow_bf16_stochastic<{number}>({beats}, {rounding}, {words})"
        else:
            waiting = f"{slot}_waiting, {slot}_headers"
            scales = f"new_{slot}_scales_words"
            yield f"measure({beats}, num_elements, {waiting}, {scales})"
            yield f"quantise<{number}>({waiting}, {rounding}, {words})"
    for number, extent in enumerate(card.extents):
        yield (
            f"store_checked<{formats[f'{extent}_in']}>({extent}_out, num_elements, "
            f"new_{extent}_words, written[{number}])"
        )
    yield f"narrow<{formats['out']}>(out_beats, num_elements, out_words)"
    yield f"store<{formats['out']}>(out, num_elements, out_words)"
    yield "report(finite, valid, read, written, status)"


def _formats(card: CardKernel) -> dict[str, str]:
    """Returns the C++ name of each pointer's storage format."""
    return {
        pointer.name: "Scales" if pointer.count == "blocks" else _FORMATS[pointer.type]
        for pointer in card.pointers
        if pointer.type in _FORMATS
    }
