"""`--compress`: the same bits in both modes, also resumed; refusals."""

import json

import pytest

pytestmark = pytest.mark.optimized


@pytest.mark.long
def test_update_has_the_bits_of_memory_and_resumes(run, losses, tmp_path):
    compress = ("--compress", "top_k:0.1,error_feedback=true,warmup_steps=2")
    store = ("--store", tmp_path / "store", *compress)
    assert run(*store, "--steps", 3) == 0
    assert run(*store, "--steps", 8) == 0
    split = ("--mode", "memory", "--log-dir", tmp_path / "log")
    assert run(*split, *compress, "--steps", 8) == 0
    assert losses(tmp_path / "store-log") == losses(tmp_path / "log")
    manifest = json.loads((tmp_path / "store/jaxinf.json").read_text())
    assert all("error_feedback" in leaf["states"][-1] for leaf in manifest["leaves"])


@pytest.mark.long
def test_a_streamed_run_goes_on_with_one_that_was_not(run, losses, lines, tmp_path):
    compress = ("--compress", "top_k:0.1", "--clip-norm", 0)
    store = ("--store", tmp_path / "store", *compress)
    stream = ("--mode", "stream", "--memory", "256MiB")
    assert run(*store, "--steps", 3) == 0
    assert run(*store, *stream, "--steps", 6) == 0
    assert run(*store, "--steps", 7) == 0
    memory = ("--mode", "memory", "--log-dir", tmp_path / "log", *compress)
    assert run(*memory, "--steps", 7) == 0
    expected = pytest.approx(dict(losses(tmp_path / "log")), rel=1e-4)
    assert dict(losses(tmp_path / "store-log")) == expected
    found = lines(tmp_path / "store-log")
    (down,) = {line["link_down_bytes"] for line in found}  # with the params
    assert down < 1.2 * found[0]["link_up_bytes"]
