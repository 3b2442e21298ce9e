"""Every small change of a config.json: a model, or a refusal in our words."""

import pytest
from document_changes import changes

from jaxinf.errors import ExchangeError
from jaxinf.exchange.huggingface_config import read_config, write_config

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


@pytest.mark.parametrize(
    ("extra", "task", "expected"),
    [
        ({"eos_token_id": 9}, "classification", 9),
        ({"eos_token_id": [9, 8]}, "classification", 9),
        ({"eos_token_id": 9, "pad_token_id": 7}, "classification", 7),
        ({"eos_token_id": 9}, "causal-lm", None),
        ({}, "classification", None),
    ],
)
def test_a_classifier_that_reads_the_last_token_says_its_padding(extra, task, expected):
    document = {"model_type": "gpt2", "vocab_size": 16, "n_positions": 8}
    document |= {"n_layer": 1, "n_head": 2, "n_embd": 8, **extra}
    found = read_config(document, where="config.json")
    assert write_config(found, task, "float32").get("pad_token_id") == expected
