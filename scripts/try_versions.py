"""Tests jaxinf with the newest or the oldest releases of its dependencies.

Installs into an environment of its own, and runs the tests that touch JAX, optax, Flax,
Orbax and tensorstore most. ``newest`` goes past the upper bounds of pyproject.toml, and
only reports. ``oldest`` installs the lower bounds, and fails if a test does. It uses
only the standard library, so that any Python runs it:
``try_versions.py newest|oldest ENVIRONMENT``.
"""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
PINNED = "jax jaxlib flax optax orbax-checkpoint tensorstore grain numpy".split()
TESTS = """
    tests/optimizer/test_optimizer_contract.py tests/csd/test_contract.py
    tests/optimizer/test_transform.py tests/optimizer/test_transform_refusals.py
    tests/optimizer/test_transform_sharded.py tests/test_compat.py
    tests/streaming/test_streamed.py tests/streaming/test_plan.py
    tests/streaming/test_saved_plans.py tests/streaming/test_refused.py tests/program
    tests/kernels/test_operations.py tests/train/test_run.py
    tests/distributed/test_bits.py tests/store/test_stock_readers.py
    tests/exchange/test_urls.py
""".split()
BITS = "tests/kernels/test_bits.py"  # which older releases need not have
FIRST_WITH_PYTHON = {
    (3, 13): {"numpy": "2.1.0"},
    (3, 14): {"numpy": "2.3.2", "tensorstore": "0.1.79"},
}
"""The oldest releases with wheels for a Python, where these are above a lower bound."""


def main() -> None:
    which, environment = sys.argv[1], Path(sys.argv[2])
    if not (environment / "bin/python").exists():
        subprocess.run([sys.executable, "-m", "venv", environment], check=True)
    if which == "oldest":
        raise SystemExit(tried(environment, "the lower bounds", requirements(which)))
    status = tried(environment, which, requirements(which), BITS)
    print(f"{which}: {'failures, see above' if status else 'all tests pass'}")


def requirements(which: str) -> list[str]:
    """Returns requirements of the package and its tests, without upper bounds."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    listed = [*project["dependencies"], *project["optional-dependencies"]["test"]]
    result = []
    for requirement in listed:
        bound = re.match(r"([\w.-]+)>=([\w.]+)", requirement)
        assert bound, f"pyproject.toml: expected NAME>=VERSION, found {requirement}"
        name, lower = bound.groups()
        if which == "oldest":
            lower = FIRST_WITH_PYTHON.get(sys.version_info[:2], {}).get(name, lower)
        is_pinned = which == "oldest" and name in PINNED
        result.append(f"{name}{'==' if is_pinned else '>='}{lower}")
    return result


def tried(environment: Path, kind: str, wanted: list[str], *more: str) -> int:
    """Installs and tests; returns 0 if all tests pass."""
    pip = [environment / "bin/python", "-m", "pip", "install", "--quiet"]
    newest = "" if kind == "the lower bounds" else "--upgrade --upgrade-strategy eager"
    own = ["--no-deps", "--force-reinstall", ROOT]
    for command in ([*pip, *newest.split(), *wanted], [*pip, *own]):
        if subprocess.run(command).returncode:
            print(f"{kind}: cannot be installed")
            return 1
    subprocess.run([*pip[:3], "list"], check=False)
    pytest = [environment / "bin/pytest", "-q", "-n", "auto", "-W", "default"]
    tests = [*pytest, "-m", "not long", *TESTS, *more]  # where a warning is no error
    return subprocess.run(tests, cwd=ROOT).returncode


if __name__ == "__main__":
    main()
