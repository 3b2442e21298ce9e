"""Labelled images: found, held out, counted, and decoded by Pillow when they are read.

    DIR/CLASS/*.png     the classes are the folders' names, sorted

Invariant: images are returned as float32 [height, width, channels] of the model's
shape, scaled to -1 to 1. Nothing is decoded to more pixels than `MAX_PIXELS`. The
parts have the same classes.
"""

import hashlib
import math
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, TypeAlias

import numpy as np

from jaxinf.train.config import TrainConfig
from jaxinf.train.data.errors import DataError, as_data_error, list_names
from jaxinf.train.data.rows import Row, Rows, TrainingData
from jaxinf.typing import Array

_SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm")
# Some of Pillow's others run programs.
_FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF", "PPM")
_MODES = {1: "L", 3: "RGB", 4: "RGBA"}

MAX_PIXELS = 1 << 26
"""Limit of a decoded image."""

ImageShape: TypeAlias = tuple[int, int, int]
"""Height, width, channels."""


class _Image(NamedTuple):
    """An image that is not read yet; the digest is of class, name and length."""

    digest: bytes
    path: Path
    label: int


def load_images(options: TrainConfig, shape: ImageShape) -> TrainingData:
    """Returns the images for training and those for validation.

    Rows have `images`, float32 of `shape`, and `labels`, int32 [].
    """
    if not options.data:
        raise DataError(
            "--data: expected images, in a folder for each class: this model takes no "
            "text"
        )
    classes: list[str] = []
    train = _find_images(options.data, classes)
    if (share := options.held_out_share) is None:
        validation = _find_images(options.validation, classes)
    elif len(train) < 2:
        raise DataError(
            f"expected at least 2 images, to hold one out, got {len(train)}"
        )
    else:
        num_held_out = max(1, int(len(train) * share))
        train, validation = train[:-num_held_out], train[-num_held_out:]
    digests = " ".join(_digest(images, shape) for images in (train, validation))
    return TrainingData(
        train=Rows(len(train), lambda n: _read_row(train[n], shape)),
        validation=Rows(len(validation), lambda n: _read_row(validation[n], shape)),
        row_map=None,
        tokenizer=None,
        num_labels=len(classes),
        description=f"{len(train):,} images of {len(classes)} classes to train on, "
        f"{len(validation):,} to validate",
        identity={
            "rows": [len(train), len(validation)],
            "sha256": hashlib.sha256(digests.encode()).hexdigest(),
        },
        notes=(f"classes: {list_names(classes)}",),
    )


def _digest(images: Sequence[_Image], shape: ImageShape) -> str:
    parts = [repr(shape).encode(), *(image.digest for image in images)]
    return hashlib.sha256(b"".join(parts)).hexdigest()


def _find_images(names: Sequence[str], classes: list[str]) -> list[_Image]:
    """Returns the images of folders in an order that mixes their classes.

    Args:
      classes: Names that the folders must have; if empty, it gets those of the first.
    """
    images: list[_Image] = []
    for root in (Path(name).expanduser() for name in names):
        folders = sorted(path for path in root.glob("[!.]*") if path.is_dir())
        names_here = [folder.name for folder in folders]
        classes[:] = classes or names_here
        if names_here != classes:
            raise DataError(
                f"{root}: expected folders of the classes {list_names(classes)}, "
                f"found {list_names(names_here)}"
            )
        num_before = len(images)
        for label, folder in enumerate(folders):
            for path in sorted(folder.rglob("*")):
                if not path.is_file() or path.name.startswith("."):
                    continue
                if path.suffix.lower() not in _SUFFIXES:
                    raise DataError(
                        f"{path}: expected an image ({', '.join(_SUFFIXES)}) among "
                        "those of its class; move it elsewhere"
                    )
                identity = f"{label}/{path.name} {path.stat().st_size}".encode()
                digest = hashlib.sha256(identity).digest()
                images.append(_Image(digest, path, label))
        if len(images) == num_before:
            raise DataError(
                f"{root}: expected images, in a folder for each class, found "
                f"{len(folders)} folders and no image"
            )
    return sorted(images, key=lambda image: image.digest)


def _read_row(image: _Image, shape: ImageShape) -> Row:
    pixels = _decode_image(image.path, shape).astype(np.float32) / np.float32(255)
    return {
        "images": pixels * np.float32(2) - np.float32(1),
        "labels": np.array(image.label, np.int32),
    }


def _decode_image(path: Path, shape: ImageShape) -> Array:
    """Returns an image of a shape, resized bilinearly, each channel in float32."""
    height, width, num_channels = shape
    if num_channels not in _MODES:
        raise DataError(
            f"{path}: expected a model of 1, 3 or 4 channels, which image files have, "
            f"found {num_channels}"
        )
    what = f"{path}: expected an image, but it cannot be read"
    with as_data_error(what, "mend or remove it"), path.open("rb") as file:
        from PIL import Image

        image = Image.open(file, formats=_FORMATS)
        if math.prod(image.size) > MAX_PIXELS:  # which are not decoded yet
            raise DataError(
                f"{path}: expected an image of at most {MAX_PIXELS:,} pixels, found "
                f"{image.size[0]} x {image.size[1]}; scale it down"
            )
        whole = np.asarray(image.convert(_MODES[num_channels]))
        whole = whole.reshape(*whole.shape[:2], num_channels)
        if whole.shape == shape:
            return whole
        planes = np.ascontiguousarray(whole.transpose(2, 0, 1), np.float32)
        size, method = (width, height), Image.Resampling.BILINEAR
        resized = [Image.fromarray(plane).resize(size, method) for plane in planes]
        resized = [np.asarray(plane) for plane in resized]
    return np.stack(resized, -1).round().astype(np.uint8)
