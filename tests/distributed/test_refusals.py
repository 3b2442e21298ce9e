"""What several processes may not do is refused by name, before anything is written."""

import re
from pathlib import Path

import pytest
from processes import PROGRAM, running

REFUSED = PROGRAM.with_name("refused_program.py")

EXPECTED = {
    "different_paths": "ProcessError: .*expected one path in all 3 processes",
    "missing_process": None,
    "no_mesh": "DeviceConfigurationError: .*expected params on a mesh of all 3",
    "mesh_of_some": "DeviceConfigurationError: .*(found none of process 2|found none;)",
    "shared_roots": "ValueError: csds: expected roots of its own in each process",
    "other_optimizer": "StoreMismatchError: .*the same params, mesh, shardings and opt",
    "own_paths": "went well",
    "own_path_on_a_mesh": "DeviceConfigurationError: .*the store is this process's alo",
    "old_copy": "expected replicas with the same bits in all processes, found others",
}


@pytest.fixture(scope="module")
def refused(tmp_path_factory) -> tuple[Path, list[str]]:
    place = tmp_path_factory.mktemp("refused")
    program = (REFUSED, place)
    with running(place, program=program, count=3) as processes:
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
                wanted = "expected all 3 processes to make this call within 1 s, found"
        assert re.search(wanted, found[0]), f"process {number}\n{output}"


def test_nothing_was_written(refused):
    place, _ = refused
    for name in ("common", "odd", "lonely", "no-mesh", "some", "roots", "optimizer"):
        assert not list(place.glob(f"{name}/**/jaxinf.json"))
