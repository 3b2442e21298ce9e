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
    version, cited = project["version"], (root / "CITATION.cff").read_text()
    changes = (root / "CHANGELOG.md").read_text()
    expected = {
        f"v{version}, the version of pyproject.toml": tag == f"v{version}",
        "[project.urls] in pyproject.toml": "urls" in project,
        f"'version: {version}' in CITATION.cff": re.search(
            rf"(?m)^version: {re.escape(version)}$", cited
        ),
        f"a section '## {version}' in CHANGELOG.md": re.search(
            rf"(?m)^## {re.escape(version)}\b", changes
        ),
    }
    for what, is_there in expected.items():
        if not is_there:
            return (
                f"tag {tag}: expected {what}; delete the tag (git push --delete origin "
                f"{tag}), mend that, and tag again"
            )
    return None


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("expected a release's tag: python scripts/check_tag.py v1.2.3")
    if found := problem(sys.argv[1]):
        sys.exit(found)
