"""Hugging Face's families of models: one table each of tensors and of config fields.

Invariant: reading and writing use the same table. A tensor is changed by a permutation
of its axes alone; a field that affects a model's results has its place in the table.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, TypeAlias

import msgspec
from msgspec import Meta

from jaxinf.documents import convert, one_of

Fields = dict[str, Any]
Document = Mapping[str, Any]

# Of a base below 2, all frequencies are alike, or none is finite.
RopeBase: TypeAlias = Annotated[float, Meta(ge=2, le=2.0**62)]
_Positive: TypeAlias = Annotated[float, Meta(gt=0, le=2.0**62)]


_RopeKind: TypeAlias = Annotated[str, one_of("default", "linear", "llama3")]


class Rope(msgspec.Struct, forbid_unknown_fields=True):
    """Rotary positions: ``rope_parameters``, or ``rope_scaling`` of older files."""

    rope_type: _RopeKind | None = None
    type: _RopeKind | None = None
    rope_theta: RopeBase | None = None
    factor: _Positive | None = None
    low_freq_factor: _Positive | None = None
    high_freq_factor: _Positive | None = None
    original_max_position_embeddings: Annotated[int, Meta(ge=1, le=2**62)] | None = None
    partial_rotary_factor: Annotated[float, Meta(ge=1, le=1)] | None = None


_SUFFIXES = dict.fromkeys(("kernel", "scale", "table"), ".weight") | {"bias": ".bias"}

_ALIASES = {
    "num_layers": "num_hidden_layers n_layer",
    "num_heads": "num_attention_heads n_head",
    "num_features": "hidden_size n_embd n_embed d_model",
    "num_positions": "max_position_embeddings n_positions",
    "head_features": "head_dim",
}
"""Their names of a field of ours, of which a family may have more than one."""


@dataclass(frozen=True)
class Family:
    """One ``model_type``: its tensors, and the fields of its config.json.

    In names ``{}`` is a layer's number.

    Attributes:
      model: Our name of the model.
      classes: Hugging Face's class for each task.
      layers: Our layer → theirs. A kernel is [out, in] there, [in, out] here.
      names: Our field → theirs, which must have a value or a default.
      tensors: Our leaf → their tensor, for those whose name does not end in
        ``.weight``.
      transposed: Whether kernels are [out, in]; GPT-2 has [in, out], too.
      prefix: Prefix of the base model's names, which a bare base model lacks.
      tied: Other names that a file may have for a tensor with shared values.
      heads: Beginnings of our paths that a checkpoint of another task lacks. Below
        each, all leaves exist or none; missing ones are initialised anew.
      unused: Pattern of tensors that are not params: buffers, other tasks' heads.
      defaults: Their field → its value if it is missing.
      fixed: Their field → the value that our model has.
      implied: Our fields whose values follow from this ``model_type``.
      read: Makes further fields of ours from a document with the defaults in it.
      write: The reverse.
    """

    model: str
    classes: Mapping[str, str]
    layers: Mapping[str, str]
    names: Mapping[str, str]
    tensors: Mapping[str, str] = field(default_factory=dict)
    transposed: bool = True
    prefix: str = ""
    tied: Mapping[str, str] = field(default_factory=dict)
    heads: tuple[str, ...] = ()
    unused: str = ""
    defaults: Fields = field(default_factory=dict)
    fixed: Fields = field(default_factory=dict)
    implied: Fields = field(default_factory=dict)
    read: Callable[[Document], Fields] = lambda document: {}
    write: Callable[[Document], Fields] = lambda fields: {}

    @property
    def aliases(self) -> Mapping[str, str]:
        """Their second names of fields → the first."""
        return {
            second: theirs
            for ours, theirs in self.names.items()
            for second in _ALIASES.get(ours, "").split()
            if second != theirs
        }

    def find_tensor(self, path: str) -> tuple[str, tuple[int, ...]]:
        """Returns the name of a leaf's tensor, and the order of its axes in the leaf.

        No axes stand for no change. Raises KeyError for a leaf that the family lacks.
        """
        number = "".join(re.findall(r"^[a-z](\d+)/", path))
        path = re.sub(r"^([a-z])\d+/", r"\1{}/", path)
        if path in self.tensors:
            return self.tensors[path].format(number), ()
        layer, _, kind = path.rpartition("/")
        if path in self.layers:
            layer, kind = path, "table"
        name = self.layers[layer].format(number) + _SUFFIXES[kind]
        axes = (1, 0) if self.transposed or layer == "score" else ()
        if layer == "patches":  # [features, channels, height, width] there
            axes = (2, 3, 1, 0)
        return name, axes if kind == "kernel" else ()

    def is_unused(self, name: str) -> bool:
        return re.fullmatch(self.unused, name) is not None


def _pairs(text: str) -> dict[str, str]:
    """Makes a mapping of ``ours=theirs …``; ``both`` is the same name there."""
    pairs = (pair.partition("=") for pair in text.split())
    return {ours: theirs or ours for ours, _, theirs in pairs}


def _layers(others: str, **stacks: str) -> dict[str, str]:
    """Makes `Family.layers`; a stack is ``its name there: the parts of a layer``."""
    return _pairs(others) | {
        f"{letter}{{}}/{ours}": f"{name}.{{}}.{theirs}"
        for letter, stack in stacks.items()
        for name, _, parts in [stack.partition(":")]
        for ours, theirs in _pairs(parts).items()
    }


def _check_value(name: str, found: Any, *expected: Any) -> None:
    if found is not None and found not in expected:
        wanted = " or ".join(map(repr, expected))
        raise ValueError(f"{name}: expected {wanted}, found {found!r}")


def _decoder_classes(name: str) -> dict[str, str]:
    classes = "causal-lm={0}ForCausalLM classification={0}ForSequenceClassification"
    return _pairs(classes.format(name))


def _read_gpt2(document: Document) -> Fields:
    _check_value("n_inner", document.get("n_inner"), 4 * document["n_embd"])
    return {}


_GPT2 = Family(
    model="gpt2",
    classes=_decoder_classes("GPT2") | {"causal-lm": "GPT2LMHeadModel"},
    layers=_layers(
        "wte=transformer.wte wpe=transformer.wpe ln_f=transformer.ln_f score",
        h="transformer.h: "
        "ln_1 attn/qkv=attn.c_attn attn/proj=attn.c_proj "
        "ln_2 mlp/up=mlp.c_fc mlp/down=mlp.c_proj",
    ),
    names=_pairs(
        "vocab_size num_positions=n_positions num_layers=n_layer "
        "num_heads=n_head num_features=n_embd dropout=resid_pdrop"
    ),
    transposed=False,
    prefix="transformer.",
    tied={"lm_head.weight": "transformer.wte.weight"},
    heads=("score/",),
    unused=r"transformer\.h\.\d+\.attn\.(masked_)?bias|score\.weight",
    defaults={"resid_pdrop": 0.1},
    fixed={
        "activation_function": "gelu_new",
        "layer_norm_epsilon": 1e-5,
        "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False,
        "tie_word_embeddings": True,
    },
    read=_read_gpt2,
)

_BLOOM = Family(
    model="bloom",
    classes={"causal-lm": "BloomForCausalLM"},
    layers=_layers(
        "wte=transformer.word_embeddings ln_0=transformer.word_embeddings_layernorm "
        "ln_f=transformer.ln_f",
        h="transformer.h: "
        "ln_1=input_layernorm attn/proj=self_attention.dense "
        "attn/qkv=self_attention.query_key_value ln_2=post_attention_layernorm "
        "mlp/up=mlp.dense_h_to_4h mlp/down=mlp.dense_4h_to_h",
    ),
    names=_pairs(
        "vocab_size num_layers=n_layer num_heads=n_head num_features=hidden_size "
        "norm_epsilon=layer_norm_epsilon dropout=hidden_dropout"
    ),
    prefix="transformer.",
    tied={"lm_head.weight": "transformer.word_embeddings.weight"},
    defaults={"layer_norm_epsilon": 1e-5, "hidden_dropout": 0.0},
    fixed={
        "apply_residual_connection_post_layernorm": False,
        "tie_word_embeddings": True,
    },
)


_ROPES = {
    "default": {},
    "linear": {"factor": "factor"},
    "llama3": _pairs(
        "factor low_turns=low_freq_factor high_turns=high_freq_factor "
        "original_positions=original_max_position_embeddings"
    ),
}


def _read_rope(document: Document) -> Fields:
    """Reads rotary settings; where a file has both names, the older one counts."""
    name = "rope_scaling" if document.get("rope_scaling") else "rope_parameters"
    rope = msgspec.structs.asdict(convert(document.get(name) or {}, Rope, name))
    kind = rope["rope_type"] or rope["type"] or "default"
    original = "original_max_position_embeddings"
    rope[original] = rope[original] or document["max_position_embeddings"]
    for theirs in _ROPES[kind].values():
        if rope[theirs] is None:
            raise ValueError(f"{name}.{theirs}: expected a value, found none")
    scaling = {ours: rope[theirs] for ours, theirs in _ROPES[kind].items()}
    return {
        "rope_base": float(rope["rope_theta"] or document.get("rope_theta") or 1e4),
        "rope_scaling": {"kind": kind, **scaling} if scaling else None,
    }


def _read_llama(document: Document) -> Fields:
    heads = document["num_attention_heads"]
    features = document["hidden_size"] // heads
    head_features = document.get("head_dim") or features
    for kind in document.get("layer_types") or ():
        _check_value("layer_types", kind, "full_attention")
    return {
        **_read_rope(document),
        "num_kv_heads": document.get("num_key_value_heads") or heads,
        "head_features": None if head_features == features else head_features,
    }


def _write_llama(fields: Document) -> Fields:
    features = fields["num_features"] // fields["num_heads"]
    scaling, rope = fields["rope_scaling"], None
    if scaling is not None:
        names = _ROPES[scaling["kind"]]
        rope = {theirs: scaling[ours] for ours, theirs in names.items()}
        rope["rope_type"] = scaling["kind"]
    return {
        "rope_theta": fields["rope_base"],
        "rope_scaling": rope,
        "num_key_value_heads": fields["num_kv_heads"],
        "head_dim": fields["head_features"] or features,
    }


_LLAMA = Family(
    model="llama",
    classes=_decoder_classes("Llama"),
    layers=_layers(
        "wte=model.embed_tokens ln_f=model.norm lm_head score",
        h="model.layers: "
        "ln_1=input_layernorm ln_2=post_attention_layernorm "
        "attn/q=self_attn.q_proj attn/k=self_attn.k_proj attn/v=self_attn.v_proj "
        "attn/q_norm=self_attn.q_norm attn/k_norm=self_attn.k_norm "
        "attn/proj=self_attn.o_proj mlp/gate=mlp.gate_proj mlp/up=mlp.up_proj "
        "mlp/down=mlp.down_proj",
    ),
    names=_pairs(
        "vocab_size num_positions=max_position_embeddings "
        "num_layers=num_hidden_layers num_heads=num_attention_heads "
        "num_features=hidden_size num_hidden=intermediate_size "
        "norm_epsilon=rms_norm_eps tied_embeddings=tie_word_embeddings"
    ),
    prefix="model.",
    tied={"lm_head.weight": "model.embed_tokens.weight"},
    heads=("score/", "lm_head"),
    unused=r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq|score\.weight",
    defaults={"rms_norm_eps": 1e-6, "tie_word_embeddings": False},
    fixed={"hidden_act": "silu", "attention_bias": False, "mlp_bias": False},
    implied={"window": None, "qkv_bias": False, "qk_norm": False},
    read=_read_llama,
    write=_write_llama,
)

_MISTRAL = replace(
    _LLAMA,
    classes=_decoder_classes("Mistral"),
    defaults=_LLAMA.defaults | {"sliding_window": 4096, "num_key_value_heads": 8},
    fixed={"hidden_act": "silu"},
    implied={"qkv_bias": False, "qk_norm": False},
    read=lambda given: _read_llama(given) | {"window": given["sliding_window"]},
    write=lambda fields: _write_llama(fields) | {"sliding_window": fields["window"]},
)

_QWEN2 = replace(
    _LLAMA,
    classes=_decoder_classes("Qwen2"),
    defaults=_LLAMA.defaults | {"num_key_value_heads": 32, "sliding_window": None},
    fixed=_LLAMA.fixed | {"use_sliding_window": False},
    implied={"window": None, "qkv_bias": True, "qk_norm": False},
)

_QWEN3 = replace(
    _QWEN2,
    classes=_decoder_classes("Qwen3"),
    defaults=_QWEN2.defaults | {"head_dim": 128},
    implied={"window": None, "qkv_bias": False, "qk_norm": True},
)

_ENCODER_NAMES = _pairs(
    "num_layers=num_hidden_layers num_heads=num_attention_heads "
    "num_features=hidden_size num_hidden=intermediate_size dropout=hidden_dropout_prob"
)
_ENCODER_FIXED = {"hidden_act": "gelu", "layer_norm_eps": 1e-12}

_BERT = Family(
    model="bert",
    classes=_pairs(
        "masked-lm=BertForMaskedLM classification=BertForSequenceClassification"
    ),
    layers=_layers(
        "wte=bert.embeddings.word_embeddings wpe=bert.embeddings.position_embeddings "
        "wtt=bert.embeddings.token_type_embeddings ln_0=bert.embeddings.LayerNorm "
        "head=cls.predictions head/dense=cls.predictions.transform.dense "
        "head/ln=cls.predictions.transform.LayerNorm head/pooler=bert.pooler.dense "
        "head/classifier=classifier",
        h="bert.encoder.layer: "
        "attn/q=attention.self.query "
        "attn/k=attention.self.key attn/v=attention.self.value "
        "attn/proj=attention.output.dense ln_1=attention.output.LayerNorm "
        "mlp/up=intermediate.dense mlp/down=output.dense ln_2=output.LayerNorm",
    ),
    names=_ENCODER_NAMES
    | _pairs(
        "vocab_size num_positions=max_position_embeddings "
        "num_token_types=type_vocab_size"
    ),
    prefix="bert.",
    tied={
        "cls.predictions.decoder.weight": "bert.embeddings.word_embeddings.weight",
        "cls.predictions.decoder.bias": "cls.predictions.bias",
    },
    heads=("head/pooler/", "head/classifier/", "head/"),
    unused=r"bert\.embeddings\.position_ids|bert\.pooler\..*|cls\..*|classifier\..*"
    r"|qa_outputs\..*",
    defaults={"hidden_dropout_prob": 0.1, "type_vocab_size": 2},
    fixed=_ENCODER_FIXED
    | {"position_embedding_type": "absolute", "tie_word_embeddings": True},
)

_VIT = Family(
    model="vit",
    classes={"classification": "ViTForImageClassification"},
    layers=_layers(
        "patches=vit.embeddings.patch_embeddings.projection ln_f=vit.layernorm "
        "classifier",
        h="vit.encoder.layer: "
        "ln_1=layernorm_before ln_2=layernorm_after "
        "attn/q=attention.attention.query attn/k=attention.attention.key "
        "attn/v=attention.attention.value attn/proj=attention.output.dense "
        "mlp/up=intermediate.dense mlp/down=output.dense",
    ),
    tensors=_pairs(
        "cls=vit.embeddings.cls_token wpe=vit.embeddings.position_embeddings"
    ),
    names=_ENCODER_NAMES | _pairs("image_size patch_size num_channels"),
    prefix="vit.",
    heads=("classifier/",),
    unused=r"vit\.pooler\..*|classifier\..*",
    defaults={"hidden_dropout_prob": 0.0, "num_channels": 3}
    | {"image_size": 224, "patch_size": 16},
    fixed=_ENCODER_FIXED | {"qkv_bias": True},
)


def _read_t5(document: Document) -> Fields:
    kind = document["feed_forward_proj"]
    _check_value("feed_forward_proj", kind, "relu", "gated-gelu")
    is_gated = kind == "gated-gelu"
    _check_value("is_gated_act", document.get("is_gated_act"), is_gated)
    activation = "gelu_new" if is_gated else "relu"
    _check_value("dense_act_fn", document.get("dense_act_fn"), activation)
    is_tied = document.get("tie_word_embeddings", True)
    return {
        "num_decoder_layers": document.get("num_decoder_layers")
        or document["num_layers"],
        "mlp": kind,
        # Newer files always say tied; this field says whether the output is scaled.
        "tied_embeddings": document.get("scale_decoder_outputs", is_tied),
    }


def _write_t5(fields: Document) -> Fields:
    return {
        "num_decoder_layers": fields["num_decoder_layers"],
        "feed_forward_proj": fields["mlp"],
        "tie_word_embeddings": fields["tied_embeddings"],
        "is_encoder_decoder": True,
        "decoder_start_token_id": 0,
    }


_T5_MLP = (
    "mlp/gate={0}.DenseReluDense.wi_0 mlp/up={0}.DenseReluDense.wi "
    "mlp/down={0}.DenseReluDense.wo"
)
_T5_ATTENTION = "{0}/q={1}.q {0}/k={1}.k {0}/v={1}.v {0}/proj={1}.o "
_T5_FIRST = "block.0.layer.0.SelfAttention.relative_attention_bias"
_T5 = Family(
    model="t5",
    classes={"seq2seq": "T5ForConditionalGeneration"},
    layers=_layers(
        "wte=shared lm_head encoder_ln_f=encoder.final_layer_norm "
        "decoder_ln_f=decoder.final_layer_norm "
        f"encoder_bias=encoder.{_T5_FIRST} decoder_bias=decoder.{_T5_FIRST}",
        e="encoder.block: "
        "ln_1=layer.0.layer_norm ln_2=layer.1.layer_norm "
        + _T5_ATTENTION.format("attn", "layer.0.SelfAttention")
        + _T5_MLP.format("layer.1"),
        d="decoder.block: "
        "ln_1=layer.0.layer_norm ln_2=layer.1.layer_norm ln_3=layer.2.layer_norm "
        + _T5_ATTENTION.format("attn", "layer.0.SelfAttention")
        + _T5_ATTENTION.format("cross", "layer.1.EncDecAttention")
        + _T5_MLP.format("layer.2"),
    ),
    names=_pairs(
        "vocab_size num_layers num_heads num_features=d_model head_features=d_kv "
        "num_hidden=d_ff num_buckets=relative_attention_num_buckets "
        "dropout=dropout_rate max_distance=relative_attention_max_distance"
    ),
    tied={
        f"{name}.weight": "shared.weight"
        for name in ("encoder.embed_tokens", "decoder.embed_tokens", "lm_head")
    },
    # Version 1.0 files have a table that the model never used.
    unused=r"decoder\.block\.0\.layer\.1\.EncDecAttention\.relative_attention_bias"
    r"\.weight",
    defaults={"relative_attention_num_buckets": 32, "feed_forward_proj": "relu"}
    | {"relative_attention_max_distance": 128, "dropout_rate": 0.1},
    fixed={"layer_norm_epsilon": 1e-6},
    read=_read_t5,
    write=_write_t5,
)

# Its MLP has two layers in the place of the first.
T5_GATED = replace(
    _T5,
    layers={
        ours: theirs + "_1" * ours.endswith("/mlp/up")
        for ours, theirs in _T5.layers.items()
    },
)

FAMILIES: Mapping[str, Family] = {
    "gpt2": _GPT2,
    "bloom": _BLOOM,
    "llama": _LLAMA,
    "mistral": _MISTRAL,
    "qwen2": _QWEN2,
    "qwen3": _QWEN3,
    "bert": _BERT,
    "vit": _VIT,
    "t5": _T5,
}
"""The families by ``model_type``."""
