"""Bounds of dependencies, and private parts of JAX where `jaxinf.compat` looks."""

import importlib
import tomllib
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace

import jax
import pytest
from packaging.requirements import Requirement

from jaxinf import compat
from jaxinf.compat import processes


@pytest.mark.skipif(jax.__version_info__ < (0, 10), reason="not looked at there")
def test_memory_is_registered_where_it_is_looked_for():
    assert compat.memory_registry(jax.devices()[0]) is None
    client = jax.devices()[0].client
    gpu = SimpleNamespace(platform="gpu", client=client)
    assert compat.memory_registry(gpu) is client


def test_the_coordination_service_is_where_it_is_looked_for():
    assert compat.coordination() is None  # this program is one process
    state = processes._distributed
    assert all(hasattr(state, n) for n in ("client", "process_id", "num_processes"))
    client = importlib.import_module("jax._src.lib")._jax.DistributedRuntimeClient
    used = "key_value_set blocking_key_value_get key_value_dir_get"
    assert not set(used.split()) - set(dir(client))


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
