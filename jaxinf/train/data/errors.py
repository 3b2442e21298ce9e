"""Errors of data, and optional packages for some kinds of data."""

import contextlib
import importlib
from collections.abc import Collection, Iterator
from typing import Any

from jaxinf.errors import JaxinfError

# Names that a message shows, and characters of each.
_MOST_NAMES, _MOST_CHARS = 20, 60


class DataError(JaxinfError):
    """Unsuitable data: the message gives place, expectation and remedy."""


@contextlib.contextmanager
def refusing(what: str, remedy: str = "") -> Iterator[None]:
    """Makes every failure of a package that parses a stranger's data a `DataError`.

    Packages document few of the exceptions that damaged data leads to, and a panic of
    Rust is no `Exception`.

    Args:
      what: place and expectation, the beginning of the error.
    """
    try:
        yield
    except (JaxinfError, GeneratorExit, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        why = f"{what}: {type(error).__name__}: {error}"
        raise DataError(f"{why}; {remedy}" if remedy else why) from error


def shown_names(names: Collection[str]) -> str:
    """Returns names in order for a message, which few and short ones fill."""
    first = [ascii(name[:_MOST_CHARS]) for name in sorted(names)[:_MOST_NAMES]]
    return ", ".join(first) + (", …" if len(first) < len(names) else "")


def optional_import(module: str, *, what: str, extra: str = "data") -> Any:
    """Imports a module of an extra.

    Args:
      what: the feature that needs it, for the beginning of the error.

    Raises:
      DataError: it is not installed; gives the command that installs it.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise DataError(
            f"{what}: needs {package}, which is not installed ({error}); install it "
            f"in a checkout of jaxinf, with: pip install '.[{extra}]'"
        ) from error
