"""Numbers of classes.

Invariant: a class has the same number in all parts of the data.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from jaxinf.documents import shown
from jaxinf.train.data.errors import DataError, shown_names

_MOST_LABELS = 1 << 31  # that an int32 can tell apart


def checked_label(label: Any, where: str) -> int | str:
    """Returns a label that is a number or a name.

    Raises:
      DataError: it is something else.
    """
    is_number = type(label) is int and 0 <= label < _MOST_LABELS
    if not is_number and not (isinstance(label, str) and label):
        raise DataError(
            f"{where}: expected an integer label from 0 to {_MOST_LABELS - 1}, or a "
            f"class's name, found {shown(label)}; number the classes from 0"
        )
    return label


def number_of_classes(labels: Sequence[int | str], where: str) -> dict[int | str, int]:
    """Returns the numbers of classes: their own, or of names their places in order.

    Raises:
      DataError: some labels are names, some are numbers.
    """
    names = sorted({label for label in labels if isinstance(label, str)})
    numbers = sorted({label for label in labels if isinstance(label, int)})
    if names and numbers:
        raise DataError(
            f"{where}: expected labels that are all names or all numbers, found "
            f"{shown_names(names)} and {numbers[0]}"
        )
    if all(name.isdecimal() and len(name) < 10 for name in names):  # as CSV has them
        return {label: int(label) for label in (*names, *numbers)}
    return {name: number for number, name in enumerate(names)}


def numbered(
    labels: Sequence[int | str], number_of: Mapping[int | str, int], where: str
) -> list[int]:
    """Returns the numbers of labels.

    Raises:
      DataError: a label is none of the training data.
    """
    if wrong := {str(label) for label in labels if label not in number_of}:
        known = shown_names({str(label) for label in number_of})
        raise DataError(
            f"{where}: expected the labels of --data, {known}, found "
            f"{shown_names(wrong)}, which it lacks; train on examples of them, too, or "
            "leave them out"
        )
    return [number_of[label] for label in labels]


def num_classes(labels: Sequence[int], num_labels: int | None, where: str) -> int:
    """Returns the number of classes: as given, or one more than the largest label.

    Raises:
      DataError: a label is negative or too large.
    """
    least, most = min(labels), max(labels)
    limit = num_labels if num_labels is not None else max(2, len(labels))
    if least < 0 or most >= limit:
        found = least if least < 0 else most
        given = f"{num_labels} classes" if num_labels else f"{len(labels)} examples"
        raise DataError(
            f"{where}: expected labels of 0 to {limit - 1} ({given}), found {found}; "
            "number the classes from 0"
        )
    return num_labels if num_labels is not None else max(2, most + 1)
