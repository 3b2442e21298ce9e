"""Loads labelled images, holds a part out, and counts the classes.

Invariant: the parts have the same classes, and every label is one of them.
"""

from collections.abc import Sequence
from pathlib import Path

from jaxinf.train.data.errors import DataError
from jaxinf.train.data.files import is_saved_dataset
from jaxinf.train.data.images import (
    Images,
    ImageShape,
    Picture,
    array_images,
    folder_images,
    order_by_content,
    record_images,
)
from jaxinf.train.data.options import DataOptions
from jaxinf.train.data.parts import TrainingData, digest_of
from jaxinf.train.data.records import read_records
from jaxinf.train.data.splits import by_split, held_out_split


def load_images(options: DataOptions, shape: ImageShape) -> TrainingData:
    """Returns the images for training and those for validation.

    Raises:
      DataError: there are no images, or labels are out of range.
    """
    train, held, num_labels = _parts(options, shape)
    return TrainingData(
        train=train,
        validation=held,
        row_map=None,
        tokenizer=None,
        num_labels=num_labels,
        description=f"{len(train):,} images of {num_labels} classes to train on, "
        f"{len(held):,} to validate",
        identity={
            "rows": [len(train), len(held)],
            "sha256": digest_of((train.fingerprint(), held.fingerprint())),
        },
        notes=(),
        held_out_tokens=None,
    )


def _parts(options: DataOptions, shape: ImageShape) -> tuple[Images, Images, int]:
    if not options.data:
        raise DataError(
            "--data: expected images (a folder for each class, or an .npz with images "
            "and labels): this model takes no text"
        )
    roots, held_roots = by_split(_paths(options.data))
    if options.validation:
        held_roots = held_out_split(_paths(options.validation))
    train, held, names = [], [], None
    for root in roots:
        names = _add(root, train, names)
    for root in held_roots:
        names = _add(root, held, names)
    if not train and held:
        raise DataError(f"{options.data[0]}: expected images to train on, found none")
    if not held:
        train, held = _hold_out(train, options.validation_fraction)
    labels = [picture.label for picture in (*train, *held)]
    least = len(names) if names else None
    num_labels = labels_of(labels, options.num_labels or least, options.data[0])
    return (
        Images(order_by_content(train), shape),
        Images(order_by_content(held), shape),
        num_labels,
    )


def _paths(names: Sequence[str]) -> list[Path]:
    paths = [Path(name).expanduser() for name in names]
    for path in paths:
        if not path.exists():
            raise DataError(f"data {str(path)!r}: expected images, found no such file")
    return paths


def labels_of(labels: Sequence[int], num_labels: int | None, where: str) -> int:
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


def _add(
    path: Path, pictures: list[Picture], names: list[str] | None
) -> list[str] | None:
    """Adds the images of a place; returns the names of their classes, if any."""
    if path.suffix == ".npz" or (path / "images.npy").is_file():
        pictures += array_images(path)
    elif path.is_dir() and not is_saved_dataset(path):
        found, own = folder_images(path)
        if names is not None and names != own:
            raise DataError(
                f"{path}: expected folders of the classes {_listed(names)}, found "
                f"{_listed(own)}"
            )
        pictures += found
        return own
    elif is_saved_dataset(path) or path.suffix == ".parquet":
        pictures += record_images(read_records(path, ("image", "label")))
    else:
        raise DataError(
            f"{path}: expected images: a folder for each class, an .npz, a .parquet "
            "or a saved dataset"
        )
    return names


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - 8} more" if len(names) > 8 else ""
    return f"{names[:8]}{more}"


def _hold_out(
    pictures: list[Picture], fraction: float
) -> tuple[list[Picture], list[Picture]]:
    if len(pictures) < 2:
        raise DataError(
            f"expected at least 2 images, to hold one out, got {len(pictures)}"
        )
    ordered = order_by_content(pictures)
    num_held = max(1, int(len(ordered) * fraction))
    return ordered[:-num_held], ordered[-num_held:]
