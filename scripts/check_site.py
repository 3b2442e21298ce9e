"""Looks at the built documentation as a reader does: its links, and in a browser.

    python scripts/check_site.py build/docs
    python scripts/check_site.py build/docs --pictures /tmp/pictures

Every link within the site leads to a page and a heading, and links lead from the first
page to every other one. In a browser without a window every page is opened on a narrow
screen, and some on a wide one, too: no error, no missing picture, nothing wider than
the screen. Without a browser on the machine that part is skipped, which one line says.
"""

import argparse
import functools
import http.server
import os
import shutil
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

PHONE, WIDE = (390, 844), (1280, 800)
WIDE_PAGES = (
    "index.html",
    "start/install.html",
    "guides/one-line.html",
    "architecture.html",
    "reference/api.html",
)
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")

TOO_WIDE = """() => {
  const page = document.documentElement;
  if (page.scrollWidth <= page.clientWidth) return null;
  const found = [...document.querySelectorAll("article *")].find(
    one => one.getBoundingClientRect().right > page.clientWidth + 1);
  return `${page.scrollWidth} px: ${found ? found.outerHTML.slice(0, 120) : "?"}`;
}"""
MISSING = """() => [...document.images]
  .filter(one => one.offsetParent !== null && !one.naturalWidth).map(one => one.src)"""


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


@contextmanager
def served(site: Path) -> Iterator[str]:
    """Serves the site on this machine; yields its address."""

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, format: str, *args: object) -> None:
            pass

    handler = functools.partial(Quiet, directory=str(site))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


@dataclass
class Reader:
    """Opens pages in a browser, and collects what is wrong with them."""

    site: Path
    address: str
    browser: object
    pictures: Path | None
    problems: list[str] = field(default_factory=list)

    def look(self, names: list[str], size: tuple[int, int], scheme: str) -> None:
        """Opens pages on a screen of this size, in a light or a dark scheme."""
        width, height = size
        context = self.browser.new_context(  # pyright: ignore[reportAttributeAccessIssue]
            viewport={"width": width, "height": height}, color_scheme=scheme
        )
        page = context.new_page()
        said: list[str] = []
        page.on("console", lambda m: m.type == "error" and said.append(m.text))
        page.on("pageerror", lambda error: said.append(str(error)))
        for name in names:
            said.clear()
            page.goto(f"{self.address}/{name}", wait_until="load")
            said += [f"no picture {source}" for source in page.evaluate(MISSING)]
            if too_wide := page.evaluate(TOO_WIDE):
                said.append(too_wide)
            self.problems += [f"{name} at {width} px: {text}" for text in said]
            if self.pictures:
                shown = f"{name.replace('/', '-')[:-5]}-{width}-{scheme}.png"
                page.screenshot(path=str(self.pictures / shown))
        context.close()


def problems_in_a_browser(
    site: Path, program: str, pictures: Path | None
) -> tuple[int, list[str]]:
    """Returns how many pages were opened, and what was wrong with them."""
    from playwright.sync_api import (  # pyright: ignore[reportMissingImports]
        sync_playwright,
    )

    names = [str(page.relative_to(site)) for page in pages_of(site)]
    options = ["--disable-gpu", "--disable-background-networking", "--no-first-run"]
    if os.geteuid() == 0:
        options.append("--no-sandbox")  # which root cannot have
    with served(site) as address, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=options)
        reader = Reader(site, address, browser, pictures)
        reader.look(names, PHONE, "light")
        for scheme in ("light", "dark"):
            reader.look(list(WIDE_PAGES), WIDE, scheme)
        browser.close()
    return len(names), reader.problems


def main() -> int:
    """Prints what is wrong; returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("site", type=Path, help="directory of the built site")
    parser.add_argument("--pictures", type=Path, help="directory for pictures of pages")
    given = parser.parse_args()
    site = given.site.resolve()
    problems = broken_links(site)
    print(f"links of {len(pages_of(site))} pages: {len(problems)} broken")
    program = next(filter(None, map(shutil.which, BROWSERS)), None)
    if program is None:
        print(f"browser: skipped, none of {', '.join(BROWSERS)} is installed")
    else:
        if given.pictures:
            given.pictures.mkdir(parents=True, exist_ok=True)
        num_pages, found = problems_in_a_browser(site, program, given.pictures)
        print(f"browser: {num_pages} pages opened, {len(found)} problems")
        problems += found
    print(*problems, sep="\n", end="\n" if problems else "")
    return bool(problems)


if __name__ == "__main__":
    sys.exit(main())
