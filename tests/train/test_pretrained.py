"""Hugging Face checkpoints into stores and back, without PyTorch."""

import dataclasses
import json
import shutil

import jax
import ml_dtypes
import numpy as np
import pytest
import tokenizers
from families import family
from flax import nnx
from jaxinf_models import (
    BertConfig,
    LlamaConfig,
    ModelFiles,
    T5Config,
    ViTConfig,
    config_to_json,
    deferred_params,
    family_of,
    make_model,
    split,
)
from safetensors.numpy import load_file, save_file

import jaxinf
from jaxinf.cli import main as jaxinf_main
from jaxinf.errors import ExchangeError
from jaxinf.exchange import Architecture, write_config
from jaxinf.exchange.safetensors_files import read_safetensors
from jaxinf.train.__main__ import main

INDEX = "model.safetensors.index.json"
LLAMA = LlamaConfig(256, 16, 2, 4, 2, 32, 48, window=7)
MODELS = {
    "llama": LLAMA,
    "bert": BertConfig(2, 4, 32, 48, 256, 16),
    "t5": T5Config(257, 1, 2, 2, 16, 8, 24, mlp="gated-gelu", tied_embeddings=False),
    "vit": ViTConfig(1, 2, 16, 24, 8, 4, num_labels=3),
}


def write_folder(folder, config, dtype=ml_dtypes.bfloat16, num_files=2):
    """A checkpoint as `save_pretrained` writes it; returns its tensors by name."""
    _, params = split(make_model(config, rngs=nnx.Rngs(0)))
    family = family_of(config)
    found = Architecture(family.name, config_to_json(config), "")
    task = getattr(config, "head", family.tasks[0])
    tensors = {}
    for keys, leaf in jax.tree_util.tree_leaves_with_path(params):
        path = jax.tree_util.keystr(keys, simple=True, separator="/")
        name, axes = found.family.find(path)
        values = np.asarray(leaf).astype(dtype)
        values = values.transpose(np.argsort(axes)) if axes else values
        tensors[name] = np.ascontiguousarray(values)
    folder.mkdir()
    document = write_config(found, task, np.dtype(dtype).name) | {"eos_token_id": 3}
    (folder / "config.json").write_text(json.dumps(document))
    names = sorted(tensors)
    files = {
        f"model-{n + 1:05d}-of-{num_files:05d}.safetensors": names[n::num_files]
        for n in range(num_files)
    }
    if num_files == 1:
        files = {"model.safetensors": names}
    for file, members in files.items():
        save_file({name: tensors[name] for name in members}, folder / file)
    if num_files > 1:
        places = {name: file for file, members in files.items() for name in members}
        (folder / INDEX).write_text(json.dumps({"weight_map": places}))
    return tensors


def read_folder(folder):
    files = sorted(folder.glob("*.safetensors"))
    return {name: x for file in files for name, x in load_file(file).items()}


def train(*words):
    return main([str(word) for word in (*words, "--optimizer", "adamw")])


@pytest.mark.long
@pytest.mark.parametrize("name", MODELS)
def test_round_trip_to_the_bit(place, name):
    tensors = write_folder(place / "hf", MODELS[name])
    assert train("--from", place / "hf", "--store", place / "s", "--steps", 0) == 0
    export = ["export", str(place / "s"), str(place / "out"), "--format", "huggingface"]
    words = ["checkpoint", *export, "--dtype", "bfloat16", "--max-file", "1MiB"]
    assert jaxinf_main(words) == 0
    found = read_folder(place / "out")
    assert sorted(found) == sorted(tensors)
    for key, values in tensors.items():
        assert found[key].dtype == values.dtype
        assert found[key].tobytes() == values.tobytes(), key
    before, after = (
        json.loads((place / folder / "config.json").read_text())
        for folder in ("hf", "out")
    )
    assert before == after


@pytest.mark.long
def test_dtypes_of_params_and_of_an_export(place):
    tensors = write_folder(place / "hf", LLAMA, np.float16, num_files=1)
    words = ("--from", place / "hf", "--store", place / "s", "--steps", 0)
    assert train(*words, "--param-dtype", "bfloat16") == 0
    with jaxinf.open_store(place / "s") as store:
        wte = tensors["model.embed_tokens.weight"]
        held = store.read("params", "wte")
        np.testing.assert_array_equal(held, wte.astype(ml_dtypes.bfloat16))
    for given, expected in ((), ml_dtypes.bfloat16), (("float32",), np.float32):
        out = place / f"out-{len(given)}"
        words = ["checkpoint", "export", str(place / "s"), str(out)]
        words += ["--format", "huggingface", *(("--dtype", *given) if given else ())]
        assert jaxinf_main(words) == 0
        found = read_folder(out)
        assert {x.dtype for x in found.values()} == {np.dtype(expected)}
        norm = found["model.layers.1.input_layernorm.weight"]
        np.testing.assert_array_equal(norm.astype(np.float32), np.ones(32))


@pytest.mark.long
def test_training_begins_with_the_weights_and_resumes(place, text):
    write_folder(place / "hf", LLAMA)
    common = ("--from", place / "hf", "--data", text, "--batch-size", 2)
    common += ("--seq-len", 8)
    on_store = (*common, "--store", place / "s")
    assert train("--from", place / "hf", "--store", place / "s", "--steps", 0) == 0
    assert train(*on_store, "--steps", 2) == 0
    assert train(*on_store, "--steps", 3) == 0
    in_memory = ("--mode", "memory", "--log-dir", place / "m")
    assert train(*common, *in_memory, "--steps", 3) == 0
    logs = [place / "s-log", place / "m"]
    lines = [(log / "metrics.jsonl").read_text().splitlines() for log in logs]
    losses = [[json.loads(line)["loss"] for line in of_run] for of_run in lines]
    assert losses[0] == losses[1]
    out = str(place / "out")
    words = ["checkpoint", "export", str(place / "s"), out, "--format", "huggingface"]
    assert jaxinf_main(words) == 0
    config = json.loads((place / "out" / "config.json").read_text())
    assert (config["model_type"], config["sliding_window"]) == ("mistral", 7)


CHAT = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}<end>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def write_chat_model(folder):
    """A model with a tokenizer of bytes, of which one id is added, and a template."""
    write_folder(folder, dataclasses.replace(LLAMA, vocab_size=257, num_positions=64))
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    words = {character: n for n, character in enumerate(alphabet)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(words, []))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel()
    tokenizer.add_special_tokens(["<end>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"eos_token": "<end>", "chat_template": CHAT}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text("{}")


@pytest.fixture
def messages(place):
    """A file of conversations, the longest of 53 tokens."""
    records = [
        {
            "messages": [
                {"role": "user", "content": f"{n}+1="},
                {"role": "assistant", "content": str(n + 1) * (1 + n % 4)},
            ]
        }
        for n in range(10, 50)
    ]
    file = place / "chat.jsonl"
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    return file


@pytest.mark.long
def test_fine_tuning_has_the_models_tokenizer_and_defaults_of_its_own(
    place, messages, capsys
):
    write_chat_model(place / "hf")
    words = ("--from", place / "hf", "--store", place / "s", "--data", messages)
    words += ("--batch-size", 2, "--steps")
    assert train(*words, 2) == 0
    out = capsys.readouterr().out
    assert f"tokens by {place / 'hf'}\n" in out
    assert (
        "learning rate 0.0002, constant after 30 steps of warm-up, weight decay 0"
        in (out)
    )
    log = place / "s-log"
    first = (log / "config.json").read_text()
    document = json.loads(first)
    assert document["versions"]["jaxinf"] == jaxinf.__version__
    names = ("seq_len", "learning_rate", "weight_decay", "warmup_steps", "tokenizer")
    expected = [48, pytest.approx(2e-4), 0, 30, str(place / "hf")]
    assert [document[name] for name in names] == expected
    assert train(*words, 3, "--learning-rate", 1e-3) == 0
    assert (log / "config.2.json").read_text() == first
    assert json.loads((log / "config.json").read_text())["learning_rate"] == 1e-3
    lines = [json.loads(x) for x in (log / "metrics.jsonl").read_text().splitlines()]
    rates = [pytest.approx(rate, 1e-5) for rate in (2e-4 / 31, 4e-4 / 31, 3e-3 / 31)]
    assert [line["learning_rate"] for line in lines] == rates
    export = ["checkpoint", "export", str(place / "s"), str(place / "out")]
    assert jaxinf_main([*export, "--format", "huggingface"]) == 0
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        copy = (place / "out" / name).read_bytes()
        assert copy == (place / "hf" / name).read_bytes()


def only_sentencepiece(folder):
    (folder / "tokenizer.json").rename(folder / "tokenizer.model")


def no_tokenizer(folder):
    write_folder(folder / "new", dataclasses.replace(LLAMA, vocab_size=300))
    for path in (folder / "new").iterdir():
        path.replace(folder / path.name)
    (folder / "tokenizer.json").unlink()


def no_template(folder):
    (folder / "tokenizer_config.json").write_text("{}")


def link_outside(folder):
    (folder / "generation_config.json").unlink()
    (folder / "generation_config.json").symlink_to("/etc/hostname")


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (only_sentencepiece, "expected a tokenizer of transformers: "),
        (no_tokenizer, "found no tokenizer, and a model of 300 ids, more than bytes"),
        (no_template, "chat.jsonl:1: expected prompt and response, found messages"),
        (link_outside, "generation_config.json: expected a file in this folder"),
    ],
)
def test_fine_tuning_without_the_models_form_is_refused(
    place, messages, capsys, change, expected
):
    write_chat_model(place / "hf")
    change(place / "hf")
    words = ("--from", place / "hf", "--store", place / "s", "--data", messages)
    assert train(*words, "--steps", 1) in (1, 2)
    assert expected in capsys.readouterr().err
    assert not (place / "s").exists()


@pytest.mark.long
def test_a_run_goes_on_with_its_own_model(place, text, capsys):
    write_folder(place / "hf", LLAMA)
    write_folder(place / "other", dataclasses.replace(LLAMA, window=5))
    common = ("--data", text, "--batch-size", 2, "--seq-len", 8)
    common += ("--store", place / "s")
    assert train("--from", place / "hf", *common, "--steps", 1) == 0
    assert train("--from", place / "other", *common, "--steps", 2) == 1
    assert "window of the run's model is 7, of this command's 5" in (
        capsys.readouterr().err
    )


@pytest.mark.long
def test_an_imported_model_is_that_of_a_command_without_it(place, text, capsys):
    write_folder(place / "hf", LLAMA)
    common = ("--data", text, "--batch-size", 2, "--seq-len", 8)
    common += ("--store", place / "s")
    assert train("--from", place / "hf", *common, "--steps", 0) == 0
    assert train(*common, "--model", "gpt2", "--steps", 1) == 1
    error = capsys.readouterr().err
    assert "the store was made with 'llama' for 'causal-lm' (num_layers" in error
    assert "this command has 'gpt2' for 'causal-lm'" in error
    assert train(*common, "--steps", 1) == 0


def tied(place):
    return dataclasses.replace(LLAMA, window=None, tied_embeddings=True)


@pytest.mark.parametrize("is_tied", family([False, True], short=[True]))
def test_a_decoder_of_one_task_begins_another(place, is_tied):
    """Its other head is new, and neither head is taken for damage."""
    plain = dataclasses.replace(LLAMA, tied_embeddings=is_tied)
    classes = dataclasses.replace(plain, head="classification", num_labels=5)
    write_folder(place / "lm", plain, np.float32)
    write_folder(place / "classes", classes, np.float32)
    files = ModelFiles.of_folder(place / "lm")
    params = deferred_params(files, classes, 0)
    assert "lm_head" not in params
    assert params["score"]["kernel"].shape == (32, 5)
    files = ModelFiles.of_folder(place / "classes")
    assert files.config.num_labels == 5
    params = deferred_params(files, dataclasses.replace(plain, num_labels=5), 0)
    assert "score" not in params
    assert ("lm_head" in params) is not is_tied


def test_tied_weights_under_either_name_and_both(place):
    tensors = write_folder(place / "hf", tied(place), num_files=1)
    wte = tensors.pop("model.embed_tokens.weight")
    file = place / "hf" / "model.safetensors"
    for number, held in enumerate(
        ({"lm_head.weight": wte}, {"lm_head.weight": wte, "embed_tokens.weight": wte})
    ):
        save_file(tensors | held, file)
        folder = place / f"hf-{number}"
        shutil.copytree(place / "hf", folder)
        store = place / f"s{number}"
        assert train("--from", folder, "--store", store, "--steps", 0) == 0
        with jaxinf.open_store(store) as opened:
            np.testing.assert_array_equal(opened.read("params", "wte"), wte)


def change_config(**changes):
    def change(folder):
        document = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(document | changes))

    return change


def change_tensors(change):
    def changed(folder):
        for file in folder.glob("*.safetensors"):
            file.unlink()
        (folder / INDEX).unlink()
        save_file(
            change(write_folder(folder / "t", LLAMA)), folder / "model.safetensors"
        )

    return changed


def change_index(**places):
    def change(folder):
        document = json.loads((folder / INDEX).read_text())
        document["weight_map"] |= {k.replace("_", "."): v for k, v in places.items()}
        (folder / INDEX).write_text(json.dumps(document))

    return change


def damage(name, content):
    def change(folder):
        (folder / name).write_bytes(content)

    return change


FIRST = "model-00001-of-00002.safetensors"
WTE = "model.embed_tokens.weight"
REFUSALS = {
    "unknown-architecture": (change_config(model_type="mamba"), "found 'mamba'"),
    "missing-size": (change_config(hidden_size=None), "hidden_size: expected a value"),
    "other-activation": (
        change_config(hidden_act="relu"),
        "hidden_act: expected 'silu'",
    ),
    "few-bits": (
        change_config(quantization_config={"quant_method": "bnb", "load_in_4bit": 1}),
        "quantization_config: expected weights of 16 or 32 bits, found 'bnb'",
    ),
    "unknown-rope": (change_config(rope_scaling={"type": "yarn"}), "found yarn"),
    "one-layer-less": (
        change_config(num_hidden_layers=1),
        "model.layers.1.mlp.up_proj.weight: not a tensor of this model",
    ),
    "other-shape": (change_config(vocab_size=255), f"{WTE}: expected shape [255, 32]"),
    "tied-with-others": (
        change_config(tie_word_embeddings=True),
        f"lm_head.weight: expected the values of {WTE}",
    ),
    "missing": (
        change_tensors(lambda t: {k: v for k, v in t.items() if k != WTE}),
        f"{WTE}: missing",
    ),
    "extra": (
        change_tensors(lambda t: t | {"model.extra": np.zeros(3, np.float32)}),
        "model.extra: not a tensor of this model",
    ),
    "integers": (
        change_tensors(lambda t: t | {WTE: t[WTE].astype(np.int32)}),
        f"{WTE}: expected float32, bfloat16 or float16, found int32",
    ),
    "no-weights": (
        lambda folder: [file.unlink() for file in folder.glob("model*")],
        "found none",
    ),
    "outside": (
        change_index(x="../../etc/x.safetensors"),
        "nothing outside it is read",
    ),
    "truncated": (damage(FIRST, b"\x08"), FIRST),
    "header-too-long": (damage(FIRST, b"\xff" * 7 + b"\x7f{}"), FIRST),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_bad_checkpoints_are_refused_before_there_is_a_store(place, capsys, name):
    change, expected = REFUSALS[name]
    write_folder(place / "hf", dataclasses.replace(LLAMA, window=None))
    change(place / "hf")
    assert train("--from", place / "hf", "--store", place / "s", "--steps", 0) in (1, 2)
    error = capsys.readouterr().err
    assert expected in error
    assert "Traceback" not in error
    assert not (place / "s").exists()


def test_only_a_step_that_says_its_model_is_exported(place, capsys):
    import optax

    tx = jaxinf.smart_update(optax.sgd(0.1), place / "s")
    tx.init({"w": np.ones(3, np.float32)})
    words = ["checkpoint", "export", str(place / "s"), str(place / "out")]
    assert jaxinf_main([*words, "--format", "huggingface"]) == 1
    assert "which model it is of" in capsys.readouterr().err
    assert not (place / "out").exists()


HOSTILE = {
    "vit": [
        (
            {"id2label": None, "num_labels": 2**31},
            "num_labels of 2147483648",
        ),
        ({"image_size": 16}, "expected shape"),
        ({"num_channels": 2**30}, "num_channels of 1073741824, expected at most"),
    ],
    "llama": [
        ({"num_hidden_layers": 2**31}, "num_layers of 2147483648, expected at most"),
        ({"vocab_size": 2**31}, "vocab_size of 2147483648, expected at most"),
        ({"rope_theta": 0}, "rope_theta: expected a number >= 2"),
        ({"rms_norm_eps": 0}, "rms_norm_eps: expected a number >= 1e-30"),
        ({"sliding_window": 0}, "window: expected at least 1"),
    ],
    "t5": [({"relative_attention_max_distance": 8}, "max_distance: expected more")],
}


@pytest.mark.parametrize("name", family(HOSTILE, short=["llama", "t5"]))
def test_counts_are_bounded_by_the_weights(place, name):
    write_folder(place / "hf", MODELS[name])
    config = place / "hf" / "config.json"
    whole = json.loads(config.read_text())
    for number, (change, expected) in enumerate(HOSTILE[name]):
        folder = place / str(number)
        shutil.copytree(place / "hf", folder)
        (folder / "config.json").write_text(json.dumps(whole | change))
        with pytest.raises(ExchangeError, match=expected):
            ModelFiles.of_folder(folder)


def test_links_stay_in_the_folder_or_in_the_blobs_of_a_hub(place):
    write_folder(place / "hf", LLAMA)
    cache = place / "models--a"
    snapshot = cache / "snapshots" / "rev"
    snapshot.mkdir(parents=True)
    (cache / "blobs").mkdir()
    for number, file in enumerate((place / "hf").iterdir()):
        file.rename(cache / "blobs" / str(number))
        (snapshot / file.name).symlink_to(f"../../blobs/{number}")
    ModelFiles.of_folder(snapshot)
    (place / "by-link").symlink_to(snapshot)  # the user's own path may be a link
    ModelFiles.of_folder(place / "by-link")
    for name in ("config.json", INDEX, "model-00001-of-00002.safetensors"):
        elsewhere = place / f"outside-{name}"
        shutil.copytree(snapshot, place / name, symlinks=False)
        (place / name / name).rename(elsewhere)
        (place / name / name).symlink_to(elsewhere)
        with pytest.raises(ExchangeError, match=r"found a link to .*outside-"):
            ModelFiles.of_folder(place / name)
    with pytest.raises(ExchangeError, match="found a link to"):
        read_safetensors(place / INDEX)
