"""A run goes on with another number of processes, with the bits that it would have."""

import shutil

import pytest
from killed_copies import contents
from processes import losses, ran, run_alone, running

from jaxinf.cli.commands import main

pytestmark = pytest.mark.optimized("long")


@pytest.mark.parametrize(
    "layout", [pytest.param("fsdp", marks=pytest.mark.long), "mixed"]
)
def test_losses_go_on(alone, tmp_path, layout):
    path, expected = tmp_path / "run", losses(alone("--layout", layout, "--steps", 6))
    words, found = (path, "--layout", layout), {}
    found |= losses(ran(tmp_path, *words, "--steps", 2).output(0))
    with running(tmp_path, *words, "--more", 1, count=1) as processes:
        assert processes.wait() != [0]
        assert "jaxinf store copy" in processes.output(0)
    assert main(["store", "copy", str(path), str(path), "--processes", "1"]) == 0
    found |= losses(run_alone(*words, "--more", 2, num_devices=2))
    options = ("--options", '{"divide": true}')
    found |= losses(ran(tmp_path, *words, "--more", 2, *options).output(0))
    assert found == expected
    assert len(found) == 6
    assert main(["verify", str(path)]) == 0


@pytest.mark.long
def test_a_mesh_that_cuts_chunks_has_a_new_grid(tmp_path):
    """In four processes, in one, or in two with two devices each: the same losses."""
    path, words, found = tmp_path / "run", ("--layout", "fsdp"), []
    ran(tmp_path, path, *words, "--steps", 2)
    expected = contents(path)
    with running(tmp_path, path, *words, "--more", 1, num_devices=2) as processes:
        assert 0 not in processes.wait(), processes
        assert any(
            "give the trainer --elastic" in text for text in processes.outputs()
        ), processes
    assert contents(path) == expected
    options = ("--options", '{"divide": true}')
    for count in (4, 2, 1):
        shutil.copytree(path, tmp_path / f"copy-{count}", symlinks=True)
        more = (tmp_path / f"copy-{count}", *words, "--more", 2, *options)
        if count == 1:
            found.append(losses(run_alone(*more, num_devices=4)))
            continue
        shape = {"count": count, "num_devices": 4 // count}
        processes = ran(tmp_path, *more, **shape)
        said = processes.output(0)
        assert "divided among" in said
        assert "checkpoints dropped" not in said
        found.append(losses(said))
    assert len(found[0]) == 2
    assert found[0] == found[1]
    # Four devices of one process are summed in another order than four processes.
    ulps = [int(found[2][step], 16) - int(found[0][step], 16) for step in found[0]]
    assert ulps[0] == 0
    assert abs(ulps[1]) <= 4
    assert main(["verify", str(tmp_path / "copy-4")]) == 0
