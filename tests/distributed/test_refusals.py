"""What several processes may not do is refused by name, before anything is written."""

import re
from pathlib import Path

import pytest
from processes import PROGRAM, free_port, running
from shim import built_shim

import jaxinf
from jaxinf.errors import StoreFormatError, StoreMismatchError
from jaxinf.train import devices
from jaxinf.train.__main__ import main

pytestmark = pytest.mark.optimized("long")

REFUSED = PROGRAM.with_name("refused_program.py")

EXPECTED = {
    "different_paths": "ProcessError: .*expected one path in all 3 processes",
    "missing_process": None,
    "checkpoint_of_one": None,
    "export_of_one": "ProcessError: .*export_to=.*file:.* in process 1, and null in ",
    "bad_option_of_one": "Error: .*number of steps, at least 1",
    "another_call": "ProcessError: .*it makes another call, (checkpoint alone|a snap)",
    "no_mesh": "DeviceConfigurationError: .*expected params on a mesh of all 3",
    "mesh_of_some": "DeviceConfigurationError: .*(found none of process 2|found none;)",
    "shared_roots": "ValueError: csds: expected roots of its own in each process",
    "other_optimizer": "StoreMismatchError: .*the same params, mesh, shardings and opt",
    "own_paths": "went well",
    "own_path_on_a_mesh": "DeviceConfigurationError: .*the store is this process's alo",
    "other_version": "StoreMismatchError: .*the same jaxinf, jax and optax.*process 1",
    "other_version_later": 'StoreMismatchError: .*same jaxinf, jax .*"jax": "0.4.0"',
    "other_count": "StoreMismatchError: .*member . of 4; run with 4 processes, each wi",
    "other_runs": "StoreMismatchError: .*expected members of one run, found process 0",
    "missing_member": "ProcessError: .*a member of the run in each of 3 .*in process 2",
    "member_twice": "Error: .*expected member 1 of 3, found member 0 of 3; run wi",
    "damaged_manifest": "Error: .*process-00001/jaxinf.json: .*CRC-32C",
    "damaged_record": "Error: .*process-00001/slots/./commit.json: ",
    "damaged_chunk": "Error: .*process-00000/.*/params.w/c/.*: ",
    "without_locks": "Error: .*process-00001/lock: expected a file system with locks",
    "opened_before": "DeviceConfigurationError: .*opened before jax.distributed.initi",
    "from_a_backup": "ProcessError: .*that all members have, found none: .* 0: step 3",
    "restored_after_a_backup": "went well",
    "old_copy": "expected replicas with the same bits in all processes, found others",
}


@pytest.fixture(scope="module")
def refused(tmp_path_factory) -> tuple[Path, list[str]]:
    place = tmp_path_factory.mktemp("refused")
    variables = {"LD_PRELOAD": str(built_shim(tmp_path_factory.mktemp("shim")))}
    options = {"program": (REFUSED, place), "count": 3, "variables": variables}
    with running(place, **options) as processes:
        processes.wait()
        return place, processes.outputs()


@pytest.mark.parametrize("case", EXPECTED)
def test_is_refused_by_name(refused, case):
    place, outputs = refused
    del place
    for number, output in enumerate(outputs):
        found = [line for line in output.splitlines() if line.startswith(f"{case}: ")]
        assert len(found) == 1, f"process {number}\n{output}"
        wanted = EXPECTED[case]
        if wanted is None:  # one process alone makes the call
            wanted = "went well"
            if number == 0:
                wanted = "expected all 3 processes to make this call within . s, found"
                wanted += " none of process 1, 2"
        assert re.search(wanted, found[0]), f"process {number}\n{output}"


def test_one_process_alone_cannot_have_a_run(refused):
    place, _ = refused
    with pytest.raises(StoreFormatError, match=r"3 of them.*call jax.distributed.init"):
        jaxinf.open_store(place / "copies")
    with pytest.raises(StoreMismatchError, match="found member 1 of a run of 3"):
        jaxinf.open_store(place / "copies" / "process-00001")


def test_a_process_that_is_no_coordinator_says_whom_it_waited_for(monkeypatch, capsys):
    monkeypatch.setattr(devices, "_PATIENCE_S", 0.5)
    told = ["--mode", "memory", "--distributed"]
    assert main([*told, f"localhost:{free_port()},2,1"]) == 2
    expected = r"--distributed.*process 0 to listen there, found after \d+ s:"
    assert re.search(expected, capsys.readouterr().err)
    with pytest.raises(SystemExit):
        main([*told, "localhost,2,1"])
    assert "expected HOST:PORT" in "".join(capsys.readouterr())


def test_nothing_was_written(refused):
    place, _ = refused
    for name in (
        "common",
        "odd",
        "lonely",
        "no-mesh",
        "some",
        "roots",
        "optimizer",
        "version",
        "early",
    ):
        assert not list(place.glob(f"{name}/**/jaxinf.json"))
