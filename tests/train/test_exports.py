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
