"""Errors of data, and optional packages for some kinds of data."""

import importlib
from typing import Any

__all__ = ["DataError", "optional_import"]


class DataError(Exception):
    """Unsuitable data: the message gives place, expectation and remedy."""


def optional_import(module: str, *, what: str, extra: str = "data") -> Any:
    """Imports a module of an extra.

    Args:
      module: its dotted name.
      what: the feature that needs it, for the beginning of the error.
      extra: the extra of jaxinf that installs it.

    Raises:
      DataError: it is not installed; gives the command that installs it.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise DataError(
            f"{what}: needs {package}, which is not installed ({error}); install it "
            f"with: pip install 'jaxinf[{extra}]' (in a checkout: "
            f"pip install '.[{extra}]')"
        ) from error
