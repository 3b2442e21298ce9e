"""Imports go downward, as in docs/architecture.md; installed packages are complete."""

import ast
import functools
import importlib
import inspect
import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

FLOORS = [
    "command_line documents terminal compat errors typing".split(),
    ["transfer", "compress", "program", "native", "layout"],
    ["csd", "kernels", "exchange", "store", "processes"],
    ["engine"],
    ["optimizer", "streaming"],
    ["__main__", "cli", "train"],
]
"""Rooms of each floor; a room imports from lower floors, and those to its right."""

PLACE_OF = {
    room: (number, -place)
    for number, rooms in enumerate(FLOORS)
    for place, room in enumerate(rooms)
}

ROOMS = ["program", "plan", "move", "update"]
"""Packages of `jaxinf.streaming`, each of which may import those before it."""

MAY_IMPORT_JAX = {"compat", "program", "compress"}.union(*FLOORS[3:])
JAX_USERS = {"jax", "jaxlib", "flax", "optax", "orbax"}

# Parts of a checkout that are not layers of the package, but follow its rules.
SOURCES = sorted((ROOT / "jaxinf").rglob("*.py"))
MODELS = sorted((ROOT / "models").rglob("*.py"))


@functools.cache
def imported(path):
    """Returns dotted names of the modules that a file imports, anywhere in it."""
    names = set()
    for node in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            names.add(module)
            names |= {f"{module}.{alias.name}" for alias in node.names}
    return names


def part_of(path):
    """Returns the part of jaxinf that a file belongs to; None for the root itself."""
    part = path.relative_to(ROOT / "jaxinf").parts[0].removesuffix(".py")
    return None if part == "__init__" else part


PARTS = sorted({part_of(path) for path in SOURCES} - {None})


def files_of(part):
    return [path for path in SOURCES if part_of(path) == part]


@pytest.mark.parametrize("part", PARTS)
def test_imports_go_downward(part):
    assert part in PLACE_OF, f"{part} has no floor: docs/architecture.md and FLOORS"
    for path in files_of(part):
        relative = {name for name in imported(path) if name.startswith(".")}
        assert not relative, f"{path}: imports {', '.join(relative)}"
        used = {n.split(".")[1] for n in imported(path) if n.startswith("jaxinf.")}
        for other in used & {*PLACE_OF} - {part}:
            assert PLACE_OF[other] < PLACE_OF[part], f"{path}: {part} imports {other}"


APPLICATIONS = {"cli", "train"}
"""Rooms without a face: the commands take the trainer apart."""


@functools.cache
def shown_by(room):
    """Returns the names that a room's face imports from its modules."""
    tree = ast.parse((ROOT / "jaxinf" / room / "__init__.py").read_bytes())
    imports = [node for node in tree.body if isinstance(node, ast.ImportFrom)]
    return {alias.asname or alias.name for node in imports for alias in node.names}


@pytest.mark.parametrize("part", PARTS)
def test_rooms_are_used_by_their_faces(part):
    for path in files_of(part):
        for node in ast.walk(ast.parse(path.read_bytes())):
            names = (getattr(node, "module", None) or "").split(".")
            if names[0] != "jaxinf" or len(names) < 2 or names[1] == part:
                continue
            room = ROOT / "jaxinf" / names[1]
            if names[1] in APPLICATIONS or not room.is_dir():
                continue
            assert len(names) == 2, f"{path}: imports {node.module}, below a face"
            hidden = {alias.name for alias in node.names} - shown_by(names[1])
            assert not hidden, f"{path}: {node.module} shows no {', '.join(hidden)}"


@pytest.mark.parametrize("room", ROOMS)
def test_rooms_of_streaming_import_downward(room):
    above = ROOMS[ROOMS.index(room) + 1 :]
    paths = sorted((ROOT / "jaxinf" / "streaming" / room).glob("*.py"))
    assert paths
    for path in paths:
        names = [n.split(".") for n in imported(path)]
        used = {n[2] for n in names if n[:2] == ["jaxinf", "streaming"] and n[2:]}
        assert not used & {*above}, f"{path}: imports {', '.join(used & {*above})}"
        assert used <= {*ROOMS}, f"{path}: imports what stands on the rooms"


@pytest.mark.parametrize("part", sorted(set(PARTS) - MAY_IMPORT_JAX))
def test_jax_stays_above(part):
    for path in files_of(part):
        used = {name.split(".")[0] for name in imported(path)} & JAX_USERS
        assert not used, f"{path}: imports {', '.join(used)}"


def test_models_know_nothing_of_jaxinf():
    definitions = [path for path in MODELS if path.stem != "weights"]
    assert definitions
    for path in definitions:
        used = {n for n in imported(path) if n.split(".")[0] == "jaxinf"}
        assert not used, f"{path}: imports {', '.join(used)}"


def test_every_package_is_installed():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    listed = project["tool"]["setuptools"]["packages"]
    found = {"jaxinf"} | {
        ".".join(p.parent.relative_to(ROOT).parts)
        for p in SOURCES
        if p.stem == "__init__"
    }
    found |= {
        ".".join(("jaxinf_models", *p.parent.relative_to(ROOT / "models").parts))
        for p in MODELS
        if p.stem == "__init__"
    }
    found.add("jaxinf_hls")  # headers of card kernels
    assert sorted(listed) == sorted(found)


FACES = sorted({part_of(p) or "" for p in SOURCES if p.stem == "__init__"})
"""Rooms of the package, and the package itself, by the names that they show."""


@pytest.mark.parametrize("part", FACES)
def test_faces_are_documented(part):
    module = importlib.import_module(f"jaxinf.{part}" if part else "jaxinf")
    assert module.__doc__
    for name in shown_by(part):
        shown = getattr(module, name)
        is_named = inspect.isfunction(shown) or inspect.isclass(shown)
        if not is_named or not shown.__module__.startswith("jaxinf."):
            continue  # a value, a type alias, or a name of another library
        assert shown.__doc__, name
        if inspect.isclass(shown):
            own = [f for f in vars(shown).items() if inspect.isfunction(f[1])]
            bare = [n for n, f in own if n[0] != "_" and not f.__doc__]
            assert not bare, f"{name}: {', '.join(bare)}"


def test_the_architecture_has_every_module():
    text = (ROOT / "docs" / "architecture.md").read_text()
    rows = re.findall(r"(?m)^\| (\d) \| ([^|]*) \|", text)
    floors = {int(number): re.findall(r"`(\w+)`", names) for number, names in rows}
    assert [floors[n] for n in sorted(floors)] == FLOORS
    assert "{modules} jaxinf\n" in text  # on the site: each, by its docstring
    silent = [p for p in SOURCES if not ast.get_docstring(ast.parse(p.read_text()))]
    assert not silent
