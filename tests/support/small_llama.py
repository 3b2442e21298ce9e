"""A Llama of one layer as a Hugging Face folder, with a tokenizer of bytes."""

import json

import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

__all__ = ["write_llama", "write_tokenizer"]

_CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 260,
    "max_position_embeddings": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "hidden_size": 16,
    "intermediate_size": 16,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "rope_theta": 10000.0,
    "num_key_value_heads": 2,
    "head_dim": 8,
}


def write_llama(folder, *, without=(), **changes):
    """Writes weights and `config.json`, with some fields changed or left out."""
    folder.mkdir(exist_ok=True)
    config = {k: v for k, v in {**_CONFIG, **changes}.items() if k not in without}
    (folder / "config.json").write_text(json.dumps(config))
    shapes = {
        "model.embed_tokens.weight": (260, 16),
        "model.norm.weight": (16,),
        "lm_head.weight": (260, 16),
    }
    layer = "model.layers.0."
    for name in ("q", "k", "v", "o"):
        shapes[f"{layer}self_attn.{name}_proj.weight"] = (16, 16)
    for name in ("gate", "up", "down"):
        shapes[f"{layer}mlp.{name}_proj.weight"] = (16, 16)
    for name in ("input", "post_attention"):
        shapes[f"{layer}{name}_layernorm.weight"] = (16,)
    rng = np.random.default_rng(0)
    tensors = {
        name: rng.normal(size=shape).astype(np.float32) / 8
        for name, shape in shapes.items()
    }
    save_file(tensors, folder / "model.safetensors")


def write_tokenizer(folder, *, begins=False, **config):
    """Writes a tokenizer of one token a byte; `begins`: it adds ``<s>`` to a text."""
    folder.mkdir(exist_ok=True)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    ids = {text: number for number, text in enumerate(["<s>", "</s>", *alphabet])}
    tokenizer = Tokenizer(models.BPE(ids, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    if begins:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", 0)]
        )
    tokenizer.save(str(folder / "tokenizer.json"))
    words = {"bos_token": "<s>", "eos_token": "</s>", **config}
    (folder / "tokenizer_config.json").write_text(json.dumps(words))
