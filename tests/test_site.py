"""The site's reference is complete, and its check finds what a reader stumbles over."""

import re
from pathlib import Path

import check_site
import pytest

import jaxinf

REFERENCE = Path(__file__).parents[1] / "docs" / "reference"

INDEX = '<h1 id="top"></h1><a href="guide/one.html#here">one</a>'
SITE = {
    "index.html": INDEX,
    "guide/one.html": '<p id="here"></p><a href="../index.html#top">home</a>'
    '<img src="../picture.svg"><a href="https://example.org/gone">elsewhere</a>',
    "picture.svg": "<svg/>",
}
THERE = "index.html: no place guide/one.html#there"
TOP = "guide/one.html: no place ../index.html#top"


@pytest.mark.parametrize(
    ("page", "text", "found"),
    [
        ("index.html", INDEX, []),
        ("index.html", '<a href="guide/one.html#there">one</a>', [THERE, TOP]),
        (
            "guide/one.html",
            '<p id="here"></p><img src="gone.svg">',
            ["guide/one.html: no page gone.svg"],
        ),
        ("alone.html", "<p></p>", ["alone.html: no link leads to it"]),
    ],
)
def test_broken_links_are_found(tmp_path, page, text, found):
    for name, written in {**SITE, page: text}.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(written)
    assert sorted(check_site.broken_links(tmp_path)) == sorted(found)


def test_the_reference_has_every_public_name_and_a_remedy_for_every_error():
    pages = [(REFERENCE / name).read_text() for name in ("api.md", "errors.md")]
    named = re.findall(r"(?m)^\.\. auto\w+:: (\w+)$", "\n".join(pages))
    assert sorted(named) == sorted(jaxinf.__all__)
    remedies = re.findall(r"(?m)^\| `(\w+)` \|", pages[1])
    roots = {"JaxinfError", "StoreError"}
    errors = {name for name in jaxinf.__all__ if name.endswith("Error")} - roots
    assert sorted(remedies) == sorted(errors)
