"""Errors of data, whatever package has found them."""

import contextlib
from collections.abc import Collection, Iterator

from jaxinf.errors import JaxinfError

_MOST_NAMES, _MOST_CHARS = 20, 60


class DataError(JaxinfError):
    """Unsuitable data: the message gives place, expectation and remedy."""


@contextlib.contextmanager
def refusing(what: str, remedy: str = "") -> Iterator[None]:
    """Makes every failure of a package that parses a stranger's data a `DataError`.

    A package that is missing is one of the extra `data`.

    Args:
      what: place and expectation, the beginning of the error.
    """
    try:
        yield
    except (JaxinfError, GeneratorExit, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # a panic of Rust is no Exception
        if isinstance(error, ImportError):
            remedy = "install it in a checkout of jaxinf, with: pip install '.[data]'"
        why = f"{what}: {type(error).__name__}: {error}"
        raise DataError(f"{why}; {remedy}" if remedy else why) from error


def shown_names(names: Collection[str]) -> str:
    """Returns names in order for a message, which few and short ones fill."""
    first = [ascii(name[:_MOST_CHARS]) for name in sorted(names)[:_MOST_NAMES]]
    return ", ".join(first) + (", …" if len(first) < len(names) else "")
