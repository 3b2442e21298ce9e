"""Compares a release's tag with pyproject.toml, CITATION.cff and CHANGELOG.md.

    python scripts/check_tag.py v1.2.3

The exit status is 1 if they differ. It uses only the standard library.
"""

import re
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]


def problem(tag: str, root: Path = ROOT) -> str | None:
    """Returns what is wrong with a release's tag and the remedy, or None."""
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    version = project["version"]
    if tag != f"v{version}":
        return (
            f"tag {tag}: expected v{version}, the version of pyproject.toml; delete "
            f"the tag (git push --delete origin {tag}), set the version, and tag again"
        )
    if "urls" not in project:
        return (
            f"tag {tag}: expected [project.urls] in pyproject.toml, with the addresses "
            "of the repository and the site; delete the tag, add them, and tag again"
        )
    cited = re.search(r"(?m)^version: (.*)$", (root / "CITATION.cff").read_text())
    if cited is None or cited[1] != version:
        return (
            f"tag {tag}: expected 'version: {version}' in CITATION.cff; delete the "
            "tag, set the version, and tag again"
        )
    changes = (root / "CHANGELOG.md").read_text()
    if not re.search(rf"(?m)^## {re.escape(version)}\b", changes):
        return (
            f"tag {tag}: expected a section '## {version}' in CHANGELOG.md; delete the "
            "tag, rename 'Unreleased', and tag again"
        )
    return None


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("expected a release's tag: python scripts/check_tag.py v1.2.3")
    if found := problem(sys.argv[1]):
        sys.exit(found)
