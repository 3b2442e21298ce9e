"""Kinds of JSON values. A schema is a kind that consists of others.

Invariant: `check` returns, or raises `SchemaError` with the place in the document. It
raises nothing else for any value, and takes time linear in the value's size.
"""

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, final

_SHOWN_CHARS = 60


class SchemaError(ValueError):
    """A document does not fit its schema."""


class Kind(ABC):
    """A set of JSON values."""

    @abstractmethod
    def check(self, value: Any, where: str = "") -> None:
        """Refuses a value of another kind.

        Args:
          value: a result of `parse_json`.
          where: its place in the document, such as ``leaves[3].shape``.

        Raises:
          SchemaError: names the place, the expected kind and the found value.
        """


@final
@dataclass(frozen=True)
class Text(Kind):
    """A string that UTF-8 can encode.

    Attributes:
      pattern: a pattern that the whole string must match; anything by default.
      what: the meaning of the string, for the error.
      most_bytes: limit of its bytes in UTF-8.
    """

    pattern: str = ""
    what: str = "a text"
    most_bytes: int = 1 << 26

    @cached_property
    def _matcher(self) -> re.Pattern[str]:
        return re.compile(self.pattern, re.DOTALL)

    def check(self, value: Any, where: str = "") -> None:
        """See `Kind.check`."""
        if type(value) is not str:
            raise _other(where, self.what, value)
        try:
            num_bytes = len(value.encode())
        except UnicodeEncodeError:
            raise _other(where, f"{self.what} in Unicode", value) from None
        if num_bytes > self.most_bytes:
            wanted = f"{self.what} of at most {self.most_bytes} bytes"
            raise _other(where, wanted, value)
        if self.pattern and not self._matcher.fullmatch(value):
            raise _other(where, self.what, value)


@final
@dataclass(frozen=True)
class Whole(Kind):
    """A whole number within bounds; booleans and floats are refused."""

    least: int = 0
    most: int = (1 << 62) - 1

    def check(self, value: Any, where: str = "") -> None:
        """See `Kind.check`."""
        if type(value) is not int or not self.least <= value <= self.most:
            wanted = f"a whole number from {self.least} to {self.most}"
            raise _other(where, wanted, value)


@final
@dataclass(frozen=True)
class Number(Kind):
    """A finite number within bounds, which no boolean is."""

    least: float = 0
    most: float = 2**62

    def check(self, value: Any, where: str = "") -> None:
        """See `Kind.check`."""
        is_number = type(value) in (int, float)
        if not is_number or not self.least <= value <= self.most:
            wanted = f"a number from {self.least} to {self.most}"
            raise _other(where, wanted, value)


@final
@dataclass(frozen=True)
class Flag(Kind):
    """True or false."""

    def check(self, value: Any, where: str = "") -> None:
        """See `Kind.check`."""
        if type(value) is not bool:
            raise _other(where, "true or false", value)


@final
@dataclass(frozen=True)
class Const(Kind):
    """A single value of a simple type."""

    value: str | int | bool | None

    def check(self, value: Any, where: str = "") -> None:
        """See `Kind.check`."""
        if type(value) is not type(self.value) or value != self.value:
            raise _other(where, repr(self.value), value)


@final
@dataclass(frozen=True)
class OneOf(Kind):
    """One of several texts."""

    texts: Sequence[str]

    def check(self, value: Any, where: str = "") -> None:
        """See `Kind.check`."""
        if type(value) is not str or value not in self.texts:
            raise _other(where, f"one of {', '.join(map(repr, self.texts))}", value)


@final
@dataclass(frozen=True)
class Listed(Kind):
    """A list of items of one kind."""

    item: Kind
    least: int = 0
    most: int = 1 << 26

    def check(self, value: Any, where: str = "") -> None:
        """See `Kind.check`."""
        if type(value) is not list:
            raise _other(where, "a list", value)
        if not self.least <= len(value) <= self.most:
            wanted = f"a list of {self.least} to {self.most} items"
            raise _other(where, wanted, value)
        for number, item in enumerate(value):
            self.item.check(item, f"{where}[{number}]")


@final
@dataclass(frozen=True)
class Row(Kind):
    """A list with a kind for each place.

    Attributes:
      items: the kinds.
      num_needed: number of items that are required; by default all.
    """

    items: Sequence[Kind]
    num_needed: int | None = None

    def check(self, value: Any, where: str = "") -> None:
        """See `Kind.check`."""
        needed = len(self.items) if self.num_needed is None else self.num_needed
        if type(value) is not list or not needed <= len(value) <= len(self.items):
            wanted = f"a list of {needed} to {len(self.items)} items"
            raise _other(where, wanted, value)
        for number, (item, kind) in enumerate(zip(value, self.items, strict=False)):
            kind.check(item, f"{where}[{number}]")


@final
@dataclass(frozen=True)
class Mapped(Kind):
    """An object with keys of one kind, and values of one kind."""

    value: Kind
    key: Kind = field(default_factory=Text)

    def check(self, value: Any, where: str = "") -> None:
        """See `Kind.check`."""
        if type(value) is not dict:
            raise _other(where, "an object", value)
        for key, item in value.items():
            self.key.check(key, f"{where}: a key")
            self.value.check(item, f"{where}[{shown(key)}]")


@final
@dataclass(frozen=True)
class Record(Kind):
    """An object with known keys.

    Attributes:
      needed: required keys.
      optional: optional keys.
      others: kind of the values of other keys; by default there may be none.
    """

    needed: Mapping[str, Kind]
    optional: Mapping[str, Kind] = field(default_factory=dict)
    others: Kind | None = None

    def check(self, value: Any, where: str = "") -> None:
        """See `Kind.check`."""
        if type(value) is not dict:
            raise _other(where, "an object", value)
        missing = [key for key in self.needed if key not in value]
        if missing:
            raise SchemaError(
                f"{where or 'the document'}: expected the key {missing[0]!r}, found "
                "none"
            )
        for key, item in value.items():
            kind = self.needed.get(key) or self.optional.get(key, self.others)
            if kind is None:
                raise SchemaError(
                    f"{where or 'the document'}: expected no key {shown(key)}"
                )
            name = key if key.isidentifier() else f"[{shown(key)}]"
            kind.check(item, f"{where}.{name}" if where else name)


@final
@dataclass(frozen=True)
class Either(Kind):
    """A value of the first kind or of the second."""

    first: Kind
    second: Kind

    def check(self, value: Any, where: str = "") -> None:
        """See `Kind.check`."""
        try:
            self.first.check(value, where)
        except SchemaError:
            self.second.check(value, where)


@final
@dataclass(frozen=True)
class Json(Kind):
    """Any JSON value with finite numbers and Unicode text, not nested too deep."""

    most_nesting: int = 64

    def check(self, value: Any, where: str = "") -> None:
        """See `Kind.check`."""
        level, depth = [value], 0
        while level:
            if depth > self.most_nesting:
                raise SchemaError(
                    f"{where}: expected nesting of at most {self.most_nesting}, found "
                    "more"
                )
            below: list[Any] = []
            for item in level:
                if type(item) is dict:
                    for key in item:
                        _check_simple(key, where)
                    below += item.values()
                elif type(item) is list:
                    below += item
                else:
                    _check_simple(item, where)
            level, depth = below, depth + 1


ANYTHING = Json()
"""Values that jaxinf does not interpret."""

_TEXT = Text()


def _check_simple(value: Any, where: str) -> None:
    if type(value) is str:
        _TEXT.check(value, where)
    elif type(value) is float and not math.isfinite(value):
        raise _other(where, "a finite number", value)
    elif value is not None and type(value) not in (bool, int, float):
        raise _other(where, "a JSON value", value)


def _other(where: str, wanted: str, value: Any) -> SchemaError:
    return SchemaError(
        f"{where or 'the document'}: expected {wanted}, found {shown(value)}"
    )


def shown(value: Any) -> str:
    """Shortens a value of any size for a message."""
    if isinstance(value, dict | list):
        kind = "an object" if isinstance(value, dict) else "a list"
        return f"{kind} of {len(value)}"
    if isinstance(value, str) and len(value) > _SHOWN_CHARS:
        return ascii(value[:_SHOWN_CHARS]) + "…"
    if isinstance(value, int) and value.bit_length() > 200:
        return f"a number of {value.bit_length()} bits"
    return ascii(value) if isinstance(value, str) else repr(value)[:_SHOWN_CHARS]
