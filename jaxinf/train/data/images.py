"""Labelled images: found, held out, counted, and decoded by Pillow when they are read.

    DIR/CLASS/*.png                      the classes are the folders' names, sorted
    DIR/train/CLASS/*, DIR/validation/…  the same, with a validation split
    FILE.parquet, saved datasets         fields `image` and `label`

Invariant: images are returned as float32 [height, width, channels] of the model's
  shape, scaled to -1 to 1. Nothing is decoded to more pixels than `MOST_PIXELS`. The
  parts have the same classes, and every label is one of them.
"""

import hashlib
import io
import math
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple, TypeAlias

import numpy as np

from jaxinf.train.data.errors import DataError, optional_import, refusing, shown_names
from jaxinf.train.data.examples import (
    checked_label,
    classes_of,
    num_classes,
    numbered,
)
from jaxinf.train.data.files import by_split, is_saved_dataset
from jaxinf.train.data.options import DataOptions
from jaxinf.train.data.records import Record, read_records
from jaxinf.train.data.rows import Row, Rows, TrainingData, digest_of
from jaxinf.typing import Array

_SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm")
_FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF", "PPM")
"""Some of Pillow's others run programs."""

MOST_PIXELS = 1 << 26
"""Limit of a decoded image."""


ImageShape: TypeAlias = tuple[int, int, int]
"""Height, width, channels."""


class _Picture(NamedTuple):
    """One labelled image, not yet decoded.

    Attributes:
      content: a file, or its bytes.
      identity: SHA-256 of label and bytes; for a file, of class, name and length, so
        that no files are read at the start.
    """

    where: str
    content: Path | bytes
    label: int
    identity: bytes


def load_images(options: DataOptions, shape: ImageShape) -> TrainingData:
    """Returns the images for training and those for validation.

    Rows have `images`, float32 of `shape`, and `labels`, int32 [].

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
        held_roots, _ = by_split(_paths(options.validation_paths), is_validation=True)
    train, names = _pictures(roots, None)
    held, names = _pictures(held_roots, names)
    if not train and held:
        raise DataError(f"{options.data[0]}: expected images to train on, found none")
    train.sort(key=lambda one: one.identity)  # which mixes the classes
    held.sort(key=lambda one: one.identity)
    if not held:
        if len(train) < 2:
            raise DataError(
                f"expected at least 2 images, to hold one out, got {len(train)}"
            )
        num_held = max(1, int(len(train) * options.held_out_share))
        train, held = train[:-num_held], train[-num_held:]
    labels = [picture.label for picture in (*train, *held)]
    num_labels = num_classes(labels, options.data[0], len(names or ()))
    return TrainingData(
        train=_rows(train, shape),
        validation=_rows(held, shape),
        row_map=None,
        tokenizer=None,
        num_labels=num_labels,
        description=f"{len(train):,} images of {num_labels} classes to train on, "
        f"{len(held):,} to validate",
        identity={
            "rows": [len(train), len(held)],
            "sha256": digest_of(_fingerprint(part, shape) for part in (train, held)),
        },
        notes=(f"classes: {shown_names(names)}",) if names else (),
    )


def _paths(names: Sequence[str]) -> list[Path]:
    paths = [Path(name).expanduser() for name in names]
    for path in paths:
        if not path.exists():
            raise DataError(f"data {str(path)!r}: expected images, found no such file")
    return paths


def _pictures(
    roots: Sequence[Path], names: list[str] | None
) -> tuple[list[_Picture], list[str] | None]:
    """Returns the images of places, and the names of their classes, if they have any.

    Args:
      names: the classes that they have to have; None for any.
    """
    found = []
    for root in roots:
        if is_saved_dataset(root) or root.suffix.lower() == ".parquet":
            records = list(read_records(root, ("image", "label")))
            labels = [checked_label(r.fields.get("label"), r.where) for r in records]
            classes = classes_of(labels, str(root))
            has_names = any(str(name) != str(n) for name, n in classes.items())
            own = [str(label) for label in classes] if has_names else None
            found += map(_of_record, records, numbered(labels, classes, str(root)))
        elif root.is_dir():
            optional_import("PIL.Image", what=str(root))
            folders = sorted(
                p for p in root.iterdir() if p.is_dir() and p.name[0] != "."
            )
            own = [folder.name for folder in folders]
            pictures = [
                _of_file(path, label)
                for label, folder in enumerate(folders)
                for path in sorted(folder.rglob("*"))
                if path.is_file() and not path.name.startswith(".")
            ]
            if not pictures:
                raise DataError(
                    f"{root}: expected a folder for each class with images in it, "
                    f"found {len(folders)} folders and no image"
                )
            found += pictures
        else:
            raise DataError(
                f"{root}: expected images: a folder for each class, a .parquet or a "
                "saved dataset"
            )
        if names is not None and names != own:
            raise DataError(
                f"{root}: expected folders of the classes {shown_names(names)}, found "
                f"{shown_names(own or [])}"
            )
        names = own
    return found, names


def _of_file(path: Path, label: int) -> _Picture:
    if path.suffix.lower() not in _SUFFIXES:
        raise DataError(
            f"{path}: expected an image ({', '.join(_SUFFIXES)}) among those of its "
            "class; move it elsewhere"
        )
    identity = f"{label}/{path.name} {path.stat().st_size}".encode()
    return _Picture(str(path), path, label, hashlib.sha256(identity).digest())


def _of_record(record: Record, label: int) -> _Picture:
    image = record.fields.get("image")
    content = image.get("bytes") if isinstance(image, dict) else image
    if not isinstance(content, bytes) or not content:
        raise DataError(
            f"{record.where}: expected the bytes of an image in field 'image', found "
            f"fields {record.names}"
        )
    identity = hashlib.sha256(f"{label} ".encode() + content).digest()
    return _Picture(record.where, content, label, identity)


def _fingerprint(pictures: Sequence[_Picture], shape: ImageShape) -> str:
    digest = hashlib.sha256(repr(shape).encode())
    for picture in pictures:
        digest.update(picture.identity)
    return digest.hexdigest()


def _rows(pictures: Sequence[_Picture], shape: ImageShape) -> Rows:
    def row(number: int) -> Row:
        picture = pictures[number]
        image = _resized(_decoded(picture, shape[2]), shape, picture.where)
        pixels = image.astype(np.float32) / np.float32(255)
        return {
            "images": pixels * np.float32(2) - np.float32(1),
            "labels": np.array(picture.label, np.int32),
        }

    return Rows(len(pictures), row)


def _decoded(picture: _Picture, num_channels: int) -> Array:
    where, source = picture.where, picture.content
    module = optional_import("PIL.Image", what=where)
    mode = {1: "L", 3: "RGB", 4: "RGBA"}.get(num_channels)
    if mode is None:
        raise DataError(
            f"{where}: expected a model of 1, 3 or 4 channels, which image files have, "
            f"found {num_channels}"
        )
    what = f"{where}: expected an image, but it cannot be read"
    with (
        refusing(what, "mend or remove it"),
        io.BytesIO(source) if isinstance(source, bytes) else open(source, "rb") as file,
    ):
        image = _opened(module, file, where).convert(mode)
        return np.asarray(image).reshape(image.height, image.width, num_channels)


def _opened(module: Any, file: IO[bytes], where: str) -> Any:
    """Opens an image with at most `MOST_PIXELS`; its pixels are not decoded yet."""
    image = module.open(file, formats=_FORMATS)
    if math.prod(image.size) > MOST_PIXELS:
        raise DataError(
            f"{where}: expected an image of at most {MOST_PIXELS:,} pixels, found "
            f"{image.size[0]} x {image.size[1]}; scale it down"
        )
    return image


def _resized(image: Array, shape: ImageShape, where: str) -> Array:
    """Resizes an image bilinearly, each channel in float32."""
    if image.shape == shape:
        return image
    module, size = optional_import("PIL.Image", what=where), (shape[1], shape[0])
    planes = [
        module.fromarray(np.ascontiguousarray(image[..., c], np.float32)).resize(
            size, module.Resampling.BILINEAR
        )
        for c in range(shape[2])
    ]
    return np.stack([np.asarray(one) for one in planes], -1).round().astype(np.uint8)
