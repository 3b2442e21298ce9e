"""Tests jaxinf with the newest or the oldest releases of its dependencies.

Installs into an environment of its own, runs the tests that touch JAX, optax, Flax,
Orbax and tensorstore most, and prints a table. ``newest`` goes past the upper bounds of
pyproject.toml, to pre-releases too, and only reports. ``oldest`` installs the lower
bounds, and fails if a test does. It uses only the standard library, so that any Python
runs it: ``try_versions.py newest|oldest ENVIRONMENT``.
"""

import re
import subprocess
import sys
import tomllib
import xml.etree.ElementTree
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
WATCHED = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "tensorstore")
GROUPS = {
    "contract": "tests/optimizer/test_optimizer_contract.py tests/csd/test_contract.py",
    "transform": "tests/optimizer/test_transform.py "
    "tests/optimizer/test_transform_refusals.py "
    "tests/optimizer/test_transform_sharded.py tests/test_compat.py",
    "streaming": "tests/streaming/test_streamed.py tests/streaming/test_running.py "
    "tests/streaming/test_saved_plans.py tests/streaming/test_refused.py",
    "programs": "tests/program tests/kernels/test_operations.py",
    "bits": "tests/kernels/test_bits.py",
    "trainer": "tests/train/test_run.py tests/distributed/test_training.py",
    "stock readers": "tests/store/test_stock_readers.py tests/exchange/test_urls.py",
}
PINNED = (*WATCHED, "grain", "numpy")
FIRST_WITH_PYTHON = {
    (3, 13): {"numpy": "2.1.0"},
    (3, 14): {"numpy": "2.3.2", "tensorstore": "0.1.79"},
}
"""The oldest releases with wheels for a Python, where these are above a lower bound."""

LIMIT_S = 1800


@dataclass(frozen=True)
class Outcome:
    """The result of a group of tests: counts, and the first line of each failure."""

    passed: int = 0
    failed: int = 0
    skipped: int = 0
    failures: tuple[str, ...] = ()


def main() -> None:
    which, environment = sys.argv[1], Path(sys.argv[2])
    python = environment / "bin" / "python"
    if not python.exists():
        run([sys.executable, "-m", "venv", str(environment)])
    if which == "oldest":
        raise SystemExit(try_oldest(python))
    tried: list[dict[str, str]] = []
    for kind in ("releases", "pre-releases"):
        failure = install(python, with_pre_releases=kind == "pre-releases")
        if failure:
            print(f"\n{kind}: cannot be installed\n{failure}")
            continue
        found = versions(python)
        if found in tried:
            print(f"\n{kind}: no newer versions than these")
            continue
        tried.append(found)
        report(kind, found, {name: run_group(python, name) for name in GROUPS})


def try_oldest(python: Path) -> str | None:
    """Returns why the oldest releases do not do, or None."""
    if failure := install(python, oldest=True):
        return f"the lower bounds of pyproject.toml cannot be installed:\n{failure}"
    outcomes = {name: run_group(python, name) for name in GROUPS if name != "bits"}
    report("oldest releases", versions(python), outcomes)
    num = sum(outcome.failed for outcome in outcomes.values())
    return f"{num} tests fail with the oldest releases" if num else None


def requirements(*, with_pre_releases: bool = False, oldest: bool = False) -> list[str]:
    """Returns requirements of the package and its tests, without upper bounds.

    With `oldest`, the lower bounds of the packages whose age matters.
    """
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    listed = [*project["dependencies"], *project["optional-dependencies"]["test"]]
    result = []
    for requirement in listed:
        bound = re.match(r"([\w.-]+)>=([\w.]+)", requirement)
        assert bound, f"pyproject.toml: expected NAME>=VERSION, found {requirement}"
        name, lower = bound.groups()
        if oldest:
            lower = FIRST_WITH_PYTHON.get(sys.version_info[:2], {}).get(name, lower)
            result.append(f"{name}{'==' if name in PINNED else '>='}{lower}")
            continue
        is_watched = with_pre_releases and name in WATCHED
        # With a pre-release as bound, pip accepts pre-releases of this package alone.
        result.append(f"{name}>={lower}{'.dev0' if is_watched else ''}")
    return result


def install(
    python: Path, *, with_pre_releases: bool = False, oldest: bool = False
) -> str:
    """Installs; returns the end of pip's output if that fails."""
    pip = [str(python), "-m", "pip", "install", "--quiet"]
    wanted = requirements(with_pre_releases=with_pre_releases, oldest=oldest)
    newest = [] if oldest else ["--upgrade", "--upgrade-strategy", "eager"]
    steps = (
        [*pip, *newest, *wanted],
        [*pip, "--no-deps", "--force-reinstall", str(ROOT)],
    )
    for command in steps:
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        if result.returncode:
            return result.stderr.strip()[-1000:]
    return ""


def versions(python: Path) -> dict[str, str]:
    """Returns the versions of the watched packages."""
    program = (
        "import sys; from importlib.metadata import version; "
        "print(*map(version, sys.argv[1:]))"
    )
    text = run([str(python), "-c", program, *WATCHED])
    return dict(zip(WATCHED, text.split(), strict=True))


def run_group(python: Path, name: str) -> Outcome:
    """Runs a group's tests, where a warning is no error."""
    results = python.parents[1] / f"{name.replace(' ', '-')}.xml"
    results.unlink(missing_ok=True)
    command = [str(python.with_name("pytest")), "-q", "-n", "auto", "-W", "default"]
    command += ["-m", "not long", f"--junitxml={results}", *GROUPS[name].split()]
    print(f"{name}: {' '.join(command)}", file=sys.stderr)
    try:
        subprocess.run(command, cwd=ROOT, timeout=LIMIT_S, capture_output=True)
    except subprocess.TimeoutExpired:
        return Outcome(failed=1, failures=(f"did not end within {LIMIT_S} s",))
    if not results.exists():
        return Outcome(failed=1, failures=("pytest could not run them",))
    return outcome(xml.etree.ElementTree.parse(results).getroot())


def outcome(root: xml.etree.ElementTree.Element) -> Outcome:
    """Reads pytest's report."""
    passed = skipped = 0
    failures = []
    for case in root.iter("testcase"):
        problem = next((c for c in case if c.tag in ("failure", "error")), None)
        if problem is not None:
            where = f"{case.get('classname')}.{case.get('name')}"
            first = (problem.get("message") or "").strip().splitlines()
            failures.append(f"{where}: {first[0][:200] if first else '?'}")
        elif case.find("skipped") is not None:
            skipped += 1
        else:
            passed += 1
    return Outcome(passed, len(failures), skipped, tuple(failures))


def report(kind: str, found: dict[str, str], outcomes: dict[str, Outcome]) -> None:
    """Prints the versions, a line a group, and the failures."""
    number = ".".join(map(str, sys.version_info[:3]))
    print(
        f"\n{kind}, Python {number}: " + ", ".join(f"{n} {v}" for n, v in found.items())
    )
    print(f"{'':14}{'passed':>8}{'failed':>8}{'skipped':>9}")
    for name, told in outcomes.items():
        print(f"{name:14}{told.passed:8}{told.failed:8}{told.skipped:9}")
    for name, told in outcomes.items():
        for failure in told.failures[:10]:
            print(f"{name}: {failure}")
        if len(told.failures) > 10:
            print(f"{name}: {len(told.failures) - 10} more")


def run(command: list[str]) -> str:
    """Runs a command that must succeed; returns its output."""
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


if __name__ == "__main__":
    main()
