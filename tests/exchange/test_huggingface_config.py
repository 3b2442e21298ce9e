"""Every small change of a config.json: a model, or a refusal in our words."""

import copy
import json
from typing import Any

import pytest
import transformers
from fuzzing import changes

from jaxinf.errors import ExchangeError
from jaxinf.exchange.huggingface_config import read_config, write_config
from jaxinf.exchange.huggingface_families import FAMILIES

_LLAMA = {
    "vocab_size": 300,
    "max_position_embeddings": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "hidden_size": 32,
    "intermediate_size": 64,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "rope_theta": 10000.0,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
    "num_key_value_heads": 2,
    "head_dim": 8,
}
_BERT = {
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "hidden_size": 32,
    "intermediate_size": 64,
    "hidden_dropout_prob": 0.1,
    "vocab_size": 300,
    "max_position_embeddings": 64,
    "type_vocab_size": 2,
    "id2label": {"0": "no", "1": "yes"},
}
CONFIGS = {
    "llama": _LLAMA,
    "mistral": {**_LLAMA, "sliding_window": 16},
    "qwen3": {**_LLAMA, "rope_scaling": None},
    "bert": _BERT,
    "gpt2": {
        "vocab_size": 300,
        "n_positions": 64,
        "n_layer": 2,
        "n_head": 4,
        "n_embd": 32,
        "n_inner": None,
        "resid_pdrop": 0.1,
    },
    "t5": {
        "vocab_size": 300,
        "num_layers": 2,
        "num_heads": 4,
        "d_model": 32,
        "d_kv": 8,
        "d_ff": 64,
        "num_decoder_layers": 3,
        "feed_forward_proj": "gated-gelu",
        "tie_word_embeddings": False,
    },
}


@pytest.mark.parametrize("model_type", CONFIGS)
def test_every_change(model_type):
    document = {"model_type": model_type, **CONFIGS[model_type]}
    whole = read_config(document, where="config.json")
    refused = set()
    for (path, kind), changed in changes(document):
        try:
            found = read_config(changed, where="config.json")
        except ExchangeError:
            refused.add((path, kind))
            continue
        for name, value in found.fields.items():
            like = whole.fields[name]
            if None not in (value, like) and kind != "dropped":
                is_same = {type(value), type(like)} <= {int, float}
                assert is_same or type(value) is type(like), (path, kind, name)
    for key, value in CONFIGS[model_type].items():
        if value is not None:
            assert ((key,), "made list") in refused, key
        if type(value) in (int, float):
            assert {((key,), "made bool"), ((key,), "made str")} <= refused, key
        if type(value) is int:
            assert ((key,), "made -1") in refused, key


def test_a_classifier_that_reads_the_last_token_says_its_padding():
    document = {"model_type": "gpt2", "vocab_size": 16, "n_positions": 8}
    document |= {"n_layer": 1, "n_head": 2, "n_embd": 8}
    for extra, expected in (
        ({"eos_token_id": [9, 8]}, 9),
        ({"eos_token_id": 9, "pad_token_id": 7}, 7),
        ({}, None),
    ):
        found = read_config(document | extra, where="config.json")
        written = write_config(found, "classification", "float32")
        assert written.get("pad_token_id") == expected


@pytest.mark.parametrize("model_type", FAMILIES)
def test_every_field_of_transformers_has_its_place(model_type):
    """Also its aliases; and the defaults are those of transformers."""
    config = transformers.AutoConfig.for_model(model_type)
    theirs = json.loads(config.to_json_string(use_diff=False))
    read_config(theirs, where="config.json")
    family = FAMILIES[model_type]
    for name, value in {**family.defaults, **family.fixed}.items():
        if hasattr(config, name) and name != "sliding_window":
            assert getattr(config, name) == value, name
    assert config.attribute_map.items() <= family.aliases.items()


YARN = {"type": "yarn", "factor": 4.0, "beta_fast": 32}
REFUSED = [
    ("llama", "attention_bias", True, "attention_bias: expected False"),
    ("llama", "no_rope_layers", [1], "'no_rope_layers': expected no such field"),
    ("llama", "partial_rotary_factor", 0.5, "partial_rotary_factor: expected 1"),
    ("llama", "sliding_window", 8, "'sliding_window': expected no such field"),
    ("llama", "auto_map", {"AutoConfig": "x.y"}, "'auto_map': expected no such"),
    ("llama", "rope_scaling", YARN, "'linear', 'llama3', found 'yarn'"),
    ("llama", "rope_scaling", {"type": "linear"}, "rope_scaling.factor: expected a"),
    ("qwen3", "use_sliding_window", True, "use_sliding_window: expected False"),
    ("qwen3", "layer_types", ["sliding_attention"], "expected 'full_attention'"),
    ("gpt2", "scale_attn_by_inverse_layer_idx", True, "expected False, as this"),
    ("t5", "dense_act_fn", "relu", "dense_act_fn: expected 'gelu_new', found 'relu'"),
    ("bert", "is_decoder", True, "is_decoder: expected False"),
    ("bert", "problem_type", "regression", "problem_type: expected 'single_label"),
]


LLAMA3 = {k: v for k, v in _LLAMA["rope_scaling"].items() if "original" not in k}


@pytest.mark.parametrize(("model_type", "name", "value", "expected"), REFUSED)
def test_what_would_change_results_is_refused_by_name(
    model_type, name, value, expected
):
    document = {"model_type": model_type, **CONFIGS[model_type], name: value}
    with pytest.raises(ExchangeError, match=expected):
        read_config(document, where="config.json")


@pytest.mark.parametrize(
    ("top", "scaling", "parameters"),
    [
        ({}, None, None),
        ({"rope_theta": 7e4}, {"type": "linear", "factor": 4.0}, None),
        ({}, {"rope_type": "linear", "factor": 4.0, "rope_theta": 3e4}, None),
        ({"rope_theta": 7e4}, None, {"rope_type": "default", "rope_theta": 5e5}),
        ({}, LLAMA3, None),
    ],
)
def test_rotations_are_those_of_transformers(top, scaling, parameters):
    document = {k: v for k, v in _LLAMA.items() if not k.startswith("rope")} | top
    document |= {"rope_scaling": scaling, "rope_parameters": parameters}
    config = transformers.LlamaConfig(**copy.deepcopy(document))
    theirs: Any = config.rope_parameters
    found = read_config({"model_type": "llama", **document}, where="config.json")
    base, ours = found.fields["rope_base"], found.fields["rope_scaling"]
    assert base == theirs["rope_theta"]
    assert (ours or {"kind": "default"})["kind"] == theirs["rope_type"]
    if ours is not None:
        assert ours["factor"] == theirs["factor"]
        original = theirs.get("original_max_position_embeddings")
        assert ours.get("original_positions") == original
