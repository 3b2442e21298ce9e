"""Exports beside a run of the trainer, and its exit status."""

import pytest

import jaxinf
from jaxinf.cli.commands import main

SMALL = ("--memory", "64MiB")


@pytest.mark.long
@pytest.mark.parametrize("mode", ["update", "stream"])
def test_exported_steps_go_on_as_the_run_did(run, losses, tmp_path, capsys, mode):
    words = ("--store", tmp_path / "store", "--mode", mode, *SMALL)
    export = ("--checkpoint-every", 3, "--export-to", f"file://{tmp_path}/out/")
    assert run(*words, *export, "--steps", 4) == 0
    assert f"step 3: exported to file://{tmp_path}/out/3\n" in capsys.readouterr().out
    assert not [*(tmp_path / "store/snapshots").iterdir()]
    made = tmp_path / "made"
    assert main(["store", "copy", f"file://{tmp_path}/out/3", str(made)]) == 0
    words = ("--mode", mode, *SMALL, "--steps", 6)
    assert run(*words, "--store", tmp_path / "store") == 0
    assert run(*words, "--store", made) == 0
    found = [losses(tmp_path / f"{name}-log")[-2:] for name in ("store", "made")]
    assert found[0] == found[1]


def test_a_failed_export_is_in_the_exit_status(run, tmp_path, capsys, caplog):
    (tmp_path / "out/4").mkdir(parents=True)
    (tmp_path / "out/4/other").touch()
    words = ("--store", tmp_path / "store", "--export-to", f"file://{tmp_path}/out")
    assert run(*words, "--checkpoint-every", 4, "--steps", 5) == 3
    assert "exports of step 4 failed: exit status 3" in capsys.readouterr().out
    assert caplog.text.count("step 4 is not exported to") == 1
    with jaxinf.open_store(tmp_path / "store") as store:
        assert store.step == 5


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("--export-to", "file:///a"), "--export-to: expected --checkpoint-every K"),
        (
            ("--checkpoint-every", 2, "--export-to", "ftp://h/a"),
            "--export-to: expected a URL of file://, gs://, s3://, found ftp://",
        ),
        (
            ("--checkpoint-every", 2, "--export-to", "s3://key:secret@bucket/a"),
            "--export-to: s3://…: expected s3://BUCKET/PATH alone",
        ),
        (
            ("--mode", "memory", "--checkpoint-every", 2, "--export-to", "file:///a"),
            "--mode memory keeps nothing on drives",
        ),
    ],
)
def test_is_refused_before_anything_is_written(run, tmp_path, capsys, words, expected):
    store = () if "memory" in words else ("--store", tmp_path / "store")
    assert run(*store, *words) == 2
    err = capsys.readouterr().err
    assert expected in err
    assert "secret" not in err
    assert not (tmp_path / "store").exists()
