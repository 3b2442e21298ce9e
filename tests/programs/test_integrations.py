"""The snippets of docs/integrations.md, run as they stand there."""

import re
from pathlib import Path

import jax.numpy as jnp
import optax
import orbax.checkpoint as ocp
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


def test_a_checkpoint_of_before_the_change(place):
    """Orbax's own words, which the page quotes, and ours."""
    params, plain = {"w": jnp.ones((8, 4))}, optax.adamw(1e-3)
    tx = jaxinf.smart_update(plain, place / "store")
    state = tx.init(params)
    with ocp.CheckpointManager(place / "checkpoints") as manager:
        kept = {"params": params, "state": plain.init(params)}
        manager.save(1, args=ocp.args.StandardSave(kept))
        manager.wait_until_finished()
        like = ocp.args.StandardRestore({"params": params, "state": state})
        with pytest.raises(ValueError, match="tree structures do not match") as error:
            manager.restore(1, args=like)
        quoted = re.search(r'"(User-provided [^"]*)"', PAGE.read_text())
        assert quoted
        assert " ".join(quoted[1].split()) in str(error.value)
        restored = manager.restore(1, args=ocp.args.StandardRestore())
    with pytest.raises(TypeError, match="import CHECKPOINT"):
        tx.update(params, restored["state"], params)
    jaxinf.close(place / "store")
