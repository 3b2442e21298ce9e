"""Uses tied to a version of JAX, optax or Orbax are only in `jaxinf.compat`."""

import ast
import importlib
import re
from pathlib import Path
from types import SimpleNamespace

import jax
import pytest

from jaxinf import compat
from jaxinf.compat import processes

ROOT = Path(__file__).parents[1]
SOURCES = [
    path
    for path in sorted((ROOT / "jaxinf").rglob("*.py"))
    if path.parent != ROOT / "jaxinf" / "compat"
]

MODULES = re.compile(
    r"jax\.(experimental|extend|core|interpreters|_src)\b|jaxlib\b|.*\b_src\b|"
    r".*\bprimitive\.bind$"
)
NAMES = frozenset(
    """
    DictKey FlattenedIndexKey GetAttrKey SequenceKey Tracer _getframe buffer_callback
    f_back get_bind_params io_callback keystr manual_axes pure_callback shard_map
    """.split()
)
TEXTS = re.compile(
    r"\b(PJRT_NPROC|_src|branches|call_jaxpr|closed_call|custom_[jv][vj]p_call|"
    r"exponent_bits|fun_jaxpr|pjit|rounding_method)\b"
)


def docstrings(tree):
    """Returns the ids of strings that are statements: docstrings of all kinds."""
    return {
        id(node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }


def dotted(node):
    """Returns the text of an attribute; only names and attributes count."""
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def findings(source):
    """Yields names in `source` that belong in `jaxinf.compat`, with their lines."""
    tree = ast.parse(source)
    skipped = docstrings(tree)
    for node in ast.walk(tree):
        match node:
            case ast.Import():
                names = [alias.name for alias in node.names]
                found = [name for name in names if MODULES.match(name)]
            case ast.ImportFrom():
                names = [f"{node.module}.{alias.name}" for alias in node.names]
                found = [name for name in names if MODULES.match(name)]
                found += [alias.name for alias in node.names if alias.name in NAMES]
            case ast.Attribute(value=ast.Name(id="compat")):
                continue
            case ast.Attribute():
                found = [node.attr] if node.attr in NAMES else []
                found += [n for n in [dotted(node)] if MODULES.match(n)]
            case ast.Constant(value=str(text)) if id(node) not in skipped:
                found = [match[0] for match in TEXTS.finditer(text)]
            case _:
                continue
        yield from ((node.lineno, name) for name in found)


@pytest.mark.long
def test_nothing_tied_to_a_version_stands_elsewhere():
    assert SOURCES
    found = [
        f"{path}:{line}: {name}"
        for path in SOURCES
        for line, name in findings(path.read_bytes())
    ]
    assert not found, "use jaxinf.compat for\n" + "\n".join(found)


@pytest.mark.parametrize(
    "line",
    [
        "from jax.experimental import io_callback",
        "from jax import shard_map",
        "import jax.extend.core",
        "from jax._src import core",
        "from jax.tree_util import keystr",
        "jax.tree_util.keystr(path)",
        "jax.experimental.io_callback(f, x)",
        "jax.shard_map(f)",
        "primitive.get_bind_params(params)",
        "node.primitive.bind(x)",
        "jax.interpreters.ad",
        "sys._getframe(1)",
        "name == 'custom_jvp_call'",
        "os.environ['PJRT_NPROC']",
        "handler = 'orbax.checkpoint._src.handlers'",
    ],
)
def test_the_search_finds(line):
    assert list(findings(f"import jax\n{line}\n"))


WITHOUT = """
import sys
sys.modules["jax.experimental.buffer_callback"] = None
import jax, jax.numpy as jnp, numpy as np, optax
import jaxinf
from jaxinf import compat
assert not compat.has_buffer_callback()
params = {"w": jnp.linspace(-1.0, 1.0, 5000), "b": jnp.ones(3)}
tx = optax.adamw(1e-2)
with jaxinf.open_store(sys.argv[1]) as store:
    near = jaxinf.smart_update(tx, store)
    apply = jax.jit(optax.apply_updates)
    mine, state = params, near.init(params)
    theirs, expected = params, tx.init(params)
    step, reference = jax.jit(near.update), jax.jit(tx.update)
    for number in range(3):
        gradients = jax.tree.map(lambda x: jnp.sin(x + number), params)
        updates, state = step(gradients, state, mine)
        mine = apply(mine, updates)
        updates, expected = reference(gradients, expected, theirs)
        theirs = apply(theirs, updates)
    store.wait()
    for left, right in zip(jax.tree.leaves(mine), jax.tree.leaves(theirs)):
        np.testing.assert_allclose(left, right, rtol=1e-6)
print("trained")
"""


@pytest.mark.long
def test_without_buffer_callback_gradients_come_with_copies(run_python, place):
    assert run_python(WITHOUT, place / "store").stdout == "trained\n"


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
