"""Errors of data, whatever package has found them."""

import contextlib
from collections.abc import Collection, Iterator

from jaxinf.documents import first_few
from jaxinf.errors import JaxinfError


class DataError(JaxinfError):
    """Unsuitable data: the message gives place, expectation and remedy."""


@contextlib.contextmanager
def as_data_error(what: str, remedy: str = "") -> Iterator[None]:
    """Turns failures of a package that parses a stranger's data into `DataError`.

    Args:
      what: Place and expectation, the beginning of the error.
    """
    try:
        yield
    except (JaxinfError, GeneratorExit, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # a panic of Rust is no Exception
        if isinstance(error, ImportError):  # of a package of the extra `data`
            remedy = "install it in a checkout of jaxinf, with: pip install '.[data]'"
        why = f"{what}: {type(error).__name__}: {error}"
        raise DataError(f"{why}; {remedy}" if remedy else why) from error


def list_names(names: Collection[str]) -> str:
    """Lists a stranger's names for a message, in order, few and short ones."""
    return first_few([ascii(name[:60]) for name in sorted(names)], most=20)
