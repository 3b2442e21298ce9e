"""Hugging Face's names of tensors and ours, one table for each model.

Invariant: reading and writing use the same table, and every change of a tensor is a
  permutation of its axes.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

_LINEAR = (1, 0)  # torch has [out, in], ours is [in, out]


@dataclass(frozen=True)
class TensorName:
    """A tensor, or one in each layer: ``{}`` stands for the layer's number.

    Attributes:
      ours: the leaf's path, keys joined by ``/``.
      axes: order of their axes in ours; empty for no change.
    """

    ours: str
    theirs: str
    axes: tuple[int, ...] = ()


@dataclass(frozen=True)
class WeightTable:
    """The tensors of one architecture.

    Attributes:
      tensors: the tensors of all configs; a model's own tree has a subset.
      prefix: prefix of the base model's names, which a bare base model lacks.
      tied: other names that a file may have for a tensor with shared values.
      heads: beginnings of our paths that a checkpoint of another task lacks. Below
        each, all leaves exist or none; missing ones are initialised anew.
      unused: patterns of tensors that are not params: buffers, other tasks' heads.
    """

    tensors: tuple[TensorName, ...]
    prefix: str = ""
    tied: Mapping[str, str] = field(default_factory=dict)
    heads: tuple[str, ...] = ()
    unused: tuple[str, ...] = ()

    def find(self, ours: str) -> TensorName:
        """Returns the tensor of a leaf, with the number of its layer.

        Raises:
          KeyError: the table does not have the leaf.
        """
        number = "".join(re.findall(r"^[a-z](\d+)/", ours))
        template = re.sub(r"^([a-z])\d+/", r"\1{}/", ours)
        for tensor in self.tensors:
            if tensor.ours == template:
                theirs = tensor.theirs.replace("{}", number)
                return TensorName(ours, theirs, tensor.axes)
        raise KeyError(ours)

    def is_unused(self, theirs: str) -> bool:
        """Whether a tensor of a file is not a param of a model."""
        return any(re.fullmatch(pattern, theirs) for pattern in self.unused)


def _linear(ours: str, theirs: str) -> list[TensorName]:
    return [
        TensorName(f"{ours}/kernel", f"{theirs}.weight", _LINEAR),
        TensorName(f"{ours}/bias", f"{theirs}.bias"),
    ]


def _norm(ours: str, theirs: str) -> list[TensorName]:
    return [
        TensorName(f"{ours}/scale", f"{theirs}.weight"),
        TensorName(f"{ours}/bias", f"{theirs}.bias"),
    ]


def _table(ours: str, theirs: str) -> list[TensorName]:
    return [TensorName(ours, f"{theirs}.weight")]


def _all(*groups: Iterable[TensorName]) -> tuple[TensorName, ...]:
    return tuple(tensor for group in groups for tensor in group)


def _conv1d(ours: str, theirs: str) -> list[TensorName]:
    """GPT-2's linear layers are [in, out] there too."""
    return [
        TensorName(f"{ours}/kernel", f"{theirs}.weight"),
        TensorName(f"{ours}/bias", f"{theirs}.bias"),
    ]


_OTHER_HEADS = (r"lm_head\.weight", r"score\.weight")

_GPT2 = WeightTable(
    _all(
        _table("wte", "transformer.wte"),
        _table("wpe", "transformer.wpe"),
        _norm("h{}/ln_1", "transformer.h.{}.ln_1"),
        _conv1d("h{}/attn/qkv", "transformer.h.{}.attn.c_attn"),
        _conv1d("h{}/attn/proj", "transformer.h.{}.attn.c_proj"),
        _norm("h{}/ln_2", "transformer.h.{}.ln_2"),
        _conv1d("h{}/mlp/up", "transformer.h.{}.mlp.c_fc"),
        _conv1d("h{}/mlp/down", "transformer.h.{}.mlp.c_proj"),
        _norm("ln_f", "transformer.ln_f"),
        _linear("score", "score"),
    ),
    prefix="transformer.",
    tied={"lm_head.weight": "transformer.wte.weight"},
    heads=("score/",),
    unused=(r"transformer\.h\.\d+\.attn\.(masked_)?bias", *_OTHER_HEADS),
)

_BLOOM = WeightTable(
    _all(
        _table("wte", "transformer.word_embeddings"),
        _norm("ln_0", "transformer.word_embeddings_layernorm"),
        _norm("h{}/ln_1", "transformer.h.{}.input_layernorm"),
        _linear("h{}/attn/qkv", "transformer.h.{}.self_attention.query_key_value"),
        _linear("h{}/attn/proj", "transformer.h.{}.self_attention.dense"),
        _norm("h{}/ln_2", "transformer.h.{}.post_attention_layernorm"),
        _linear("h{}/mlp/up", "transformer.h.{}.mlp.dense_h_to_4h"),
        _linear("h{}/mlp/down", "transformer.h.{}.mlp.dense_4h_to_h"),
        _norm("ln_f", "transformer.ln_f"),
    ),
    prefix="transformer.",
    tied={"lm_head.weight": "transformer.word_embeddings.weight"},
)

_LLAMA = WeightTable(
    _all(
        _table("wte", "model.embed_tokens"),
        _norm("h{}/ln_1", "model.layers.{}.input_layernorm"),
        _linear("h{}/attn/q", "model.layers.{}.self_attn.q_proj"),
        _linear("h{}/attn/k", "model.layers.{}.self_attn.k_proj"),
        _linear("h{}/attn/v", "model.layers.{}.self_attn.v_proj"),
        _norm("h{}/attn/q_norm", "model.layers.{}.self_attn.q_norm"),
        _norm("h{}/attn/k_norm", "model.layers.{}.self_attn.k_norm"),
        _linear("h{}/attn/proj", "model.layers.{}.self_attn.o_proj"),
        _norm("h{}/ln_2", "model.layers.{}.post_attention_layernorm"),
        _linear("h{}/mlp/gate", "model.layers.{}.mlp.gate_proj"),
        _linear("h{}/mlp/up", "model.layers.{}.mlp.up_proj"),
        _linear("h{}/mlp/down", "model.layers.{}.mlp.down_proj"),
        _norm("ln_f", "model.norm"),
        _table("lm_head", "lm_head"),
        _linear("score", "score"),
    ),
    prefix="model.",
    tied={"lm_head.weight": "model.embed_tokens.weight"},
    heads=("score/", "lm_head"),
    unused=(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq", *_OTHER_HEADS),
)

_BERT_LAYER = "bert.encoder.layer.{}"
_BERT = WeightTable(
    _all(
        _table("wte", "bert.embeddings.word_embeddings"),
        _table("wpe", "bert.embeddings.position_embeddings"),
        _table("wtt", "bert.embeddings.token_type_embeddings"),
        _norm("ln_0", "bert.embeddings.LayerNorm"),
        _linear("h{}/attn/q", f"{_BERT_LAYER}.attention.self.query"),
        _linear("h{}/attn/k", f"{_BERT_LAYER}.attention.self.key"),
        _linear("h{}/attn/v", f"{_BERT_LAYER}.attention.self.value"),
        _linear("h{}/attn/proj", f"{_BERT_LAYER}.attention.output.dense"),
        _norm("h{}/ln_1", f"{_BERT_LAYER}.attention.output.LayerNorm"),
        _linear("h{}/mlp/up", f"{_BERT_LAYER}.intermediate.dense"),
        _linear("h{}/mlp/down", f"{_BERT_LAYER}.output.dense"),
        _norm("h{}/ln_2", f"{_BERT_LAYER}.output.LayerNorm"),
        _linear("head/dense", "cls.predictions.transform.dense"),
        _norm("head/ln", "cls.predictions.transform.LayerNorm"),
        [TensorName("head/bias", "cls.predictions.bias")],
        _linear("head/pooler", "bert.pooler.dense"),
        _linear("head/classifier", "classifier"),
    ),
    prefix="bert.",
    tied={
        "cls.predictions.decoder.weight": "bert.embeddings.word_embeddings.weight",
        "cls.predictions.decoder.bias": "cls.predictions.bias",
    },
    heads=("head/pooler/", "head/classifier/", "head/"),
    unused=(
        r"bert\.embeddings\.position_ids",
        r"bert\.pooler\..*",
        r"cls\..*",
        r"classifier\..*",
        r"qa_outputs\..*",
    ),
)

_VIT_LAYER = "vit.encoder.layer.{}"
_VIT = WeightTable(
    _all(
        [
            TensorName("cls", "vit.embeddings.cls_token"),
            TensorName("wpe", "vit.embeddings.position_embeddings"),
            TensorName(  # [features, channels, height, width] there
                "patches/kernel",
                "vit.embeddings.patch_embeddings.projection.weight",
                (2, 3, 1, 0),
            ),
            TensorName(
                "patches/bias", "vit.embeddings.patch_embeddings.projection.bias"
            ),
        ],
        _norm("h{}/ln_1", f"{_VIT_LAYER}.layernorm_before"),
        _linear("h{}/attn/q", f"{_VIT_LAYER}.attention.attention.query"),
        _linear("h{}/attn/k", f"{_VIT_LAYER}.attention.attention.key"),
        _linear("h{}/attn/v", f"{_VIT_LAYER}.attention.attention.value"),
        _linear("h{}/attn/proj", f"{_VIT_LAYER}.attention.output.dense"),
        _norm("h{}/ln_2", f"{_VIT_LAYER}.layernorm_after"),
        _linear("h{}/mlp/up", f"{_VIT_LAYER}.intermediate.dense"),
        _linear("h{}/mlp/down", f"{_VIT_LAYER}.output.dense"),
        _norm("ln_f", "vit.layernorm"),
        _linear("classifier", "classifier"),
    ),
    prefix="vit.",
    heads=("classifier/",),
    unused=(r"vit\.pooler\..*", r"classifier\..*"),
)


def _t5_attention(ours: str, theirs: str) -> list[TensorName]:
    names = {"q": "q", "k": "k", "v": "v", "proj": "o"}
    return [
        TensorName(f"{ours}/{a}/kernel", f"{theirs}.{b}.weight", _LINEAR)
        for a, b in names.items()
    ]


def _t5_mlp(ours: str, theirs: str) -> list[TensorName]:
    return [
        TensorName(f"{ours}/up/kernel", f"{theirs}.wi.weight", _LINEAR),
        TensorName(f"{ours}/down/kernel", f"{theirs}.wo.weight", _LINEAR),
    ]


def _t5_stack(ours: str, theirs: str, layer: str, mlp: int) -> list[TensorName]:
    block = f"{theirs}.block.{{}}.layer"
    first = f"{theirs}.block.0.layer.0.SelfAttention.relative_attention_bias"
    return [
        *_table(f"{ours}_bias/table", first),
        *_norm(f"{layer}{{}}/ln_1", f"{block}.0.layer_norm"),
        *_t5_attention(f"{layer}{{}}/attn", f"{block}.0.SelfAttention"),
        *_norm(f"{layer}{{}}/ln_{mlp + 1}", f"{block}.{mlp}.layer_norm"),
        *_t5_mlp(f"{layer}{{}}/mlp", f"{block}.{mlp}.DenseReluDense"),
        *_norm(f"{ours}_ln_f", f"{theirs}.final_layer_norm"),
    ]


def _t5_table(*, gated: bool) -> WeightTable:
    tensors = _all(
        _table("wte", "shared"),
        _t5_stack("encoder", "encoder", "e", 1),
        _t5_stack("decoder", "decoder", "d", 2),
        _norm("d{}/ln_2", "decoder.block.{}.layer.1.layer_norm"),
        _t5_attention("d{}/cross", "decoder.block.{}.layer.1.EncDecAttention"),
        _table("lm_head", "lm_head"),
    )
    if gated:
        tensors = tuple(part for tensor in tensors for part in _t5_gated(tensor))
    return WeightTable(
        tensors,
        tied={
            "encoder.embed_tokens.weight": "shared.weight",
            "decoder.embed_tokens.weight": "shared.weight",
            "lm_head.weight": "shared.weight",
        },
        # Version 1.0 files have a table that the model never used.
        unused=(
            r"decoder\.block\.0\.layer\.1\.EncDecAttention\.relative_attention_bias\.weight",
        ),
    )


def _t5_gated(tensor: TensorName) -> list[TensorName]:
    """A gated MLP has two layers, wi_0 and wi_1, in the place of wi."""
    if not tensor.theirs.endswith(".wi.weight"):
        return [tensor]
    theirs, ours = tensor.theirs.removesuffix(".wi.weight"), tensor.ours
    return [
        TensorName(ours.replace("/up/", "/gate/"), f"{theirs}.wi_0.weight", _LINEAR),
        TensorName(ours, f"{theirs}.wi_1.weight", _LINEAR),
    ]


TABLES: Mapping[str, WeightTable] = {
    "gpt2": _GPT2,
    "bert": _BERT,
    "t5": _t5_table(gated=False),
    "t5-gated": _t5_table(gated=True),
    "vit": _VIT,
    "bloom": _BLOOM,
    "llama": _LLAMA,
}
"""Tables by the model's name; T5 with a gated MLP has its own."""
