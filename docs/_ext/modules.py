"""The directive `modules`: every module of a package, with the first line of each.

``{modules} jaxinf`` makes a list for each package below, from the docstrings.
"""

import ast
import importlib.util
from pathlib import Path

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective


def modules_of(root: Path, name: str) -> dict[str, dict[str, str]]:
    """Returns by package the modules and the first sentence of each docstring.

    Args:
      root: the directory of the package.
      name: its name.

    Raises:
      ValueError: a module says nothing of itself.
    """
    found: dict[str, dict[str, str]] = {}
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        package = ".".join((name, *parts[:-1]))
        text = ast.get_docstring(ast.parse(path.read_text())) or ""
        first = " ".join(text.split("\n\n")[0].split())
        if not first:
            raise ValueError(f"{path}: expected a docstring with the module's purpose")
        found.setdefault(package, {})[parts[-1]] = first
    return found


class Modules(SphinxDirective):
    """Lists of a package's modules."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        """Returns a title and a list for each package."""
        name = self.arguments[0]
        spec = importlib.util.find_spec(name)
        assert spec
        assert spec.origin
        made: list[nodes.Node] = []
        for package, modules in modules_of(Path(spec.origin).parent, name).items():
            purpose = modules.pop("__init__", "")
            made.append(
                nodes.paragraph(
                    "", "", nodes.strong(text=package), nodes.Text(f": {purpose}")
                )
            )
            listed = nodes.bullet_list()
            for module, text in modules.items():
                line = nodes.paragraph("", "", nodes.literal(text=module))
                line += nodes.Text(f": {text}")
                listed += nodes.list_item("", line)
            if modules:
                made.append(listed)
        return made


def setup(app: Sphinx) -> dict[str, bool]:
    """Adds the directive."""
    app.add_directive("modules", Modules)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
