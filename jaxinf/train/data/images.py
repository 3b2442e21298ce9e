"""Labelled images: found, held out, counted, and decoded by Pillow when they are read.

    DIR/CLASS/*.png     the classes are the folders' names, sorted

Invariant: images are returned as float32 [height, width, channels] of the model's
  shape, scaled to -1 to 1. Nothing is decoded to more pixels than `MOST_PIXELS`. The
  parts have the same classes.
"""

import hashlib
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TypeAlias

import numpy as np

from jaxinf.train.config import TrainConfig
from jaxinf.train.data.errors import DataError, refusing, shown_names
from jaxinf.train.data.rows import Row, Rows, TrainingData
from jaxinf.typing import Array

_SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm")
# Some of Pillow's others run programs.
_FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF", "PPM")
_MODES = {1: "L", 3: "RGB", 4: "RGBA"}

MOST_PIXELS = 1 << 26
"""Limit of a decoded image."""

ImageShape: TypeAlias = tuple[int, int, int]
"""Height, width, channels."""


_Picture: TypeAlias = tuple[bytes, Path, int]
"""The SHA-256 of class, name and length, so that no files are read at the start; where
an image is, and the number of its class."""


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
    train = _pictures(options.data, classes)
    if (share := options.held_out_share) is None:
        held = _pictures(options.validation, classes)
    elif len(train) < 2:
        raise DataError(
            f"expected at least 2 images, to hold one out, got {len(train)}"
        )
    else:
        num_held = max(1, int(len(train) * share))
        train, held = train[:-num_held], train[-num_held:]
    prints = [
        hashlib.sha256(b"".join([repr(shape).encode(), *(one[0] for one in part)]))
        for part in (train, held)
    ]
    both = " ".join(one.hexdigest() for one in prints)
    return TrainingData(
        train=Rows(len(train), lambda number: _row(train[number], shape)),
        validation=Rows(len(held), lambda number: _row(held[number], shape)),
        row_map=None,
        tokenizer=None,
        num_labels=len(classes),
        description=f"{len(train):,} images of {len(classes)} classes to train on, "
        f"{len(held):,} to validate",
        identity={
            "rows": [len(train), len(held)],
            "sha256": hashlib.sha256(both.encode()).hexdigest(),
        },
        notes=(f"classes: {shown_names(classes)}",),
    )


def _pictures(names: Sequence[str], classes: list[str]) -> list[_Picture]:
    """Returns the images of folders in an order that mixes their classes.

    The classes are set, unless there are some, which the folders must have, too.
    """
    found = []
    for root in (Path(name).expanduser() for name in names):
        folders = sorted(path for path in root.glob("[!.]*") if path.is_dir())
        own = [folder.name for folder in folders]
        classes[:] = classes or own
        if own != classes:
            raise DataError(
                f"{root}: expected folders of the classes {shown_names(classes)}, "
                f"found {shown_names(own)}"
            )
        num_before = len(found)
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
                found.append((hashlib.sha256(identity).digest(), path, label))
        if len(found) == num_before:
            raise DataError(
                f"{root}: expected images, in a folder for each class, found "
                f"{len(folders)} folders and no image"
            )
    return sorted(found, key=lambda picture: picture[0])


def _row(picture: _Picture, shape: ImageShape) -> Row:
    _, path, label = picture
    pixels = _pixels(path, shape).astype(np.float32) / np.float32(255)
    return {
        "images": pixels * np.float32(2) - np.float32(1),
        "labels": np.array(label, np.int32),
    }


def _pixels(path: Path, shape: ImageShape) -> Array:
    """Returns an image of a shape, resized bilinearly, each channel in float32."""
    height, width, num_channels = shape
    if num_channels not in _MODES:
        raise DataError(
            f"{path}: expected a model of 1, 3 or 4 channels, which image files have, "
            f"found {num_channels}"
        )
    what = f"{path}: expected an image, but it cannot be read"
    with refusing(what, "mend or remove it"), path.open("rb") as file:
        from PIL import Image

        image = Image.open(file, formats=_FORMATS)
        if math.prod(image.size) > MOST_PIXELS:  # which are not decoded yet
            raise DataError(
                f"{path}: expected an image of at most {MOST_PIXELS:,} pixels, found "
                f"{image.size[0]} x {image.size[1]}; scale it down"
            )
        whole = np.asarray(image.convert(_MODES[num_channels]))
        whole = whole.reshape(*whole.shape[:2], num_channels)
        if whole.shape == shape:
            return whole
        planes = np.ascontiguousarray(whole.transpose(2, 0, 1), np.float32)
        how = (width, height), Image.Resampling.BILINEAR
        resized = [np.asarray(Image.fromarray(plane).resize(*how)) for plane in planes]
    return np.stack(resized, -1).round().astype(np.uint8)
