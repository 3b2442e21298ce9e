"""What is wrong with data, and the packages that some kinds of data need."""

import importlib
from typing import Any

__all__ = ["DataError", "optional_import"]


class DataError(Exception):
    """Data that cannot be trained on: says where, what was expected, what to do."""


def optional_import(module: str, *, what: str, extra: str = "data") -> Any:
    """A module of an extra.

    Args:
      module: its dotted name.
      what: what needs it, to begin the error with.
      extra: of jaxinf, which installs it.

    Raises:
      DataError: it is not installed; names the line that installs it.
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
