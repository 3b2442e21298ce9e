"""Every exception that jaxinf raises on purpose, in one tree; their text.

Invariant: a message gives the place, the expectation, the finding and the remedy. Bad
arguments raise ``ValueError`` or ``TypeError`` as usual in Python; errors of a store, a
drive or an optimizer are `JaxinfError`.
"""

from collections.abc import Mapping


def printable(text: str, *, keep: str = "") -> str:
    """Escapes the control characters of a text from an untrusted source."""
    return "".join(
        c if c.isprintable() or c in keep else c.encode("unicode_escape").decode()
        for c in text
    )


class JaxinfError(Exception):
    """Root of the tree. Its text has no control characters."""

    def __str__(self) -> str:
        return printable(super().__str__(), keep="\n")


class StoreError(JaxinfError):
    """A store on disk is faulty, or is used wrongly."""


class StoreLockedError(StoreError):
    """Another live process (or this one) already writes to the store."""


class ProcessError(StoreError):
    """Another process of the run failed, is missing, or does something else."""


class StoreFormatError(StoreError):
    """A store's own files are corrupt, incomplete, or of a format not known here."""


class StoreMismatchError(StoreError):
    """The store holds another optimizer, tree, shape, dtype or other params."""


class StoreSpaceError(StoreError):
    """A file system has too little room for a request; nothing was written."""


class StoreIOError(StoreError):
    """The operating system failed a read or a write of the store's data."""


class StoreCorruptError(StoreError):
    """A chunk's checksum differs from the committed one."""


class StoreClosedError(StoreError):
    """The store was closed, or closed itself after a failure."""


class StaleStateError(StoreError):
    """The transform's state and the store are at different steps."""


class CsdError(JaxinfError):
    """A CSD is missing or not set up, or does not support a store's request."""


class ExchangeError(JaxinfError):
    """Another tool's checkpoint cannot be read, or does not fit the store."""


class DivergedParamsError(StoreError):
    """The params on the JAX device do not agree with the store's master params."""


class NonFiniteGradientError(JaxinfError):
    """A gradient holds NaN or Inf; the step was refused and nothing was committed."""


class NonFiniteScalarError(JaxinfError):
    """A scalar that an update computes with is NaN; the step was refused."""


class DeviceConfigurationError(JaxinfError):
    """The JAX devices of this process are set up in a way known to deadlock."""


class StreamError(JaxinfError):
    """A loss function, its params or its batch cannot be streamed."""


class BudgetError(StreamError):
    """A program cannot be planned in the memory that it is given.

    Args:
      limit: The argument that is too small.
      problem: What was expected and found.
      missing_bytes: The bytes that it lacks at least; 0 if that is not known.
      otherwise: Another remedy.
      works: Sizes by argument, such as ``"288MiB"``, with which a plan fits.
    """

    def __init__(
        self,
        limit: str,
        problem: str,
        missing_bytes: int = 0,
        otherwise: str = "",
        works: Mapping[str, str] | None = None,
    ) -> None:
        self.limit = limit
        self.problem = problem
        self.missing_bytes = missing_bytes
        self.otherwise = otherwise
        self.works = works or {}
        by = f" by at least {-(-missing_bytes >> 20)} MiB" if missing_bytes > 0 else ""
        advice = f"raise {limit}{by}"
        if works:
            found = " with ".join(f'{name}="{size}"' for name, size in works.items())
            advice = f"{found} works"
        super().__init__(f"{limit}: {problem}; {advice}{otherwise}")


class UnsupportedTransformError(JaxinfError):
    """An optax transformation cannot be updated near storage."""
