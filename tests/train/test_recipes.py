"""Every recipe of docs/recipes starts, and takes what its page says."""

import json
from pathlib import Path

import pytest
import recipe_sizes
from families import family
from hub_folders import write_folder, write_pictures

from jaxinf.train.__main__ import main
from jaxinf.train.run_file import read_run_file

PAGE = Path(__file__).parents[2] / "docs" / "recipes" / "index.md"
RECIPES = {path.stem: path for path in sorted(PAGE.parent.glob("*.toml"))}
ONCE = "--preset nano --steps 2 --batch-size 2 --eval-every 0".split()


@pytest.fixture
def small(tmp_path, tiny, text):
    """The flags that make a recipe small, while its model is tiny."""
    with tiny() as models:
        folder = tmp_path, models["llama"]
        yield lambda run: [*ONCE, *_places(run, *folder), *_data(run, tmp_path, text)]


def _places(run, place, llama):
    words = ["--store", str(place / "store")]
    for number, _ in enumerate(run.csd_root):
        (place / f"drive{number}").mkdir()
        words += ["--csd-root", str(place / f"drive{number}")]
    if run.mode == "stream":
        words += ["--memory", "256MiB"]
    if run.source is not None:
        write_folder(place / "hf", llama)
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


@pytest.mark.parametrize("name", family(RECIPES, short=["gpt2-xl", "two-drives"]))
def test_a_recipe_starts_and_takes_what_is_planned(name, small, tmp_path, lines):
    words = small(read_run_file(RECIPES[name]))
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
