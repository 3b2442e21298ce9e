"""`--compress`: the same bits in both modes, also resumed; refusals."""

import json

import pytest

pytestmark = pytest.mark.optimized


def assert_alike(found, expected):
    assert dict(found) == pytest.approx(dict(expected), rel=1e-4)


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
    assert_alike(losses(tmp_path / "store-log"), losses(tmp_path / "log"))
    found = lines(tmp_path / "store-log")
    down = {line["link_down_bytes"] for line in found}  # with the params
    assert len(down) == 1
    assert down.pop() < 1.2 * found[0]["link_up_bytes"]


@pytest.mark.long
def test_a_streamed_run_has_no_norm_of_error_feedback(run, tmp_path, capsys):
    compress = ("--compress", "top_k:0.1,error_feedback=true", "--steps", 2)
    words = ("--store", tmp_path / "store", "--mode", "stream", "--memory", "256MiB")
    assert run(*words, *compress) == 2
    assert "give --clip-norm 0, or leave error feedback" in capsys.readouterr().err
    assert not (tmp_path / "store").exists()
    assert run(*words, *compress, "--clip-norm", 0) == 0


@pytest.mark.parametrize(
    ("compress", "message"),
    [
        ("top_k:2", "top_k: expected a ratio above 0 and at most 1"),
        ("random:0.1", "--compress 'random:0.1': expected top_k:RATIO"),
    ],
)
def test_bad_compression(compress, message, run, tmp_path, capsys):
    where = ("--store", tmp_path / "store")
    assert run(*where, "--steps", 1, "--compress", compress) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "store").exists()


def test_error_feedback_and_rare_commits(run, tmp_path, capsys):
    words = ("--durability", 5, "--compress", "top_k:0.1,error_feedback=true")
    assert run("--store", tmp_path / "store", "--steps", 1, *words) == 2
    assert "expected --durability step, got 5" in capsys.readouterr().err
