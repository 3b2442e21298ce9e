"""Memory of an import: the budget and the largest leaf, whatever the model's size."""

import json

import numpy as np
import pytest
from safetensors.numpy import save_file

# Peak memory of an import over the program's memory before, in bytes.
PROGRAM = """
import re, sys
from pathlib import Path
from jaxinf.train.__main__ import main

def status(name):
    text = Path("/proc/self/status").read_text()
    return int(re.search(name + r":\\s+(\\d+) kB", text)[1]) << 10

def bring(folder, store):
    words = ["--from", folder, "--store", store, "--steps", "0"]
    words += ["--memory", "16MiB", "--optimizer", "sgd"]
    words += ["--optimizer-args", "momentum=0", "--learning-rate", "1"]
    assert main(words) == 0

folder, tiny, place = sys.argv[1:]
bring(tiny, place + "/tiny-store")  # what a tree of so many leaves takes
before = status("VmRSS")
Path("/proc/self/clear_refs").write_text("5")
bring(folder, place + "/store")
print(status("VmHWM") - before)
"""


def write_llama(folder, vocab_size, features, hidden, num_layers):
    rng = np.random.default_rng(0)
    shapes = {"model.embed_tokens": (vocab_size, features), "model.norm": (features,)}
    shapes["lm_head"] = (vocab_size, features)
    for n in range(num_layers):
        layer = f"model.layers.{n}"
        for part in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"{layer}.{part}"] = (features,)
        for part in "qkvo":
            shapes[f"{layer}.self_attn.{part}_proj"] = (features, features)
        for part in ("gate", "up"):
            shapes[f"{layer}.mlp.{part}_proj"] = (hidden, features)
        shapes[f"{layer}.mlp.down_proj"] = (features, hidden)
    folder.mkdir()
    tensors = {
        f"{name}.weight": rng.standard_normal(shape, np.float32).astype(np.float16)
        for name, shape in shapes.items()
    }
    save_file(tensors, folder / "model.safetensors")
    config = {
        "model_type": "llama",
        "vocab_size": vocab_size,
        "hidden_size": features,
        "intermediate_size": hidden,
        "num_hidden_layers": num_layers,
        "num_attention_heads": 4,
        "max_position_embeddings": 16,
    }
    (folder / "config.json").write_text(json.dumps(config))
    sizes = [4 * int(np.prod(shape)) for shape in shapes.values()]
    return max(sizes), sum(sizes)


@pytest.mark.long
def test_an_import_holds_the_budget_and_one_leaf(place, run_python):
    largest_bytes, total_bytes = write_llama(place / "hf", 8000, 1024, 2816, 3)
    write_llama(place / "tiny", 16, 16, 16, 3)
    result = run_python(PROGRAM, place / "hf", place / "tiny", place)
    peak_bytes = int(result.stdout.split()[-1])
    allowed_bytes = (16 << 20) + largest_bytes
    print(f"{peak_bytes >> 20} MiB of {allowed_bytes >> 20}, model {total_bytes >> 20}")
    assert allowed_bytes < total_bytes / 3  # otherwise the test would prove nothing
    assert peak_bytes <= allowed_bytes
