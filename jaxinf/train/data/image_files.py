"""Finds labelled images, holds a part out, and counts the classes.

    DIR/CLASS/*.png                      the classes are the folders' names, sorted
    DIR/train/CLASS/*, DIR/validation/…  the same, with a validation split
    FILE.parquet, saved datasets         fields `image` and `label`

Invariant: the parts have the same classes, and every label is one of them.
"""

import hashlib
from collections.abc import Sequence
from pathlib import Path

from jaxinf.train.data.errors import DataError, optional_import, shown_names
from jaxinf.train.data.files import by_split
from jaxinf.train.data.images import Images, ImageShape, Picture
from jaxinf.train.data.labels import (
    checked_label,
    num_classes,
    number_of_classes,
    numbered,
)
from jaxinf.train.data.options import DataOptions
from jaxinf.train.data.parts import TrainingData, digest_of
from jaxinf.train.data.records import Record, is_saved_dataset, read_records

_SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm")


def load_images(options: DataOptions, shape: ImageShape) -> TrainingData:
    """Returns the images for training and those for validation.

    Raises:
      DataError: there are no images, or labels are out of range.
    """
    if not options.data:
        raise DataError(
            "--data: expected images, in a folder for each class: this model takes no "
            "text"
        )
    roots, held_roots = by_split(_paths(options.data))
    if options.validation:
        held_roots, _ = by_split(_paths(options.validation), is_validation=True)
    train, names = _pictures(roots, None)
    held, names = _pictures(held_roots, names)
    if not train and held:
        raise DataError(f"{options.data[0]}: expected images to train on, found none")
    if not held:
        train, held = _hold_out(train, options.validation_fraction)
    labels = [picture.label for picture in (*train, *held)]
    least = len(names) if names else None
    num_labels = num_classes(labels, options.num_labels or least, options.data[0])
    parts = [Images(_by_content(pictures), shape) for pictures in (train, held)]
    return TrainingData(
        train=parts[0],
        validation=parts[1],
        row_map=None,
        tokenizer=None,
        num_labels=num_labels,
        description=f"{len(train):,} images of {num_labels} classes to train on, "
        f"{len(held):,} to validate",
        identity={
            "rows": [len(train), len(held)],
            "sha256": digest_of(part.fingerprint() for part in parts),
        },
        notes=(f"classes: {shown_names(names)}",) if names else (),
        held_out_tokens=None,
    )


def _paths(names: Sequence[str]) -> list[Path]:
    paths = [Path(name).expanduser() for name in names]
    for path in paths:
        if not path.exists():
            raise DataError(f"data {str(path)!r}: expected images, found no such file")
    return paths


def _pictures(
    roots: Sequence[Path], names: list[str] | None
) -> tuple[list[Picture], list[str] | None]:
    """Returns the images of places, and the names of their classes, if they have any.

    Args:
      names: the classes that they have to have; None for any.
    """
    found = []
    for root in roots:
        is_table = is_saved_dataset(root) or root.suffix.lower() == ".parquet"
        if not is_table and not root.is_dir():
            raise DataError(
                f"{root}: expected images: a folder for each class, a .parquet or a "
                "saved dataset"
            )
        if is_table:
            records = list(read_records(root, ("image", "label")))
            labels = [
                checked_label(one.fields.get("label"), one.where) for one in records
            ]
            number_of = number_of_classes(labels, str(root))
            has_names = any(str(name) != str(n) for name, n in number_of.items())
            own = [str(label) for label in number_of] if has_names else None
            numbers = numbered(labels, number_of, str(root))
            found += map(_picture_record, records, numbers)
        else:
            pictures, own = _folder_pictures(root)
            found += pictures
        if names is not None and names != own:
            raise DataError(
                f"{root}: expected folders of the classes {_listed(names)}, found "
                f"{_listed(own or [])}"
            )
        names = own
    return found, names


def _folder_pictures(root: Path) -> tuple[list[Picture], list[str]]:
    optional_import("PIL.Image", what=str(root))
    folders = sorted(p for p in root.iterdir() if p.is_dir() and p.name[0] != ".")
    found = [
        _picture_file(path, label)
        for label, folder in enumerate(folders)
        for path in sorted(folder.rglob("*"))
        if path.is_file() and not path.name.startswith(".")
    ]
    if not found:
        raise DataError(
            f"{root}: expected a folder for each class with images in it, found "
            f"{len(folders)} folders and no image"
        )
    return found, [folder.name for folder in folders]


def _picture_file(path: Path, label: int) -> Picture:
    if path.suffix.lower() not in _SUFFIXES:
        raise DataError(
            f"{path}: expected an image ({', '.join(_SUFFIXES)}) among those of its "
            "class; move it elsewhere"
        )
    identity = f"{label}/{path.name} {path.stat().st_size}"
    return Picture(str(path), path, label, hashlib.sha256(identity.encode()).digest())


def _picture_record(record: Record, label: int) -> Picture:
    image = record.fields.get("image")
    content = image.get("bytes") if isinstance(image, dict) else image
    if not isinstance(content, bytes) or not content:
        raise DataError(
            f"{record.where}: expected the bytes of an image in field 'image', found "
            f"fields {record.names}"
        )
    identity = hashlib.sha256(f"{label} ".encode() + content).digest()
    return Picture(record.where, content, label, identity)


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - 8} more" if len(names) > 8 else ""
    return f"{names[:8]}{more}"


def _by_content(pictures: Sequence[Picture]) -> list[Picture]:
    """Sorts images by their identities, which mixes the classes."""
    return sorted(pictures, key=lambda picture: picture.identity)


def _hold_out(
    pictures: list[Picture], fraction: float
) -> tuple[list[Picture], list[Picture]]:
    if len(pictures) < 2:
        raise DataError(
            f"expected at least 2 images, to hold one out, got {len(pictures)}"
        )
    ordered = _by_content(pictures)
    num_held = max(1, int(len(ordered) * fraction))
    return ordered[:-num_held], ordered[-num_held:]
