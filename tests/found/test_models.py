"""Models of other programs: what a field of `config.json` means."""

import json

import pytest
from small_llama import write_llama

from jaxinf.cli import main as jaxinf_main
from jaxinf.train.__main__ import main


@pytest.fixture
def exported(place, capsys):
    """Imports a model and exports it again: its config, or the refusal."""

    def call(**changes):
        write_llama(place / "hf", **changes)
        words = ("--from", place / "hf", "--store", place / "s", "--steps", 0)
        status = main([str(word) for word in (*words, "--optimizer", "adamw")])
        printed = capsys.readouterr()
        if status:
            assert not (place / "s").exists()
            return printed.err
        words = ("checkpoint", "export", place / "s", place / "out")
        words = (*words, "--format", "huggingface")
        assert jaxinf_main([str(word) for word in words]) == 0
        return json.loads((place / "out" / "config.json").read_text())

    return call


def rotation(config):
    """Base and scaling of rotary positions, by whichever field has them."""
    both = {**(config.get("rope_parameters") or {}), **(config["rope_scaling"] or {})}
    base = config.get("rope_theta") or both.get("rope_theta")
    kind = both.get("rope_type") or both.get("type") or "default"
    return base, kind, both.get("factor")


@pytest.mark.parametrize("top", [True, False])
def test_two_rotations_are_refused_or_the_one_that_transformers_takes(exported, top):
    found = exported(
        without=() if top else ("rope_theta",),
        rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
        rope_scaling={"type": "linear", "factor": 4.0},
    )
    if isinstance(found, str):
        assert "rope_parameters" in found
        assert "rope_scaling" in found
    else:
        assert rotation(found) == (10000.0, "linear", 4.0)


LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}


def test_llama3_scaling_without_its_length_takes_that_of_the_model(exported):
    found = exported(rope_scaling=LLAMA3)
    assert not isinstance(found, str), found
    scaling = {**(found.get("rope_parameters") or {}), **(found["rope_scaling"] or {})}
    assert scaling["original_max_position_embeddings"] == 64


def test_a_mistral_without_a_window_has_that_of_transformers(exported):
    name = {"model_type": "mistral", "architectures": ["MistralForCausalLM"]}
    assert exported(**name, without=("rope_scaling",))["sliding_window"] == 4096


def test_a_mistral_whose_window_is_null_has_none(exported):
    name = {"model_type": "mistral", "architectures": ["MistralForCausalLM"]}
    assert exported(**name, sliding_window=None)["sliding_window"] is None
