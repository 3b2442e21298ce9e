"""Presets have the published numbers of params, as their checkpoints on the hub."""

import pytest
from jaxinf_models import MODELS, config_for, num_params

PUBLISHED = {
    ("bert", "base"): 109_514_298,
    ("t5", "small"): 60_506_624,
    ("vit", "base"): 86_567_656,
    ("bloom", "560m"): 559_214_592,
    ("llama", "tinyllama-1.1b"): 1_100_048_384,
    ("llama", "llama2-7b"): 6_738_415_616,
    ("llama", "llama3.2-1b"): 1_235_814_400,
    ("llama", "qwen2.5-0.5b"): 494_032_768,
    ("llama", "qwen3-0.6b"): 596_049_920,
}


@pytest.mark.parametrize(("model", "preset"), PUBLISHED)
def test_published_sizes(model, preset):
    assert num_params(MODELS[model].presets[preset]) == PUBLISHED[model, preset]


@pytest.mark.parametrize("model", MODELS)
def test_every_preset_is_a_config_of_every_task(model):
    family = MODELS[model]
    assert "nano" in family.presets
    for preset in family.presets.values():
        for task in family.tasks:
            assert type(config_for(preset, task, num_labels=3)) is family.config_type
