"""Looks in the sources of card kernels for code that synthesis forbids.

    python lint/forbidden.py KERNEL …

Run in ``hls/``. Prints each finding as file:line; status 1 if there is any.
"""

import re
import sys
from collections.abc import Iterator
from pathlib import Path

FORBIDDEN = {
    r"\b(new|delete|malloc|free)\b": "dynamic memory",
    r"\b(throw|try|catch)\b": "exceptions",
    r"\b(virtual|dynamic_cast|typeid)\b": "types decided at run time",
    r"\bstd::(vector|string|function|map|unique_ptr|shared_ptr|thread|mutex)\b":
        "a container or a thread",
    r"\b(printf|fopen|std::cout)\b": "input and output",
    r"\b(setjmp|goto|asm)\b": "a jump or assembly",
    r"__builtin_(clzll|ctzll|popcountll)\b": "64-bit counts; split into 32 bits",
    r"\b(long double|__int128)\b": "types without operators",
    r"^\s*(const\s+)?[A-Z]\w*(<[^>]*>)?\s*[*&]\s*\w+;": "a pointer member",
    r"\bmemcpy\b": "memcpy, which hides a burst",
}  # fmt: skip
ON_THE_HOST = re.compile(r"#if(def JAXINF_CSIM| defined\(JAXINF_CPU_INSTRUCTIONS\)).*")


def main() -> int:
    """Returns the exit status."""
    headers = sorted(Path("include").glob("*.hpp"))
    sources = [Path("generated") / f"{name}.cpp" for name in sys.argv[1:]]
    findings = [f for path in [*headers, *sources] for f in found_in(path)]
    findings += [f for path in sources for f in ports_in(path)]
    print("\n".join(findings) or f"lint: {len(headers) + len(sources)} files are clean")
    return bool(findings)


def found_in(path: Path) -> Iterator[str]:
    """Yields lines that synthesis would refuse, except those for csim alone."""
    for number, line in enumerate(synthesised(path.read_text()), 1):
        code = line.partition("//")[0]
        for pattern, what in FORBIDDEN.items():
            if re.search(pattern, code) and not code.startswith("#pragma"):
                yield f"{path}:{number}: {what}: {line.strip()}"


def synthesised(text: str) -> Iterator[str]:
    """Yields the lines of a source; those that only csim compiles are empty."""
    depth = 0  # nesting depth in conditions for the host
    for line in text.splitlines():
        if depth and line.startswith("#if"):
            depth += 1
        elif ON_THE_HOST.fullmatch(line):
            depth = 1
        elif depth == 1 and line.startswith("#else"):
            depth = 0
        elif depth and line.startswith("#endif"):
            depth -= 1
        yield "" if depth else line


def ports_in(path: Path) -> Iterator[str]:
    """A bundle has one pointer that is read and one that is written, with a depth."""
    ways: dict[str, list[str]] = {}
    for line in path.read_text().splitlines():
        if "m_axi" not in line:
            continue
        bundle = re.search(r"bundle=(\w+)", line)
        if bundle is None or "depth=" not in line:
            yield f"{path}: a port without bundle= or depth=: {line}"
            continue
        way = "write" if "num_write_outstanding" in line else "read"
        ways.setdefault(bundle[1], []).append(way)
    for bundle, found in ways.items():
        if len(found) != len(set(found)):
            yield f"{path}: bundle {bundle} has two processes that {found[0]}"


if __name__ == "__main__":
    sys.exit(main())
