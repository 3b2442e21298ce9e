"""Folders of Hugging Face's, with a model's first weights, and of small images."""

import json

import jax
import ml_dtypes
import numpy as np
from flax import nnx
from jaxinf_models import config_to_json, family_of, make_model, split
from PIL import Image
from safetensors.numpy import load_file, save_file

from jaxinf.cli import main
from jaxinf.exchange import Architecture, write_config

INDEX = "model.safetensors.index.json"


def write_folder(folder, config, dtype=ml_dtypes.bfloat16, num_files=2, seed=0):
    """A checkpoint as `save_pretrained` writes it; returns its tensors by name."""
    _, params = split(make_model(config, rngs=nnx.Rngs(seed)))
    family = family_of(config)
    found = Architecture(family.name, config_to_json(config), "")
    task = getattr(config, "head", family.tasks[0])
    tensors = {}
    for keys, leaf in jax.tree_util.tree_leaves_with_path(params):
        path = jax.tree_util.keystr(keys, simple=True, separator="/")
        name, axes = found.family.find_tensor(path)
        values = np.asarray(leaf).astype(dtype)
        values = values.transpose(np.argsort(axes)) if axes else values
        tensors[name] = np.ascontiguousarray(values)
    folder.mkdir()
    document = write_config(found, task, np.dtype(dtype).name) | {"eos_token_id": 3}
    (folder / "config.json").write_text(json.dumps(document))
    names, files = sorted(tensors), {"model.safetensors": sorted(tensors)}
    if num_files > 1:
        form = f"model-{{:05d}}-of-{num_files:05d}.safetensors"
        files = {form.format(n + 1): names[n::num_files] for n in range(num_files)}
        places = {name: file for file, members in files.items() for name in members}
        (folder / INDEX).write_text(json.dumps({"weight_map": places}))
    for file, members in files.items():
        save_file({name: tensors[name] for name in members}, folder / file)
    return tensors


def read_folder(folder):
    files = sorted(folder.glob("*.safetensors"))
    return {name: x for file in files for name, x in load_file(file).items()}


def export(store, out, *words):
    words = ["checkpoint", "export", store, out, "--format", "huggingface", *words]
    return main([str(word) for word in words])


def write_pictures(folder, num=40, num_classes=4, size=8):
    """A folder of small images for each class."""
    rng = np.random.default_rng(0)
    for number, pixels in enumerate(rng.integers(0, 256, (num, size, size), np.uint8)):
        path = folder / f"class {number % num_classes}" / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(path)
    return folder
