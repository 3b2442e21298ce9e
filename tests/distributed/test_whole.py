"""The whole of a run: stock readers open it; `inspect` and `verify` take its path."""

import re
import shutil

import numpy as np
import orbax.checkpoint as ocp
import pytest
import tensorstore
import zarr
from processes import running

from jaxinf.cli.commands import main


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    place = tmp_path_factory.mktemp("whole")
    arguments = (place / "run", "--layout", "mixed", "--steps", 2, "--print-sums")
    with running(place, *arguments) as processes:
        assert processes.wait() == [0, 0], processes
        return place / "run", processes.output(0)


def test_stock_readers_open_the_whole(trained, capsys):
    run, output = trained
    assert main(["checkpoint", "save", str(run), "kept"]) == 0
    kept = run / "checkpoints" / "kept"
    assert capsys.readouterr().out.strip() == str(kept)
    group = zarr.open_group(kept, mode="r")
    restored = ocp.PyTreeCheckpointer().restore(kept / "default")
    sums = re.findall(r"^sum (\S+) (\S+) (\S+)", output, re.M)
    assert len(sums) == 12  # four leaves, three states
    for state, leaf, expected in sums:
        array = group[f"{state}.{leaf}"][...]
        assert repr(float(array.astype(np.float64).sum())) == expected
        np.testing.assert_array_equal(restored[state][leaf], array)
        store = {"driver": "file", "path": str(kept / f"{state}.{leaf}")}
        spec = {"driver": "zarr3", "kvstore": store}
        np.testing.assert_array_equal(
            tensorstore.open(spec, open=True).result().read().result(), array
        )
    assert main(["checkpoint", "save", str(run), "kept"]) == 1


def test_a_member_that_cannot_be_seen_is_listed(trained, tmp_path, capsys):
    run, _ = trained
    assert main(["verify", str(run)]) == 0
    assert "run of 2 processes: step 2" in capsys.readouterr().out
    assert main(["inspect", str(run)]) == 0
    part = tmp_path / "run"
    shutil.copytree(run / "process-00001", part / "process-00001", symlinks=True)
    for command in ("verify", "inspect"):
        assert main([command, str(part)]) == 2
        assert "process 0: cannot be seen" in capsys.readouterr().out
    slot = (run / "process-00001/current").resolve()
    file = next(slot.glob("params.up/c/*/*"))
    with file.open("r+b") as opened:
        opened.write(b"\xff\xff\xff\xff")
    assert main(["verify", str(run)]) == 1
