"""Every recipe of docs/recipes starts, and takes what its page says."""

import contextlib
import json
from pathlib import Path

import pytest
import recipe_sizes
from hub_folders import write_folder
from jaxinf_models import MODELS
from jaxinf_models.bert import BertConfig
from jaxinf_models.llama import LlamaConfig
from jaxinf_models.t5 import T5Config
from jaxinf_models.vit import ViTConfig
from small_pictures import write_pictures

from jaxinf.train.__main__ import main
from jaxinf.train.run_file import read_run

PAGE = Path(__file__).parents[2] / "docs" / "recipes" / "index.md"
RECIPES = {path.stem: path for path in sorted(PAGE.parent.glob("*.toml"))}
TINY = {
    "bert": BertConfig(1, 2, 64, 128, 257, 16),
    "llama": LlamaConfig(257, 64, 1, 2, 2, 32, 128),
    "t5": T5Config(257, 1, 1, 2, 64, 32, 128, mlp="gated-gelu"),
    "vit": ViTConfig(1, 2, 64, 128, 8, 4, num_channels=1, num_labels=4),
}
SHORT = {"gpt2-xl", "two-drives"}
ONCE = ["--preset", "nano", "--steps", "2", "--batch-size", "2"]
ONCE += ["--eval-every", "0"]


@pytest.fixture
def small(tmp_path, tiny, text):
    """The flags that make a recipe small, while its model is tiny."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(tiny())
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        for name, config in TINY.items():
            patch.setitem(MODELS[name].presets, "nano", config)
        yield lambda run: [*ONCE, *_places(run, tmp_path), *_data(run, tmp_path, text)]


def _places(run, place):
    words = ["--store", str(place / "store")]
    for number, _ in enumerate(run.csd_root):
        (place / f"drive{number}").mkdir()
        words += ["--csd-root", str(place / f"drive{number}")]
    if run.mode == "stream":
        words += ["--memory", "256MiB"]
    if run.source is not None:
        write_folder(place / "hf", TINY["llama"])
        words += ["--from", str(place / "hf")]
    return words


def _data(run, place, text):
    if run.model == "vit":
        return ["--data", str(write_pictures(place / "a"))]
    words = ["--seq-len", "8", "--tokenizer", "None", "--data"]
    if run.model != "t5" and run.source is None:
        return [*words, str(text)]
    pairs = [{"prompt": f"{n}+1=", "response": str(n + 1)} for n in range(60)]
    (place / "a.jsonl").write_text("\n".join(map(json.dumps, pairs)))
    return [*words, str(place / "a.jsonl")]


@pytest.mark.long
@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=() if n in SHORT else pytest.mark.long) for n in RECIPES],
)
def test_a_recipe_starts_and_takes_what_is_planned(name, small, tmp_path, lines):
    words = small(read_run(RECIPES[name]))
    assert main(["--config", str(RECIPES[name]), *words]) == 0
    found = lines(tmp_path / "store-log")
    assert [line["step"] for line in found] == [1, 2]
    run = recipe_sizes.run_of(tmp_path / "store-log" / "config.toml")
    sizes = recipe_sizes.counted(run)
    drives = [tmp_path / "store", *run.csd_root]
    files = [f for d in drives for f in d.rglob("c/**/*") if f.is_file()]
    held = sum(file.lstat().st_blocks * 512 for file in files)
    moved = found[1]["drive_read_bytes"], found[1]["drive_write_bytes"]
    planned = sizes.drive_read_bytes, sizes.drive_write_bytes
    if run.mode == "stream":  # its chunks follow the program: more ends of files
        more = 4096 * len(files)
        assert 0 < moved[0] <= planned[0] + more
        assert 0 < moved[1] <= planned[1] + more
        assert held <= sizes.disk_bytes + more
    else:
        assert moved == planned
        assert held == sizes.disk_bytes


@pytest.mark.long
def test_the_page_has_what_is_planned():
    assert recipe_sizes.table([*RECIPES.values()]) in PAGE.read_text()


def test_the_page_has_every_recipe():
    text = PAGE.read_text()
    for name in RECIPES:
        assert f"\n## {name}\n" in text
        assert f":::{{literalinclude}} {name}.toml" in text
    assert len(RECIPES) >= 8
