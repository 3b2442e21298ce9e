"""The whole of a run: stock readers open it; `inspect` and `verify` take its path."""

import json
import re
import shutil

import numpy as np
import orbax.checkpoint as ocp
import pytest
import zarr
from processes import ran

from jaxinf.cli.commands import main

pytestmark = pytest.mark.optimized("long")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    place = tmp_path_factory.mktemp("whole")
    arguments = (place / "run", "--layout", "mixed", "--steps", 2, "--print-sums")
    return place / "run", ran(place, *arguments).output(0)


def test_an_export_of_the_whole_is_one_that_stock_readers_open(
    trained, tmp_path, capsys
):
    run, output = trained
    sums = re.findall(r"^sum (\S+) (\S+) (\S+)", output, re.M)
    assert len(sums) == 12  # four leaves, three states
    assert main(["checkpoint", "save", str(run), "kept"]) == 0
    assert main(["checkpoint", "save", str(run), "kept"]) == 1
    for form in ("", "file://"):
        out = tmp_path / f"out{len(form)}"
        words = ["checkpoint", "export", str(run), f"{form}{out}", "--memory", "8MiB"]
        assert main([*words, *["--checkpoint", "kept"] * (not form)]) == 0
        assert not list(run.glob("process-00000/snapshots/*"))
        copy = tmp_path / f"copy{len(form)}"
        assert main(["store", "copy", f"{form}{out}", str(copy)]) == 0
        assert main(["verify", str(copy)]) == 0
        for place in (out, copy / "current"):
            group = zarr.open_group(place, mode="r")
            restored = ocp.PyTreeCheckpointer().restore(place)
            for state, leaf, expected in sums:
                array = group[f"{state}.{leaf}"][...]
                assert repr(float(array.astype(np.float64).sum())) == expected
                np.testing.assert_array_equal(restored[state][leaf], array)
    slot = (run / "process-00001/current").resolve()
    file = next(slot.glob("params.up/c/*/*"))
    before = file.read_bytes()
    file.write_bytes(b"\xff" * 4 + before[4:])
    capsys.readouterr()
    assert main(["checkpoint", "export", str(run), str(tmp_path / "bad")]) == 1
    assert "process-00001/snapshots" in capsys.readouterr().err
    assert not (tmp_path / "bad" / "export.json").exists()
    file.write_bytes(before)


def test_checkpoints_of_the_whole_are_listed_restored_and_removed(trained, capsys):
    run, _ = trained
    arguments = (run, "--layout", "mixed", "--more", 1)

    def listed():
        capsys.readouterr()
        assert main(["checkpoint", "list", str(run), "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        return {one["name"]: one["step"] for one in found}

    assert main(["checkpoint", "save", str(run), "early"]) == 0
    step = listed()["early"]
    losses = []
    for _ in range(2):
        processes = ran(run.parent, *arguments)
        assert f"at {step}\n" in processes.output(1)
        losses.append(re.findall("^loss.*", processes.output(0), re.M))
        current = run / "process-00001/current"  # as if it had died before its flip
        slot = current.readlink().name
        current.unlink()
        current.symlink_to(f"slots/{'b' if slot == 'a' else 'a'}")
        assert main(["checkpoint", "restore", str(run), "early"]) == 1
        assert "in no checkpoint" in capsys.readouterr().err
        words = ["checkpoint", "restore", str(run), "early", "--discard-current"]
        assert main(words) == 0
    assert losses[0] == losses[1]
    assert main(["checkpoint", "save", str(run / "process-00001"), "half"]) == 0
    assert "half" not in listed()
    assert main(["checkpoint", "restore", str(run), "half"]) == 1
    assert main(["checkpoint", "remove", str(run), "half", "early", "none"]) == 1
    assert "early" in listed()
    assert main(["checkpoint", "remove", str(run), "half", "early"]) == 0
    assert "early" not in listed()
    assert not list(run.glob("**/checkpoints/*early*"))


def test_a_member_that_cannot_be_seen_is_listed(trained, tmp_path, capsys):
    run, _ = trained
    assert main(["verify", str(run)]) == 0
    assert "run of 2 processes: step 2" in capsys.readouterr().out
    assert main(["inspect", str(run)]) == 0
    part = tmp_path / "run"
    shutil.copytree(run / "process-00001", part / "process-00001", symlinks=True)
    for command in ("verify", "inspect"):
        assert main([command, str(part)]) == 2
        shown = capsys.readouterr().out
        assert "process 0: cannot be seen" in shown
    slot = (run / "process-00001/current").resolve()
    file = next(slot.glob("params.up/c/*/*"))
    with file.open("r+b") as opened:
        opened.write(b"\xff\xff\xff\xff")
    assert main(["verify", str(run)]) == 1
