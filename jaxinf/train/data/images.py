"""Rows of labelled images, which Pillow decodes when they are read.

Invariant: images are returned as float32 [height, width, channels] of the model's
  shape, scaled to -1 to 1. Nothing is decoded to more pixels than `MOST_PIXELS`.
"""

import dataclasses
import hashlib
import io
import math
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple, TypeAlias

import numpy as np

from jaxinf.train.data.errors import DataError, optional_import, refusing
from jaxinf.train.data.packing import Row
from jaxinf.typing import Array

_FORMATS = ("PNG", "WEBP", "BMP", "GIF", "TIFF", "PPM")
"""Formats beside JPEG; some of Pillow's others run programs."""

MOST_PIXELS = 1 << 26
"""Limit of a decoded image. A JPEG of up to four times that is decoded at a half."""

_MOST_JPEG_PIXELS = 1 << 28  # the decoder may keep 2 bytes for each channel of a pixel
_JPEG_MARK = b"\xff\xd8\xff"

ImageShape: TypeAlias = tuple[int, int, int]
"""Height, width, channels."""


class Picture(NamedTuple):
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


@dataclasses.dataclass(frozen=True, eq=False)
class Images:
    """Rows of ``images`` float32 [height, width, channels] and ``labels`` int32 [].

    Attributes:
      shape: the shape of every returned image.
    """

    pictures: Sequence[Picture]
    shape: ImageShape

    def __len__(self) -> int:
        return len(self.pictures)

    def __getitem__(self, number: int) -> Row:
        """Decodes, resizes and scales one image.

        Raises:
          DataError: the image is damaged.
        """
        picture = self.pictures[number]
        image = _resized(_decoded(picture, self.shape[2]), self.shape, picture.where)
        pixels = image.astype(np.float32) / np.float32(255)
        return {
            "images": pixels * np.float32(2) - np.float32(1),
            "labels": np.array(picture.label, np.int32),
        }

    def fingerprint(self) -> str:
        """SHA-256 over the identities, in hexadecimal."""
        digest = hashlib.sha256(repr(self.shape).encode())
        for picture in self.pictures:
            digest.update(picture.identity)
        return digest.hexdigest()


def _decoded(picture: Picture, num_channels: int) -> Array:
    module = optional_import("PIL.Image", what=picture.where)
    mode = {1: "L", 3: "RGB", 4: "RGBA"}.get(num_channels)
    if mode is None:
        raise DataError(
            f"{picture.where}: expected a model of 1, 3 or 4 channels, which image "
            f"files have, found {num_channels}"
        )
    what = f"{picture.where}: expected an image, but it cannot be read"
    with refusing(what, "mend or remove it"):
        source = picture.content
        with (
            io.BytesIO(source) if isinstance(source, bytes) else open(source, "rb") as f
        ):
            image = _opened(module, f, mode, picture.where).convert(mode)
            return np.asarray(image).reshape(image.height, image.width, num_channels)


def _opened(module: Any, file: IO[bytes], mode: str, where: str) -> Any:
    """Opens an image with at most `MOST_PIXELS`; its pixels are not decoded yet."""
    is_jpeg = file.read(len(_JPEG_MARK)) == _JPEG_MARK
    file.seek(0)
    if is_jpeg:  # opened by its class, because Pillow's own limit is without `draft`
        plugin = optional_import("PIL.JpegImagePlugin", what=where)
        image = plugin.JpegImageFile(file)
        num_pixels = math.prod(image.size)
        if (
            MOST_PIXELS < num_pixels <= _MOST_JPEG_PIXELS
            and "progressive" not in image.info
        ):
            width, height = image.size
            image.draft(mode, (width // 2, height // 2))
    else:
        image = module.open(file, formats=_FORMATS)
    if math.prod(image.size) > MOST_PIXELS:
        raise DataError(
            f"{where}: expected an image of at most {MOST_PIXELS:,} pixels (a JPEG "
            f"that is not progressive: {_MOST_JPEG_PIXELS:,}), found {image.size[0]} x "
            f"{image.size[1]}; scale it down"
        )
    return image


def _resized(image: Array, shape: ImageShape, where: str) -> Array:
    """Resizes an image bilinearly, each channel in float32."""
    height, width, channels = shape
    if image.shape == shape:
        return image
    module = optional_import("PIL.Image", what=where)
    planes = [
        module.fromarray(np.ascontiguousarray(image[..., c], np.float32)).resize(
            (width, height), module.Resampling.BILINEAR
        )
        for c in range(channels)
    ]
    resized = np.stack([np.asarray(plane) for plane in planes], axis=-1)
    return resized.round().astype(np.uint8)
