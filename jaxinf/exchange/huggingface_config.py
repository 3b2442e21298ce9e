"""Hugging Face's config.json and the fields of our models' configs.

Invariant: a setting that affects the model's results is read, or refused if our model
  does not support it; none is ignored.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any, TypeAlias

import msgspec
from msgspec import Meta

from jaxinf.documents import DocumentError, convert
from jaxinf.errors import ExchangeError
from jaxinf.typing import JsonValue

_EXTRA = ("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id")
_UNREADABLE = (KeyError, TypeError, ValueError, AttributeError, ArithmeticError)
_LABELS = ("id2label", "label2id")
_READ_LAST = ("gpt2", "llama")
Fields = dict[str, Any]

_Count: TypeAlias = Annotated[int, Meta(ge=0, le=2**31)]
# Of a base below 2, all frequencies are alike, or none is finite.
_RopeBase: TypeAlias = Annotated[float, Meta(ge=2, le=2.0**62)]
_Factor: TypeAlias = Annotated[float, Meta(ge=0, le=2**20)]


class _Rope(msgspec.Struct):
    rope_type: str = ""
    type: str = ""
    original_max_position_embeddings: Annotated[float, Meta(ge=1, le=2.0**62)] = 1
    rope_theta: _RopeBase = 2
    factor: _Factor = 0
    low_freq_factor: _Factor = 0
    high_freq_factor: _Factor = 0


_KINDS: Mapping[str, Any] = {
    "dropout": Annotated[float, Meta(ge=0, le=1)],
    "norm_epsilon": Annotated[float, Meta(ge=1e-30, le=0.1)],
    "tied_embeddings": bool,
}
"""Our field → its type; all others are counts."""

_OTHER_KINDS: Mapping[str, Any] = {
    "rope_parameters": _Rope,
    "rope_scaling": _Rope,
    "rope_theta": _RopeBase,
    "id2label": dict[str, Any],
    "label2id": dict[str, Any],
    "tie_word_embeddings": bool,
    "scale_decoder_outputs": bool,
    **dict.fromkeys(
        (
            *("num_labels", "num_decoder_layers", "num_key_value_heads", "head_dim"),
            *("sliding_window", "n_inner"),
        ),
        _Count,
    ),
}
"""Their fields that `read` of a table looks at → their types."""


@dataclass(frozen=True)
class Architecture:
    """The model of a checkpoint.

    Attributes:
      model: our name of the model.
      fields: the fields of its config, JSON; nested configs are objects.
      model_type: Hugging Face's name.
      extra: settings that our model does not use and an export restores: special
        tokens, names of labels.
    """

    model: str
    fields: Mapping[str, Any]
    model_type: str
    extra: Mapping[str, Any] = field(default_factory=dict)

    @property
    def table(self) -> str:
        """The key of its `WeightTable`."""
        return "t5-gated" if self.fields.get("mlp") == "gated-gelu" else self.model


@dataclass(frozen=True)
class _ConfigTable:
    """The rules for reading and writing one `model_type`.

    Attributes:
      names: our field → theirs; a missing one is an error.
      fixed: their field → its permitted values; the first is the default.
      classes: Hugging Face's class for each task.
    """

    model: str
    names: Mapping[str, str]
    classes: Mapping[str, str]
    defaults: Mapping[str, Any] = field(default_factory=dict)
    fixed: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    read: Callable[[Mapping[str, Any]], Fields] = lambda document: {}
    write: Callable[[Mapping[str, Any]], Fields] = lambda fields: {}

    @property
    def kinds(self) -> Mapping[str, Any]:
        """Their field → its type, besides null and missing."""
        own = {theirs: _KINDS.get(ours, _Count) for ours, theirs in self.names.items()}
        return {**_OTHER_KINDS, **own}


def _read_gpt2(document: Mapping[str, Any]) -> Fields:
    hidden = document.get("n_inner")
    if hidden not in (None, 4 * document["n_embd"]):
        raise ValueError(
            f"n_inner: expected 4 * n_embd = {4 * document['n_embd']}, found {hidden}"
        )
    return _read_labels(document)


def _read_t5(document: Mapping[str, Any]) -> Fields:
    kind = document.get("feed_forward_proj", "relu")
    if kind not in ("relu", "gated-gelu"):
        raise ValueError(
            f"feed_forward_proj: expected 'relu' or 'gated-gelu', found {kind!r}"
        )
    layers = document["num_layers"]
    is_tied = document.get("tie_word_embeddings", True)
    return {
        "num_decoder_layers": document.get("num_decoder_layers") or layers,
        "mlp": kind,
        # Newer files always say tied; this field says whether the output is scaled.
        "tied_embeddings": document.get("scale_decoder_outputs", is_tied),
    }


def _write_t5(fields: Mapping[str, Any]) -> Fields:
    return {
        "num_decoder_layers": fields["num_decoder_layers"],
        "feed_forward_proj": fields["mlp"],
        "tie_word_embeddings": fields["tied_embeddings"],
        "is_encoder_decoder": True,
        "decoder_start_token_id": 0,
    }


def _read_labels(document: Mapping[str, Any]) -> Fields:
    labels = document.get("id2label")
    count = len(labels) if labels else document.get("num_labels", 2)
    return {"num_labels": count}


def _write_labels(fields: Mapping[str, Any]) -> Fields:
    if "num_labels" not in fields:  # a language model
        return {}
    names = {str(n): f"LABEL_{n}" for n in range(fields["num_labels"])}
    return {"id2label": names, "label2id": {v: int(k) for k, v in names.items()}}


def _read_rope(document: Mapping[str, Any]) -> Fields:
    """Reads rotary settings from older and newer files."""
    rope = document.get("rope_parameters") or document.get("rope_scaling") or {}
    base = rope.get("rope_theta", document.get("rope_theta", 10000.0))
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return {"rope_base": float(base), "rope_scaling": None}
    if kind not in ("linear", "llama3"):
        raise ValueError(
            f"rope_scaling: expected rope_type default, linear or llama3, found {kind}"
        )
    scaling = {"kind": kind, "factor": float(rope["factor"])}
    if kind == "llama3":
        scaling |= {
            "low_turns": float(rope["low_freq_factor"]),
            "high_turns": float(rope["high_freq_factor"]),
            "original_positions": int(rope["original_max_position_embeddings"]),
        }
    return {"rope_base": float(base), "rope_scaling": scaling}


def _write_rope(fields: Mapping[str, Any]) -> Fields:
    rope: Fields = {"rope_theta": fields["rope_base"]}
    scaling = fields["rope_scaling"]
    if scaling is None:
        return {"rope_theta": fields["rope_base"], "rope_scaling": None}
    rope = {"rope_type": scaling["kind"], "factor": scaling["factor"]}
    if scaling["kind"] == "llama3":
        rope |= {
            "low_freq_factor": scaling["low_turns"],
            "high_freq_factor": scaling["high_turns"],
            "original_max_position_embeddings": scaling["original_positions"],
        }
    return {"rope_theta": fields["rope_base"], "rope_scaling": rope}


def _read_llama(document: Mapping[str, Any]) -> Fields:
    heads = document["num_attention_heads"]
    features = document["hidden_size"] // heads
    head_features = document.get("head_dim") or features
    return {
        **_read_rope(document),
        **_read_labels(document),
        "num_kv_heads": document.get("num_key_value_heads") or heads,
        "head_features": None if head_features == features else head_features,
    }


def _write_llama(fields: Mapping[str, Any]) -> Fields:
    features = fields["num_features"] // fields["num_heads"]
    return {
        **_write_rope(fields),
        **_write_labels(fields),
        "num_key_value_heads": fields["num_kv_heads"],
        "head_dim": fields["head_features"] or features,
    }


def _llama(**own: Any) -> Callable[[Mapping[str, Any]], Fields]:
    """Reads Llama's fields, with those that differ between its relatives."""

    def read(document: Mapping[str, Any]) -> Fields:
        found = {
            name: value(document) if callable(value) else value
            for name, value in own.items()
        }
        return _read_llama(document) | found

    return read


def _decoder_classes(name: str) -> Mapping[str, str]:
    return {
        "causal-lm": f"{name}ForCausalLM",
        "classification": f"{name}ForSequenceClassification",
    }


def _qwen(**own: bool) -> _ConfigTable:
    read = _llama(window=None, **{"qkv_bias": False, "qk_norm": False, **own})

    def write(fields: Mapping[str, Any]) -> Fields:
        return _write_llama(fields) | {"use_sliding_window": False}

    name = "Qwen2" if own.get("qkv_bias") else "Qwen3"
    classes = _decoder_classes(name)
    fixed = _LLAMA_FIXED | {"use_sliding_window": (False,), "attention_bias": (False,)}
    return _ConfigTable(
        "llama", _LLAMA_NAMES, classes, _LLAMA_DEFAULTS, fixed, read, write
    )


_GPT2_NAMES = {
    "vocab_size": "vocab_size",
    "num_positions": "n_positions",
    "num_layers": "n_layer",
    "num_heads": "n_head",
    "num_features": "n_embd",
    "dropout": "resid_pdrop",
}
_LLAMA_NAMES = {
    "vocab_size": "vocab_size",
    "num_positions": "max_position_embeddings",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "num_features": "hidden_size",
    "num_hidden": "intermediate_size",
    "norm_epsilon": "rms_norm_eps",
    "tied_embeddings": "tie_word_embeddings",
}
_LLAMA_DEFAULTS = {"rms_norm_eps": 1e-6, "tie_word_embeddings": False}
_LLAMA_FIXED: dict[str, tuple[Any, ...]] = {"hidden_act": ("silu",)}
_ENCODER_NAMES = {
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "num_features": "hidden_size",
    "num_hidden": "intermediate_size",
    "dropout": "hidden_dropout_prob",
}
_ENCODER_FIXED: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("gelu",),
    "layer_norm_eps": (1e-12,),
}

_CONFIGS: Mapping[str, _ConfigTable] = {
    "gpt2": _ConfigTable(
        "gpt2",
        _GPT2_NAMES,
        {
            "causal-lm": "GPT2LMHeadModel",
            "classification": "GPT2ForSequenceClassification",
        },
        {"resid_pdrop": 0.1},
        {
            "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
            "layer_norm_epsilon": (1e-5,),
            "scale_attn_weights": (True,),
            "scale_attn_by_inverse_layer_idx": (False,),
            "add_cross_attention": (False,),
            "tie_word_embeddings": (True,),
        },
        read=_read_gpt2,
        write=_write_labels,
    ),
    "bloom": _ConfigTable(
        "bloom",
        {
            "vocab_size": "vocab_size",
            "num_layers": "n_layer",
            "num_heads": "n_head",
            "num_features": "hidden_size",
            "norm_epsilon": "layer_norm_epsilon",
            "dropout": "hidden_dropout",
        },
        {"causal-lm": "BloomForCausalLM"},
        {"layer_norm_epsilon": 1e-5, "hidden_dropout": 0.0},
        {
            "apply_residual_connection_post_layernorm": (False,),
            "tie_word_embeddings": (True,),
        },
    ),
    "llama": _ConfigTable(
        "llama",
        _LLAMA_NAMES,
        _decoder_classes("Llama"),
        _LLAMA_DEFAULTS,
        _LLAMA_FIXED | {"attention_bias": (False,), "mlp_bias": (False,)},
        _llama(window=None, qkv_bias=False, qk_norm=False),
        _write_llama,
    ),
    "mistral": _ConfigTable(
        "llama",
        _LLAMA_NAMES,
        _decoder_classes("Mistral"),
        _LLAMA_DEFAULTS,
        _LLAMA_FIXED,
        _llama(
            window=lambda document: document.get("sliding_window"),
            qkv_bias=False,
            qk_norm=False,
        ),
        lambda fields: _write_llama(fields) | {"sliding_window": fields["window"]},
    ),
    "qwen2": _qwen(qkv_bias=True),
    "qwen3": _qwen(qk_norm=True),
    "bert": _ConfigTable(
        "bert",
        _ENCODER_NAMES
        | {
            "vocab_size": "vocab_size",
            "num_positions": "max_position_embeddings",
            "num_token_types": "type_vocab_size",
        },
        {
            "masked-lm": "BertForMaskedLM",
            "classification": "BertForSequenceClassification",
        },
        {"hidden_dropout_prob": 0.1, "type_vocab_size": 2},
        _ENCODER_FIXED
        | {
            "position_embedding_type": ("absolute",),
            "is_decoder": (False,),
            "add_cross_attention": (False,),
            "tie_word_embeddings": (True,),
        },
        _read_labels,
        _write_labels,
    ),
    "vit": _ConfigTable(
        "vit",
        _ENCODER_NAMES
        | {
            "image_size": "image_size",
            "patch_size": "patch_size",
            "num_channels": "num_channels",
        },
        {"classification": "ViTForImageClassification"},
        {"hidden_dropout_prob": 0.0, "num_channels": 3},
        _ENCODER_FIXED | {"qkv_bias": (True,)},
        _read_labels,
        _write_labels,
    ),
    "t5": _ConfigTable(
        "t5",
        {
            "vocab_size": "vocab_size",
            "num_layers": "num_layers",
            "num_heads": "num_heads",
            "num_features": "d_model",
            "head_features": "d_kv",
            "num_hidden": "d_ff",
            "num_buckets": "relative_attention_num_buckets",
            "max_distance": "relative_attention_max_distance",
            "dropout": "dropout_rate",
        },
        {"seq2seq": "T5ForConditionalGeneration"},
        {
            "relative_attention_num_buckets": 32,
            "relative_attention_max_distance": 128,
            "dropout_rate": 0.1,
        },
        {"layer_norm_epsilon": (1e-6,)},
        _read_t5,
        _write_t5,
    ),
}


def read_config(document: Any, *, where: str) -> Architecture:
    """Reads a config.json as the fields of one of our configs.

    Raises:
      ExchangeError: the architecture or its settings are not supported; lists them.
    """
    kind = document.get("model_type") if isinstance(document, dict) else None
    table = _CONFIGS.get(kind) if isinstance(kind, str) else None
    if table is None:
        raise ExchangeError(
            f"{where}: expected a model_type of {', '.join(_CONFIGS)}, found {kind!r}; "
            "other architectures are not known here"
        )
    known = {**table.defaults, **document}
    problems = [
        f"{theirs}: expected a value, found none"
        for theirs in table.names.values()
        if known.get(theirs) is None
    ]
    problems += list(
        filter(None, map(partial(_problem, document), table.kinds.items()))
    )
    problems += [
        f"{theirs}: expected {' or '.join(map(repr, allowed))}, which this model "
        f"supports, found {document[theirs]!r}"
        for theirs, allowed in table.fixed.items()
        if document.get(theirs) is not None and document[theirs] not in allowed
    ]
    if not problems:
        try:
            fields = {ours: known[theirs] for ours, theirs in table.names.items()}
            fields |= table.read(known)
            extra = {k: document[k] for k in (*_EXTRA, *_LABELS) if k in document}
            return Architecture(table.model, fields, str(kind), extra)
        except _UNREADABLE as error:
            problems = [f"{type(error).__name__}: {error}"]
    raise ExchangeError(
        f"{where}: a {kind} that cannot be read here: {'; '.join(problems)}. Nothing "
        "was written"
    )


def _problem(document: Mapping[str, Any], field: tuple[str, Any]) -> str | None:
    """Describes a value of another kind; None if it is right, null or missing."""
    name, kind = field
    try:
        if document.get(name) is not None:
            convert(document[name], kind, name)
    except DocumentError as error:
        return str(error)
    return None


def write_config(
    architecture: Architecture, task: str, dtype: str
) -> dict[str, JsonValue]:
    """Makes the config.json of one of our models.

    Args:
      architecture: the model's architecture; its `model_type` may be empty, and is
        ignored if it does not fit the model.
      task: the task of its head.
      dtype: dtype of the tensors beside it.

    Raises:
      ExchangeError: Hugging Face has no architecture with these fields.
    """
    fields, extra = architecture.fields, dict(architecture.extra)
    kind = _model_type(architecture.model, fields)
    if (kind, architecture.model_type) == ("llama", "mistral"):
        kind = "mistral"  # without a window it computes what Llama does
    if task == "classification" and architecture.model in _READ_LAST:
        extra |= _padding(extra)
    if len(extra.get("id2label") or ()) != fields.get("num_labels"):
        extra = {k: v for k, v in extra.items() if k not in _LABELS}
    table = _CONFIGS[kind]
    return {
        "architectures": [table.classes[task]],
        "model_type": kind,
        **{theirs: fields[ours] for ours, theirs in table.names.items()},
        **{theirs: allowed[0] for theirs, allowed in table.fixed.items()},
        **table.write(fields),
        **extra,
        "torch_dtype": dtype,
    }


def _padding(extra: Mapping[str, Any]) -> Fields:
    """Returns the padding of a classifier that reads the last token before it.

    `transformers` refuses a batch without one. Where a model has none, its end is used,
    as the trainer does.
    """
    end = extra.get("eos_token_id")
    end = end[0] if isinstance(end, list) and end else end
    pad = extra.get("pad_token_id")
    return {} if end is None or pad is not None else {"pad_token_id": end}


def _model_type(model: str, fields: Mapping[str, Any]) -> str:
    """Finds the architecture of our model with these fields.

    Raises:
      ExchangeError: there is none.
    """
    if model != "llama":
        return model
    own = (fields["window"] is not None, fields["qkv_bias"], fields["qk_norm"])
    kinds = {
        (False, False, False): "llama",
        (True, False, False): "mistral",
        (False, True, False): "qwen2",
        (False, False, True): "qwen3",
    }
    if own not in kinds:
        raise ExchangeError(
            "a llama config with more than one of window, qkv_bias and qk_norm: "
            "expected one of Llama, Mistral, Qwen 2 or Qwen 3; Hugging Face has no "
            "such architecture to export to"
        )
    return kinds[own]
