"""A family of Hugging Face's models, and fields of config.json that any may have.

Invariant: reading and writing use the same table. A tensor is changed by a permutation
  of its axes alone; a field that affects a model's results has its place in the table.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, TypeAlias

import msgspec
from msgspec import Meta

Fields = dict[str, Any]
Document = Mapping[str, Any]

Count: TypeAlias = Annotated[int, Meta(ge=0, le=2**31)]
_Share: TypeAlias = Annotated[float, Meta(ge=0, le=1)]
_Epsilon: TypeAlias = Annotated[float, Meta(ge=1e-30, le=0.1)]
# Of a base below 2, all frequencies are alike, or none is finite.
_RopeBase: TypeAlias = Annotated[float, Meta(ge=2, le=2.0**62)]
_Positive: TypeAlias = Annotated[float, Meta(gt=0, le=2.0**62)]


class Rope(msgspec.Struct):
    """Rotary positions: ``rope_parameters``, or ``rope_scaling`` of older files."""

    rope_type: str | None = None
    type: str | None = None
    rope_theta: _RopeBase | None = None
    factor: _Positive | None = None
    low_freq_factor: _Positive | None = None
    high_freq_factor: _Positive | None = None
    original_max_position_embeddings: Annotated[int, Meta(ge=1, le=2**62)] | None = None
    partial_rotary_factor: float | None = None


LABELS = ("id2label", "label2id")

KINDS: Mapping[str, Any] = {
    **dict.fromkeys(("resid_pdrop", "hidden_dropout", "dropout_rate"), _Share),
    "hidden_dropout_prob": _Share,
    **dict.fromkeys(("rms_norm_eps", "layer_norm_epsilon"), _Epsilon),
    **dict.fromkeys(("tie_word_embeddings", "scale_decoder_outputs"), bool),
    "is_gated_act": bool,
    **dict.fromkeys(("feed_forward_proj", "dense_act_fn"), str),
    "layer_types": list[str],
    "rope_theta": _RopeBase,
    **dict.fromkeys(("rope_parameters", "rope_scaling"), Rope),
    **dict.fromkeys(LABELS, dict[str, Any]),
}
"""Types of fields that are read; all others are counts."""

PLAIN: Fields = {
    **dict.fromkeys(
        ("is_decoder", "add_cross_attention", "tie_encoder_decoder"), False
    ),
    "problem_type": "single_label_classification",
    "pruned_heads": {},
    "partial_rotary_factor": 1,
    **dict.fromkeys(("rope_interleaved", "use_mrope"), False),
}
"""Fields of any family → the value that our models have; an export leaves them out."""

HARMLESS = frozenset(
    """
    architectures dtype torch_dtype transformers_version tokenizer_class model_type
    use_cache initializer_range gradient_checkpointing chunk_size_feed_forward
    return_dict return_dict_in_generate output_hidden_states output_attentions
    output_scores output_past torchscript use_bfloat16 tf_legacy_loss finetuning_task
    task_specific_params prefix is_encoder_decoder is_llama_config max_sequence_length
    attention_dropout attention_probs_dropout_prob attn_pdrop embd_pdrop
    classifier_dropout max_length min_length max_new_tokens do_sample early_stopping
    num_beams num_beam_groups diversity_penalty temperature top_k top_p typical_p
    repetition_penalty length_penalty no_repeat_ngram_size num_return_sequences
    encoder_no_repeat_ngram_size bad_words_ids remove_invalid_values suppress_tokens
    begin_suppress_tokens exponential_decay_length_penalty unsloth_fixed
    unsloth_version transformers.js_config
    """.split()
)
"""Fields of any family on which no logits and no loss depend, besides those that begin
with ``_`` and those that end with ``_token_id``."""


_SUFFIXES = {"kernel": ".weight", "scale": ".weight", "table": ".weight"}
_SUFFIXES |= {"bias": ".bias"}


@dataclass(frozen=True)
class Family:
    """One ``model_type``: its tensors, and the fields of its config.json.

    In names ``{}`` is a layer's number.

    Attributes:
      model: our name of the model.
      classes: Hugging Face's class for each task.
      layers: our layer → theirs. A kernel is [out, in] there, [in, out] here.
      arrays: our leaf → their tensor, for those whose name does not end in ``.weight``.
      transposed: whether kernels are; those of GPT-2 are [in, out] there, too.
      prefix: prefix of the base model's names, which a bare base model lacks.
      tied: other names that a file may have for a tensor with shared values.
      heads: beginnings of our paths that a checkpoint of another task lacks. Below
        each, all leaves exist or none; missing ones are initialised anew.
      unused: pattern of tensors that are not params: buffers, other tasks' heads.
      names: our field → theirs, which must have a value or a default.
      defaults: their field → its value if it is missing.
      fixed: their field → the value that our model has.
      own: our fields that this ``model_type`` says.
      optional: their fields that `read` looks at; they may be null or missing.
      ignored: their fields on which nothing depends, besides `HARMLESS`.
      aliases: their second name of a field → the first.
      read: makes further fields of ours from a document with the defaults in it.
      write: the reverse.
    """

    model: str
    classes: Mapping[str, str]
    layers: Mapping[str, str]
    names: Mapping[str, str]
    arrays: Mapping[str, str] = field(default_factory=dict)
    transposed: bool = True
    prefix: str = ""
    tied: Mapping[str, str] = field(default_factory=dict)
    heads: tuple[str, ...] = ()
    unused: str = ""
    defaults: Fields = field(default_factory=dict)
    fixed: Fields = field(default_factory=dict)
    own: Fields = field(default_factory=dict)
    optional: str = ""
    ignored: str = ""
    aliases: Mapping[str, str] = field(default_factory=dict)
    read: Callable[[Document], Fields] = lambda document: {}
    write: Callable[[Document], Fields] = lambda fields: {}

    def find(self, path: str) -> tuple[str, tuple[int, ...]]:
        """Returns the name of a leaf's tensor, and the order of its axes in the leaf.

        No axes stand for no change. Raises KeyError for a leaf that the family lacks.
        """
        number = "".join(re.findall(r"^[a-z](\d+)/", path))
        path = re.sub(r"^([a-z])\d+/", r"\1{}/", path)
        if path in self.arrays:
            return self.arrays[path].format(number), ()
        layer, _, kind = path.rpartition("/")
        if path in self.layers:
            layer, kind = path, "table"
        name = self.layers[layer].format(number) + _SUFFIXES[kind]
        axes = (1, 0) if self.transposed or layer == "score" else ()
        if layer == "patches":  # [features, channels, height, width] there
            axes = (2, 3, 1, 0)
        return name, axes if kind == "kernel" else ()

    def is_unused(self, name: str) -> bool:
        """Whether a tensor of a file is not a param of a model."""
        return re.fullmatch(self.unused, name) is not None

    def is_harmless(self, name: str) -> bool:
        """Whether no results depend on a field of a config.json."""
        is_any = name in HARMLESS or name.startswith("_") or name.endswith("_token_id")
        return is_any or name in self.ignored.split()
