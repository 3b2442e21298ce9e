"""Looks at the links of the built documentation.

    python scripts/check_site.py build/docs

Every link within the site leads to a page and a heading, and links lead from the first
page to every other one.
"""

import os
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit


class Page(HTMLParser):
    """A page's links, and the names that links can lead to."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.links: set[str] = set()
        self.names = {""}
        self.feed(path.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Notes what the tag leads to, or what leads to it."""
        given = dict(attrs)
        self.names.add(given.get("id") or "")
        place = given.get({"a": "href", "img": "src", "form": "action"}.get(tag, ""))
        if place:
            self.links.add(place)


def broken_links(site: Path) -> list[str]:
    """Returns links that lead nowhere, and pages that no link leads to."""
    pages = {path: Page(path) for path in pages_of(site)}
    found, reached, coming = [], set(), [site / "index.html"]
    while coming:
        page = coming.pop()
        if page in reached:
            continue
        reached.add(page)
        for link in sorted(pages[page].links):
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            path = Path(os.path.normpath(page.parent / unquote(parts.path)))
            path = page if not parts.path else path
            if path in pages:
                coming.append(path)
                if unquote(parts.fragment) not in pages[path].names:
                    found.append(f"{page.relative_to(site)}: no place {link}")
            elif not path.is_file():
                found.append(f"{page.relative_to(site)}: no page {link}")
    unreached = sorted(str(p.relative_to(site)) for p in pages.keys() - reached)
    return found + [f"{page}: no link leads to it" for page in unreached]


def pages_of(site: Path) -> list[Path]:
    """Returns the pages that a reader sees, in order."""
    return sorted(p for p in site.rglob("*.html") if "_static" not in p.parts)


def main() -> int:
    """Prints what is wrong; returns the exit status."""
    site = Path(sys.argv[1]).resolve()
    problems = broken_links(site)
    print(f"links of {len(pages_of(site))} pages: {len(problems)} broken")
    print(*problems, sep="\n", end="\n" if problems else "")
    return bool(problems)


if __name__ == "__main__":
    sys.exit(main())
