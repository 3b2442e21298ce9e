"""Dependencies have bounds, and the tested versions are within them."""

import tomllib
from importlib.metadata import version
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
READERS = {"orbax-checkpoint", "safetensors", "zarr"}
BOUNDED = [
    *map(Requirement, PROJECT["dependencies"]),
    *map(Requirement, PROJECT["optional-dependencies"]["data"]),
    *(
        requirement
        for requirement in map(Requirement, PROJECT["optional-dependencies"]["test"])
        if requirement.name in READERS
    ),
]


@pytest.mark.parametrize("requirement", BOUNDED, ids=lambda r: r.name)
def test_a_dependency_has_bounds_that_the_suite_runs_within(requirement):
    operators = {specifier.operator for specifier in requirement.specifier}
    assert operators - {"!="} == {">=", "<"}, f"{requirement}: see docs/dependencies.md"
    found = version(requirement.name)
    assert found in requirement.specifier


def test_every_dependency_is_explained():
    text = (ROOT / "docs" / "dependencies.md").read_text()
    extras = PROJECT["optional-dependencies"]
    listed = [
        *PROJECT["dependencies"],
        *(r for extra in extras.values() for r in extra),
    ]
    unexplained = {
        name for name in (Requirement(r).name for r in listed) if name not in text
    }
    assert not unexplained
