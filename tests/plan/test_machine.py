"""Descriptions of machines: those of the package, files, and files that are refused."""

import dataclasses
import json
from importlib import resources

import pytest

from jaxinf.plan import MACHINES, MachineError, Rate, read_machine, write_machine

NAMES = {"a100-x4", "h100-x4", "smartssd-server", "vm-2-cores", "workstation"}


def document(name="workstation"):
    """The content of a machine's file."""
    path = f"{name}.json"
    return json.loads((resources.files("jaxinf.plan") / "machines" / path).read_text())


@pytest.mark.parametrize("name", MACHINES)
def test_written_and_read_it_is_the_same(name, tmp_path):
    machine = read_machine(name)
    write_machine(tmp_path / "machine.json", machine)
    assert read_machine(tmp_path / "machine.json") == machine
    assert [file.name for file in tmp_path.iterdir()] == ["machine.json"]


def test_machines_of_the_package():
    assert set(MACHINES) >= NAMES
    for name in MACHINES:
        machine = read_machine(name)
        rates = dict(machine.rates())
        assert {"memory", "copy"} <= set(rates)
        assert all(rate.value > 0 and rate.source for rate in rates.values())


def changed(change):
    content = document()
    change(content)
    return content


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d.pop("copy"), "expected the key 'copy', found none"),
        (lambda d: d["copy"].update(value=0), r"copy.value: expected a number from 1"),
        (lambda d: d["copy"].update(value=-5), r"copy.value: expected a number from 1"),
        (lambda d: d["copy"].update(value="1e9"), r"copy.value: expected a number"),
        (lambda d: d["copy"].update(unit="GB/s"), r"copy.unit: expected 'bytes/s'"),
        (lambda d: d["copy"].update(units="GB/s"), r"copy: expected no key 'units'"),
        (lambda d: d["drives"][0].pop("read"), r"drives\[0\]: expected the key 'read'"),
        (lambda d: d["copy"].update(basis="hearsay"), r"copy.basis: expected one of"),
        (lambda d: d.update(version=2), "version: expected 1, found 2"),
        (lambda d: d.update(num_cores=0), "num_cores: expected a whole number from 1"),
        (lambda d: d["device"].pop("memory"), "device: expected"),
    ],
)
def test_a_field_that_is_wrong_is_named(change, message, tmp_path):
    path = tmp_path / "machine.json"
    path.write_text(json.dumps(changed(change)))
    with pytest.raises(MachineError, match=message) as error:
        read_machine(path)
    assert str(path) in str(error.value)


@pytest.mark.parametrize("field", ["commits", "launches", "calls", "moves"])
def test_what_an_older_file_lacks_is_not_known(field, tmp_path):
    path = tmp_path / "machine.json"
    path.write_text(json.dumps(changed(lambda d: d.pop(field, None))))
    assert getattr(read_machine(path), field) is None


@pytest.mark.parametrize("content", ["", "[]", "{", '{"version": 1, "version": 1}'])
def test_what_is_no_description_is_refused(content, tmp_path):
    path = tmp_path / "machine.json"
    path.write_text(content)
    with pytest.raises(MachineError, match=str(path)):
        read_machine(path)


def test_an_unknown_name_lists_those_that_are_known():
    with pytest.raises(MachineError, match=r"No such file.*") as error:
        read_machine("no-such-machine")
    assert all(name in str(error.value) for name in NAMES)


def test_a_machine_that_cannot_be_read_back_is_not_written(tmp_path):
    machine = dataclasses.replace(read_machine("workstation"), copy=Rate(0.0, "nobody"))
    with pytest.raises(ValueError, match=r"copy.value: expected a number from 1"):
        write_machine(tmp_path / "machine.json", machine)
    assert not list(tmp_path.iterdir())
