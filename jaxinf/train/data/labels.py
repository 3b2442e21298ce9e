"""Numbers of classes.

Invariant: a class has the same number in all parts of the data.
"""

from collections.abc import Sequence

from jaxinf.train.data.errors import DataError, shown_names


def class_names(labels: Sequence[int | str], where: str) -> list[str] | None:
    """Returns the names of classes, sorted: a class's place is its number.

    Returns:
      None if labels are numbers, or all texts are decimal digits.

    Raises:
      DataError: some labels are names, some are numbers.
    """
    names = {label for label in labels if isinstance(label, str)}
    numbers = [label for label in labels if isinstance(label, int)]
    if not names or (not numbers and all(map(_is_number, names))):
        return None
    if numbers:
        raise DataError(
            f"{where}: expected labels that are all names or all numbers, found "
            f"{shown_names(names)} and {numbers[0]}"
        )
    return sorted(names)


def numbered(
    labels: Sequence[int | str], names: Sequence[str] | None, where: str
) -> list[int]:
    """Returns the numbers of labels.

    Raises:
      DataError: a label is no name of a class.
    """
    if names is None:
        wrong = {x for x in labels if isinstance(x, str) and not _is_number(x)}
        number_of: dict[int | str, int] = {x: int(x) for x in {*labels} - wrong}
    else:
        number_of = {name: number for number, name in enumerate(names)}
        wrong = {str(label) for label in labels if label not in number_of}
    if wrong:
        known = "numbers" if names is None else shown_names(names)
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


def _is_number(label: str) -> bool:
    return label.isdecimal() and len(label) < 10
