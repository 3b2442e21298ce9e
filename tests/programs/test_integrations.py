"""The snippets of docs/integrations.md, run as they stand there."""

import re
from pathlib import Path

import pytest

import jaxinf

PAGE = Path(__file__).parents[2] / "docs" / "integrations.md"


def sections():
    """The first snippet, which all share, and the others by heading and number."""
    parts = re.split(r"^## (.*)$", PAGE.read_text(), flags=re.MULTILINE)
    found = {}
    for title, text in zip(parts[1::2], parts[2::2], strict=True):
        codes = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
        for number, code in enumerate(codes):
            found[f"{title} {number}"] = code
    common = re.findall(r"```python\n(.*?)```", parts[0], re.DOTALL)
    return common[0], found


COMMON, SNIPPETS = sections()


@pytest.mark.parametrize("name", SNIPPETS)
def test_snippet(place, name):
    store = str(place / "store")
    names = {"STORE": store}
    try:
        exec(compile(COMMON, str(PAGE), "exec"), names)
        exec(compile(SNIPPETS[name], str(PAGE), "exec"), names)
        assert "smart_update" in SNIPPETS[name]
        opened = jaxinf.store_of(store)
        opened.wait(names.get("state"))
        assert opened.step >= 1 or "Reading the state" in name
    finally:
        jaxinf.close(store)


def test_every_subject_has_a_snippet():
    words = "Linen NNX Equinox Haiku Orbax Mesh Schedules Reading LoRA EMA Accumulation"
    missing = [w for w in words.split() if not any(w in name for name in SNIPPETS)]
    assert not missing
