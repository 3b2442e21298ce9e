"""Hugging Face's config.json and the fields of our models' configs.

Invariant: a field that affects the model's results is read, or refused by its name; so
is one of which that is not known.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, TypeAlias

from msgspec import Meta

from jaxinf.documents import convert, shorten
from jaxinf.errors import ExchangeError
from jaxinf.exchange.huggingface_families import (
    FAMILIES,
    T5_GATED,
    Document,
    Family,
    Fields,
    Rope,
    RopeBase,
)
from jaxinf.exchange.sources import read_json_document
from jaxinf.typing import JsonValue

_EXTRA = ("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id")
_UNREADABLE = (KeyError, TypeError, ValueError, AttributeError, ArithmeticError)
_CLASSIFY_LAST_TOKEN = ("gpt2", "llama")
_EQUAL_VALUES = {"activation_function": ("gelu_pytorch_tanh",)}

_Count: TypeAlias = Annotated[int, Meta(ge=0, le=2**31)]
_Share: TypeAlias = Annotated[float, Meta(ge=0, le=1)]
_Epsilon: TypeAlias = Annotated[float, Meta(ge=1e-30, le=0.1)]

_LABELS = ("id2label", "label2id")

_KINDS: Mapping[str, Any] = {
    name: kind
    for names, kind in (
        ("resid_pdrop hidden_dropout dropout_rate hidden_dropout_prob", _Share),
        ("rms_norm_eps layer_norm_epsilon", _Epsilon),
        ("tie_word_embeddings scale_decoder_outputs is_gated_act", bool),
        ("feed_forward_proj dense_act_fn", str),
        ("n_inner num_decoder_layers num_key_value_heads head_dim num_labels", _Count),
        ("layer_types", list[str]),
        ("rope_theta", RopeBase),
        ("rope_parameters rope_scaling", Rope),
        ("id2label label2id", dict[str, Any]),
    )
    for name in names.split()
}
"""Types of fields that are read; others of a family are counts."""

_REQUIRED: Fields = {
    "is_decoder": False,
    "add_cross_attention": False,
    "tie_encoder_decoder": False,
    "problem_type": "single_label_classification",
    "pruned_heads": {},
    "quantization_config": None,
    "partial_rotary_factor": 1,
    **dict.fromkeys(("rope_interleaved", "use_mrope"), False),
}
"""Fields of any family → the value that our models have; an export leaves them out."""

_HARMLESS = frozenset(
    """
    architectures dtype torch_dtype transformers_version tokenizer_class model_type
    use_cache initializer_range initializer_factor gradient_checkpointing torchscript
    chunk_size_feed_forward use_bfloat16 tf_legacy_loss finetuning_task directionality
    task_specific_params prefix is_encoder_decoder is_llama_config max_sequence_length
    attention_dropout attention_probs_dropout_prob attn_pdrop embd_pdrop
    classifier_dropout max_length min_length max_new_tokens do_sample early_stopping
    num_beams num_beam_groups diversity_penalty temperature top_k top_p typical_p
    repetition_penalty length_penalty no_repeat_ngram_size num_return_sequences
    encoder_no_repeat_ngram_size bad_words_ids remove_invalid_values suppress_tokens
    begin_suppress_tokens exponential_decay_length_penalty transformers.js_config
    n_ctx n_special n_positions predict_special_tokens reorder_and_upcast_attn
    pretraining_tp slow_but_exact seq_length offset_alibi attention_softmax_in_fp32
    masked_softmax_fusion bias_dropout_fusion skip_bias_add skip_bias_add_qkv
    encoder_stride max_window_layers
    """.split()
)
_HARMLESS_PREFIXES = ("_", "output_", "pooler_", "return_dict", "summary_", "unsloth")
"""Fields on which no logits and no loss of any family depend."""


@dataclass(frozen=True)
class Architecture:
    """The model of a checkpoint.

    Attributes:
      model: Our name of the model.
      fields: The fields of its config, JSON; nested configs are objects.
      model_type: Hugging Face's name.
      extra: Settings that our model does not use and an export restores: special
        tokens, names of labels.
    """

    model: str
    fields: Mapping[str, Any]
    model_type: str
    extra: Mapping[str, Any] = field(default_factory=dict)

    @property
    def family(self) -> Family:
        is_gated = self.fields.get("mlp") == "gated-gelu"
        return T5_GATED if is_gated else FAMILIES[self.model]


def read_config(document: Any, *, where: str) -> Architecture:
    """Reads a config.json as the fields of one of our configs; refuses all others."""
    kind = document.get("model_type") if isinstance(document, dict) else None
    family = FAMILIES.get(kind) if isinstance(kind, str) else None
    if family is None:
        raise ExchangeError(
            f"{where}: expected a model_type of {', '.join(FAMILIES)}, found {kind!r}; "
            "other architectures are not known here"
        )
    document = _resolve_aliases(document, family)
    values = {**family.defaults, **document}
    try:
        for name, value in document.items():
            _check_field(family, name, value)
        for theirs in family.names.values():
            if values.get(theirs) is None:
                raise ValueError(f"{theirs}: expected a value, found none")
        fields = {ours: values[theirs] for ours, theirs in family.names.items()}
        fields |= family.implied | family.read(values)
        if "classification" in family.classes:
            labels = document.get("id2label")
            fields["num_labels"] = len(labels or ()) or document.get("num_labels", 2)
    except _UNREADABLE as error:
        raise ExchangeError(
            f"{where}: a {kind} that cannot be read here: {error}. Nothing was written"
        ) from error
    extra = {k: document[k] for k in (*_EXTRA, *_LABELS) if k in document}
    return Architecture(family.model, fields, str(kind), extra)


def _resolve_aliases(document: Document, family: Family) -> Fields:
    """Replaces second names of fields by the first, which win where both are there."""
    aliases = family.aliases
    present = {k: v for k, v in document.items() if v is not None}
    renamed = {aliases[k]: v for k, v in present.items() if k in aliases}
    return renamed | {k: v for k, v in document.items() if k not in aliases}


def _check_field(family: Family, name: str, value: Any) -> None:
    """Refuses a value that cannot be read, and a field that is not known."""
    required = _REQUIRED | family.fixed
    if value is None:
        return
    if name in required:
        if value in (required[name], *_EQUAL_VALUES.get(name, ())):
            return
        raise ValueError(
            f"{name}: expected {required[name]!r}, as this model has it, found "
            f"{shorten(value)}"
        )
    if name in (*family.names.values(), *family.defaults, *_KINDS):
        convert(value, _KINDS.get(name, _Count), name)
        return
    if name in _HARMLESS or name.startswith(_HARMLESS_PREFIXES):
        return
    if name.endswith("_token_id"):
        return
    raise ValueError(
        f"{shorten(name)}: expected no such field, as it is not known here what it "
        f"changes, found {shorten(value)}; take it out if no result depends on it"
    )


def read_config_file(path: Path) -> Architecture:
    """Reads a config.json, beside which there may be no weights."""
    what, remedy = "a config.json of Hugging Face", "check the path, or copy it anew"
    document = read_json_document(path, dict[str, Any], what, remedy)
    return read_config(document, where=str(path))


def write_config(
    architecture: Architecture, task: str, dtype: str
) -> dict[str, JsonValue]:
    """Makes the config.json of one of our models, with tensors of a dtype beside it."""
    fields, extra = architecture.fields, dict(architecture.extra)
    kind = _model_type(architecture)
    if task == "classification" and architecture.model in _CLASSIFY_LAST_TOKEN:
        # The last token before the padding is read, and `transformers` refuses a batch
        # without one. A model without one gets its end, as in the trainer.
        end = extra.get("eos_token_id")
        end = end[0] if isinstance(end, list) and end else end
        if end is not None and extra.get("pad_token_id") is None:
            extra["pad_token_id"] = end
    family, num_labels = FAMILIES[kind], fields.get("num_labels")
    if len(extra.get("id2label") or ()) != num_labels:
        extra = {k: v for k, v in extra.items() if k not in _LABELS}
        if num_labels is not None:  # no language model
            names = {str(n): f"LABEL_{n}" for n in range(num_labels)}
            extra["id2label"] = names
            extra["label2id"] = {name: int(n) for n, name in names.items()}
    return {
        "architectures": [family.classes[task]],
        "model_type": kind,
        **{theirs: fields[ours] for ours, theirs in family.names.items()},
        **family.fixed,
        **family.write(fields),
        **extra,
        "torch_dtype": dtype,
    }


def _model_type(architecture: Architecture) -> str:
    """Finds a ``model_type`` with these fields, if possible that of the source."""
    for kind in (architecture.model_type, *FAMILIES):
        family = FAMILIES.get(kind)
        if family is not None and family.model == architecture.model:
            implied = {ours: architecture.fields[ours] for ours in family.implied}
            if implied == family.implied:
                return kind
    raise ExchangeError(
        "a llama config with more than one of window, qkv_bias and qk_norm: "
        "expected one of Llama, Mistral, Qwen 2 or Qwen 3; Hugging Face has no "
        "such architecture to export to"
    )
