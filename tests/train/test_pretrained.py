"""Hugging Face checkpoints into stores and back, without PyTorch."""

import dataclasses
import json
import re
import shutil

import ml_dtypes
import numpy as np
import pytest
from hub_folders import INDEX, export, read_folder, write_folder, write_pictures
from jaxinf_models import (
    BertConfig,
    LlamaConfig,
    ModelFiles,
    T5Config,
    ViTConfig,
    deferred_params,
)
from safetensors.numpy import save_file
from small_tokenizers import byte_level

import jaxinf
from jaxinf.errors import ExchangeError
from jaxinf.exchange.safetensors_files import read_safetensors
from jaxinf.train.__main__ import main

LLAMA = LlamaConfig(256, 16, 2, 4, 2, 32, 48, window=7)
MODELS = {
    "llama": LLAMA,
    "bert": BertConfig(2, 4, 32, 48, 257, 16),
    "t5": T5Config(257, 1, 2, 2, 16, 8, 24, mlp="gated-gelu", tied_embeddings=False),
    "vit": ViTConfig(1, 2, 16, 24, 8, 4, num_labels=3),
}


def train(*words):
    return main([str(word) for word in (*words, "--optimizer", "adamw")])


def stored(place, name="llama", store="s"):
    """The words that make a store of the weights in `hf`, without a step."""
    words = ("--from", place / "hf", "--store", place / store, "--steps", 0)
    if name == "vit":
        return (*words, "--data", write_pictures(place / "pictures", num_classes=3))
    record = {"prompt": "a", "response": "b"} if name == "t5" else {"text": "ab" * 99}
    (place / "data.jsonl").write_text(f"{json.dumps(record)}\n" * 9)
    return (*words, "--data", place / "data.jsonl", "--batch-size", 2, "--seq-len", 8)


@pytest.mark.long
@pytest.mark.parametrize("name", MODELS)
def test_round_trip_to_the_bit(place, name):
    tensors = write_folder(place / "hf", MODELS[name])
    assert train(*stored(place, name)) == 0
    assert export(place / "s", place / "out", "--dtype", "bfloat16") == 0
    found = read_folder(place / "out")
    assert sorted(found) == sorted(tensors)
    for key, values in tensors.items():
        assert found[key].dtype == values.dtype
        assert found[key].tobytes() == values.tobytes(), key
    before, after = ((place / x / "config.json").read_text() for x in ("hf", "out"))
    assert json.loads(before) == json.loads(after)


@pytest.mark.long
def test_dtypes_of_params_and_of_an_export(place):
    tensors = write_folder(place / "hf", LLAMA, np.float16, num_files=1)
    assert train(*stored(place), "--param-dtype", "bfloat16") == 0
    wte = tensors["model.embed_tokens.weight"].astype(ml_dtypes.bfloat16)
    with jaxinf.open_store(place / "s") as store:
        np.testing.assert_array_equal(store.read("params", "wte"), wte)
    for given in ((), ("--dtype", "float32")):
        assert export(place / "s", place / f"out-{len(given)}", *given) == 0
        found = read_folder(place / f"out-{len(given)}")
        expected = np.dtype(np.float32 if given else ml_dtypes.bfloat16)
        assert {x.dtype for x in found.values()} == {expected}
        norm = found["model.layers.1.input_layernorm.weight"]
        np.testing.assert_array_equal(norm.astype(np.float32), np.ones(32))


@pytest.mark.long
def test_training_begins_with_the_weights_and_resumes(place, text, losses, capsys):
    write_folder(place / "hf", LLAMA)
    data = ("--data", text, "--batch-size", 2, "--seq-len", 8)
    start, store = ("--from", place / "hf"), ("--store", place / "s")
    assert train(*start, *store, *data, "--steps", 0) == 0
    assert "nothing to train: --steps is 0" in capsys.readouterr().out
    write_folder(place / "other", LLAMA, seed=1)
    assert train("--from", place / "other", *store, *data, "--steps", 2) == 1
    start = ("--from", (place / "hf").rename(place / "moved"))
    assert train(*start, *store, *data, "--steps", 2) == 0
    assert train(*start, *store, *data, "--steps", 3) == 0
    assert "with the store's params; of --from only" in capsys.readouterr().out
    in_memory = ("--mode", "memory", "--log-dir", place / "m")
    assert train(*start, *data, *in_memory, "--steps", 3) == 0
    assert losses(place / "s-log") == losses(place / "m")
    assert export(place / "s", place / "out") == 0
    config = json.loads((place / "out" / "config.json").read_text())
    assert (config["model_type"], config["sliding_window"]) == ("mistral", 7)
    write_folder(place / "narrow", dataclasses.replace(LLAMA, window=5))
    for words, expected in (
        (("--model", "gpt2"), "window of the run's model is 7, of this command's None"),
        (("--from", place / "narrow"), "window of the run's model is 7, of this comm"),
        (("--from", place / "other"), "the run in this store began with other weights"),
    ):
        assert train(*store, *data, "--steps", 4, *words) == 1
        assert expected in capsys.readouterr().err


CHAT = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}<end>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def write_chat_model(folder):
    """A model with a tokenizer of bytes, of which one id is added, and a template."""
    write_folder(folder, dataclasses.replace(LLAMA, vocab_size=257, num_positions=64))
    byte_level(folder, "<end>", eos_token="<end>", chat_template=CHAT)
    (folder / "generation_config.json").write_text("{}")


@pytest.fixture
def messages(place):
    chats = [
        [
            {"role": "user", "content": f"{n}+1="},
            {"role": "assistant", "content": str(n + 1) * (1 + n % 4)},
        ]
        for n in range(10, 50)
    ]
    file = place / "chat.jsonl"
    file.write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))
    return file


@pytest.mark.long
def test_fine_tuning_has_the_models_tokenizer_and_defaults_of_its_own(
    place, messages, capsys, lines
):
    write_chat_model(place / "hf")
    words = ("--from", place / "hf", "--store", place / "s", "--data", messages)
    words += ("--batch-size", 2, "--steps")
    assert train(*words, 2) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert f" to validate, tokens by {place / 'hf'} " in out
    assert re.search(r"38 examples, [\d,]+ tokens \(\d+ of them learned\) to t", out)
    assert "learning rate 0.0002, constant after 30 steps of warm-up, weight dec" in out
    log = place / "s-log"
    first = (log / "config.json").read_text()
    document = json.loads(first)
    names = ("seq_len", "learning_rate", "weight_decay", "warmup_steps", "tokenizer")
    expected = [32, pytest.approx(2e-4), 0, 30, str(place / "hf")]
    assert [document[name] for name in names] == expected
    assert document["model"].endswith(f" of {place / 'hf'}")
    assert "preset" not in document
    assert train(*words, 3, "--learning-rate", 1e-3) == 0
    assert (log / "config.2.json").read_text() == first
    rates = [pytest.approx(rate, 1e-5) for rate in (2e-4 / 31, 4e-4 / 31, 3e-3 / 31)]
    assert [line["learning_rate"] for line in lines(log)] == rates
    assert export(place / "s", place / "out") == 0
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        copy = (place / "out" / name).read_bytes()
        assert copy == (place / "hf" / name).read_bytes()


def test_fine_tuning_without_the_models_form_is_refused(place, messages, capsys):
    words = ("--data", messages, "--steps", 1)
    refused(place, capsys, "hf: expected a folder, found none", *words)
    write_chat_model(place / "hf")
    (place / "hf/generation_config.json").unlink()
    (place / "hf/generation_config.json").symlink_to("/etc/hostname")
    refused(place, capsys, "config.json: expected a file in this folder", *words)
    (place / "hf/tokenizer_config.json").write_text("{}")
    refused(place, capsys, "chat.jsonl:1: expected prompt and response, fou", *words)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_model_line_says_that_the_folder_has_bfloat16(place, capsys, dtype):
    write_folder(place / "hf", LLAMA)
    assert train(*stored(place), "--param-dtype", dtype) == 0
    text = "computed in float32; the folder has bfloat16: --param-dtype bfloat16 keeps"
    assert (text in capsys.readouterr().out) == (dtype == "float32")


def test_a_decoder_of_one_task_begins_another(place):
    """Its other head is new, and neither head is taken for damage."""
    classes = dataclasses.replace(LLAMA, head="classification", num_labels=5)
    write_folder(place / "lm", LLAMA, np.float32)
    write_folder(place / "classes", classes, np.float32)
    params = deferred_params(ModelFiles.of_folder(place / "lm"), classes, 0)
    assert "lm_head" not in params
    assert params["score"]["kernel"].shape == (32, 5)
    files = ModelFiles.of_folder(place / "classes")
    assert files.config.num_labels == 5
    params = deferred_params(files, dataclasses.replace(LLAMA, num_labels=5), 0)
    assert "score" not in params
    assert "lm_head" in params


def test_a_new_head_is_not_frozen(place, capsys):
    write_folder(place / "hf", LLAMA, np.float32)
    (place / "a.jsonl").write_text('{"text": "a", "label": 0}\n' * 9)
    words = ("--task", "classification", "--freeze", "score/*")
    words += ("--data", place / "a.jsonl", "--seq-len", 8)
    refused(place, capsys, "--freeze: 'score/kernel' are not in", *words)


def test_tied_weights_under_either_name_and_both(place):
    tied = dataclasses.replace(LLAMA, window=None, tied_embeddings=True)
    tensors = write_folder(place / "hf", tied, num_files=1)
    wte = tensors.pop("model.embed_tokens.weight")
    for number, names in enumerate((["lm_head"], ["lm_head", "embed_tokens"])):
        held = {f"{name}.weight": wte for name in names}
        save_file(tensors | held, place / "hf" / "model.safetensors")
        assert train(*stored(place, store=f"s{number}")) == 0
        with jaxinf.open_store(place / f"s{number}") as opened:
            np.testing.assert_array_equal(opened.read("params", "wte"), wte)


# --- what is refused ------------------------------------------------------------------


def refused(place, capsys, expected, *words, name="llama"):
    """Checks that a run from `hf` is refused before there is a store."""
    words = words or stored(place, name)[4:]
    assert train("--from", place / "hf", "--store", place / "s", *words) in (1, 2)
    error = capsys.readouterr().err
    assert expected in error
    assert "Traceback" not in error
    assert not (place / "s").exists()


FIRST = "model-00001-of-00002.safetensors"
WTE = "model.embed_tokens.weight"
CONFIGS = {
    "vit": [
        ({"id2label": None, "num_labels": 2**31}, "num_labels of 2147483648"),
        ({"image_size": 16}, "expected shape"),
    ],
    "llama": [
        ({"model_type": "mamba"}, "found 'mamba'"),
        ({"num_hidden_layers": 1}, "layers.1.mlp.up_proj.weight: not a tensor of this"),
        ({"vocab_size": 257}, f"{WTE}: expected shape [257, 32]"),
        ({"vocab_size": 2**31}, f"{WTE}: expected shape [2147483648, 32]"),
        ({"rope_theta": 0}, "rope_theta: expected a number >= 2"),
    ],
    "t5": [({"relative_attention_max_distance": 8}, "max_distance: expected more")],
}


@pytest.mark.parametrize("name", CONFIGS)
def test_configs_that_the_weights_do_not_bear_out(place, capsys, name):
    write_folder(place / "hf", MODELS[name])
    config = place / "hf" / "config.json"
    whole = json.loads(config.read_text())
    for change, expected in CONFIGS[name]:
        config.write_text(json.dumps(whole | change))
        refused(place, capsys, expected, name=name)


def change_tensors(change):
    """Changes tensors of a model of two files, which becomes one of one."""

    def changed(folder):
        tensors = read_folder(folder)
        for file in folder.glob("model*"):
            file.unlink()
        save_file(change(tensors), folder / "model.safetensors")

    return changed


def lead_outside(folder):
    document = json.loads((folder / INDEX).read_text())
    document["weight_map"]["x"] = "../../etc/x.safetensors"
    (folder / INDEX).write_text(json.dumps(document))


FILES = {
    "missing": (change_tensors(lambda t: {k: t[k] for k in {*t} - {WTE}}), f"{WTE}: m"),
    "integers": (
        change_tensors(lambda t: t | {WTE: t[WTE].astype(np.int32)}),
        f"{WTE}: expected float32, bfloat16 or float16, found int32",
    ),
    "no-weights": (lambda f: [x.unlink() for x in f.glob("model*")], "found none"),
    "outside": (lead_outside, "nothing outside it is re"),
    "truncated": (lambda folder: (folder / FIRST).write_bytes(b"\x08"), FIRST),
}


@pytest.mark.parametrize("name", FILES)
def test_files_that_are_no_checkpoint_s(place, capsys, name):
    change, expected = FILES[name]
    write_folder(place / "hf", LLAMA)
    change(place / "hf")
    refused(place, capsys, expected)


def test_links_stay_in_the_folder_or_in_the_blobs_of_a_hub(place):
    write_folder(place / "hf", LLAMA)
    snapshot = (cache := place / "models--a") / "snapshots" / "rev"
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
