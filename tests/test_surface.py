"""A change of the public surface is seen, and errors that it names can be imported."""

import builtins
import inspect
import re
from pathlib import Path

import pytest
import surface

import jaxinf

STABILITY = Path(__file__).parents[1] / "docs" / "stability.md"


def test_the_public_surface_is_as_listed():
    assert list(surface.lines()) == surface.SURFACE.read_text().splitlines(), (
        surface.REMEDY
    )


def test_the_list_sees_types_defaults_and_members_of_bases():
    listed = surface.SURFACE.read_text()
    for line in (
        "  .close() -> None",
        "jaxinf.BudgetError(StreamError)",
        "jaxinf checkpoint remove STORE NAMES...",
        "  --steps: int = 1000",
    ):
        assert line in listed.splitlines()
    assert "object at 0x" not in listed


def test_what_may_change_is_named():
    text = STABILITY.read_text()
    assert all(f"`{name}`" in text for name in surface.UNSTABLE)


@pytest.mark.parametrize("name", jaxinf.__all__)
def test_errors_that_docstrings_name_can_be_imported(name):
    item = getattr(jaxinf, name)
    members = [m for _, m in surface.members_of(item)] if inspect.isclass(item) else []
    found = {error for one in (item, *members) for error in raised_by(one)}
    missing = {n for n in found if not (hasattr(builtins, n) or hasattr(jaxinf, n))}
    assert not missing


def test_errors_are_found_in_docstrings():
    assert "StoreLockedError" in raised_by(jaxinf.open_store)
    assert "NonFiniteGradientError" in raised_by(jaxinf.StreamedStep.__call__)


def raised_by(item):
    """Returns the names at the beginning of the entries below ``Raises:``."""
    _, _, text = (inspect.getdoc(item) or "").partition("Raises:\n")
    entries = re.findall(r"(?m)^  (\w[\w, ]*):", text.split("\n\n")[0])
    return {name for entry in entries for name in entry.split(", ")}
