"""What several processes may not do is refused by name, before anything is written."""

import re

import pytest
from processes import PROGRAM, free_port, running
from shim import built_shim

import jaxinf
from jaxinf.errors import StoreMismatchError
from jaxinf.train import devices
from jaxinf.train.__main__ import main

pytestmark = pytest.mark.optimized("long")

REFUSED = PROGRAM.with_name("refused_program.py")

OTHER = "another process of the run failed: process 1: "
UNKNOWN = "StreamError: device_memory_bytes: .* does not tell the size of its memory"
ALONE = "expected all 3 processes to make this call within . s, found none of process 1"

# Of all processes, or of each.
EXPECTED = {
    "different_paths": "ProcessError: .*expected one path in all 3 processes",
    "mesh_of_some": "DeviceConfigurationError: .*(found none of process 2|found none;)",
    "other_optimizer": "StoreMismatchError: .*params, mesh, shardings and optimizer to",
    "own_paths": "went well",
    "old_copy": "expected replicas with the same bits in all processes, found others",
    "other_version": "StoreMismatchError: .*versions of jaxinf, jax and opt.*process 1",
    "other_count": "StoreMismatchError: .*divided among 4 .*this run has 3; start as m",
    "other_runs": "StoreMismatchError: .*expected the run of the members to be the",
    "missing_member": "ProcessError: .*a member of the run in each of 3 .*in process 2",
    "member_twice": "Error: .*expected member 1 of the run, found member 0; give",
    "damaged_manifest": "Error: .*process-00001/jaxinf.json: .*CRC-32C",
    "damaged_chunk": "Error: .*process-00000/.*/params.w/c/.*: ",
    "without_locks": "Error: .*process-00001/lock: locking failed: No locks av",
    "opened_before": "DeviceConfigurationError: .*opened before jax.distributed.initi",
    "from_a_backup": r"all members have, .*0: .*step=3.*restore=.* \S*/backup NAME ",
    "restored_after_a_backup": "went well",
    "another_call": "ProcessError: .*it makes another call, (checkpoint alone|a snap)",
    "export_of_one": 'ProcessError: .*"file:.* in process 1, and .*"export_to": null',
    "ratios": "UnsupportedTransformError: .*whole params or states in a run of several",
    "on_own_devices": "went well",
    "other_batch": "ProcessError: .*the batch of a step to be the same in all 3 proce",
    "one_device": (f"ProcessError: .*{OTHER}{UNKNOWN}", UNKNOWN, "ProcessError: "),
    "one_goes_on": ("ProcessError: .*it closed the store", "went well", "went well"),
    "missing_process": (ALONE, "went well", "went well"),
}


@pytest.fixture(scope="module")
def refused(tmp_path_factory):
    place = tmp_path_factory.mktemp("refused")
    variables = {"LD_PRELOAD": str(built_shim(tmp_path_factory.mktemp("shim")))}
    options = {"program": (REFUSED, place), "count": 3, "variables": variables}
    with running(place, **options) as processes:
        processes.wait()
        return place, processes.outputs()


@pytest.mark.parametrize("case", EXPECTED)
def test_is_refused_by_name(refused, case):
    _, outputs = refused
    for number, output in enumerate(outputs):
        found = [line for line in output.splitlines() if line.startswith(f"{case}: ")]
        assert len(found) == 1, f"process {number}\n{output}"
        wanted = EXPECTED[case]
        wanted = wanted if isinstance(wanted, str) else wanted[number]
        assert re.search(wanted, found[0]), f"process {number}\n{output}"


def test_one_process_alone_cannot_have_a_run(refused):
    place, _ = refused
    with pytest.raises(StoreMismatchError, match=r"among 3 .*call jax\.distributed"):
        jaxinf.open_store(place / "copies")
    with pytest.raises(StoreMismatchError, match="divided among 3 "):
        jaxinf.open_store(place / "copies" / "process-00001")


def test_a_process_that_is_no_coordinator_says_whom_it_waited_for(
    monkeypatch, capsys, tmp_path
):
    monkeypatch.setattr(devices, "_PATIENCE_S", 0.5)
    told = ["--store", str(tmp_path / "store"), "--distributed"]
    assert main([*told, f"localhost:{free_port()},2,1"]) == 2
    expected = r"--distributed.*a coordinator that all .*Connection refused; process 0"
    assert re.search(expected, capsys.readouterr().err)
    assert main([*told, "localhost,2,1"]) == 2
    assert "expected HOST:PORT" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_nothing_was_written(refused):
    place, _ = refused
    names = "common odd lonely some optimizer version early ratios"
    for name in names.split():
        assert not list(place.glob(f"{name}/**/jaxinf.json")), name
