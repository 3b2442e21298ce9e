"""The public surface is as listed; the reference is complete, and links lead on."""

import builtins
import inspect
import re
from pathlib import Path

import check_site
import pytest
import surface

import jaxinf

STABILITY = Path(__file__).parents[1] / "docs" / "stability.md"


def test_the_public_surface_is_as_listed():
    assert list(surface.lines()) == surface.SURFACE.read_text().splitlines(), (
        surface.REMEDY
    )


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


def raised_by(item):
    """Returns the names at the beginning of the entries below ``Raises:``."""
    _, _, text = (inspect.getdoc(item) or "").partition("Raises:\n")
    entries = re.findall(r"(?m)^  (\w[\w, ]*):", text.split("\n\n")[0])
    return {name for entry in entries for name in entry.split(", ")}


REFERENCE = Path(__file__).parents[1] / "docs" / "reference"

SITE = {
    "index.html": '<h1 id="top"></h1><a href="guide/one.html#here">one</a>'
    '<a href="guide/one.html#there">two</a>',
    "guide/one.html": '<p id="here"></p><a href="../index.html#top">home</a>'
    '<img src="../picture.svg"><a href="https://example.org/gone">elsewhere</a>'
    '<img src="gone.svg">',
    "picture.svg": "<svg/>",
    "alone.html": "<p></p>",
}


def test_broken_links_are_found(tmp_path):
    for name, written in SITE.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(written)
    assert sorted(check_site.broken_links(tmp_path)) == [
        "alone.html: no link leads to it",
        "guide/one.html: no page gone.svg",
        "index.html: no place guide/one.html#there",
    ]


def test_the_reference_has_every_public_name_and_a_remedy_for_every_error():
    pages = [(REFERENCE / name).read_text() for name in ("api.md", "errors.md")]
    named = re.findall(r"(?m)^\.\. auto\w+:: (\w+)$", "\n".join(pages))
    assert sorted(named) == sorted(jaxinf.__all__)
    remedies = re.findall(r"(?m)^\| `(\w+)` \|", pages[1])
    roots = {"JaxinfError", "StoreError"}
    errors = {name for name in jaxinf.__all__ if name.endswith("Error")} - roots
    assert sorted(remedies) == sorted(errors)
