"""Images with labels: folders by class, arrays, rows of tables.

    DIR/CLASS/*.png                      the classes are the folders' names, sorted
    DIR/train/CLASS/*, DIR/validation/…  the same, with a validation split
    FILE.npz                             arrays `images` and `labels`
    DIR/images.npy, DIR/labels.npy       the same, mapped into memory
    FILE.parquet, saved datasets         fields `image` and `label`

Invariant: images are returned as float32 [height, width, channels] of the model's
  shape, scaled to -1 to 1; a file is decoded when its row is read.
"""

import dataclasses
import hashlib
import io
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from jaxinf.train.data.errors import DataError, optional_import
from jaxinf.train.data.packing import Row
from jaxinf.train.data.records import Record
from jaxinf.typing import Array

__all__ = ["ImageShape", "Images", "Picture", "array_images", "folder_images",
           "order_by_content", "record_images"]  # fmt: skip

_SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm")
_ARRAY_NAMES = (("images", "labels"), ("x", "y"), ("x_train", "y_train"))

ImageShape: TypeAlias = tuple[int, int, int]
"""Height, width, channels."""


class Picture(NamedTuple):
    """One labelled image, not yet decoded.

    Attributes:
      where: its name in an error.
      content: an array [h, w] or [h, w, c], a file, or a file's bytes.
      label: its class.
      identity: SHA-256 of the content in memory; for a file, of class, name and length,
        so that no files are read at the start.
    """

    where: str
    content: Any
    label: int
    identity: bytes


@dataclasses.dataclass(frozen=True, eq=False)
class Images:
    """Rows of ``images`` float32 [height, width, channels] and ``labels`` int32 [].

    Attributes:
      pictures: one for each row.
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
        image = picture.content
        if not isinstance(image, np.ndarray):
            image = _decoded(picture, self.shape[2])
        pixels = _scaled(_resized(image, self.shape, picture.where))
        return {"images": pixels, "labels": np.array(picture.label, np.int32)}

    def fingerprint(self) -> str:
        """SHA-256 over the identities, in hexadecimal."""
        digest = hashlib.sha256(repr(self.shape).encode())
        for picture in self.pictures:
            digest.update(picture.identity)
        return digest.hexdigest()


def order_by_content(pictures: Sequence[Picture]) -> list[Picture]:
    """Sorts images by their identities, which mixes the classes."""
    return sorted(pictures, key=lambda picture: picture.identity)


def folder_images(root: Path) -> tuple[list[Picture], list[str]]:
    """Returns the images in the subfolders of a folder, and their names: the classes.

    Raises:
      DataError: there are no images, or a file is not one.
    """
    optional_import("PIL.Image", what=str(root))
    folders = sorted(p for p in root.iterdir() if p.is_dir() and p.name[0] != ".")
    names = [folder.name for folder in folders]
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
    return found, names


def _picture_file(path: Path, label: int) -> Picture:
    if path.suffix.lower() not in _SUFFIXES:
        raise DataError(
            f"{path}: expected an image ({', '.join(_SUFFIXES)}) among those of its "
            "class; move it elsewhere"
        )
    identity = f"{label}/{path.name} {path.stat().st_size}"
    return Picture(str(path), path, label, hashlib.sha256(identity.encode()).digest())


def array_images(path: Path) -> list[Picture]:
    """Returns the images of an `.npz`, or of a folder with images.npy and labels.npy.

    Raises:
      DataError: arrays are missing, or do not fit together.
    """
    images, labels = _arrays(path)
    if images.ndim not in (3, 4) or labels.shape != images.shape[:1]:
        raise DataError(
            f"{path}: expected images [n, height, width] or [n, height, width, "
            f"channels] and labels [n], found {images.shape} and {labels.shape}"
        )
    if labels.dtype.kind not in "iu":
        raise DataError(f"{path}: expected labels of integers, found {labels.dtype}")
    if images.dtype != np.uint8 and images.dtype.kind != "f":
        raise DataError(
            f"{path}: expected images of uint8 (0 to 255) or floats (0 to 1), found "
            f"{images.dtype}"
        )
    return [
        Picture(f"{path}: image {n}", image, int(label), _digest(image, int(label)))
        for n, (image, label) in enumerate(zip(images, labels, strict=True))
    ]


def _arrays(path: Path) -> tuple[Array, Array]:
    try:
        if path.is_dir():
            names = ("images.npy", "labels.npy")
            images, labels = (np.load(path / n, mmap_mode="r") for n in names)
            return images, labels
        with np.load(path) as archive:
            for names in _ARRAY_NAMES:
                if set(names) <= set(archive.files):
                    return archive[names[0]], archive[names[1]]
            raise DataError(
                f"{path}: expected arrays images and labels, found {archive.files}"
            )
    except (OSError, ValueError, EOFError) as error:  # pickled, cut, no array
        raise DataError(f"{path}: expected arrays of NumPy: {error}") from error


def record_images(records: Iterator[Record]) -> list[Picture]:
    """Returns images of rows with ``image`` (bytes or a struct of them) and ``label``.

    Raises:
      DataError: a row lacks the image or the label.
    """
    return [_picture_record(record) for record in records]


def _picture_record(record: Record) -> Picture:
    image, label = record.fields.get("image"), record.fields.get("label")
    content = image.get("bytes") if isinstance(image, dict) else image
    if not isinstance(content, bytes) or not content:
        raise DataError(
            f"{record.where}: expected the bytes of an image in field 'image', found "
            f"fields {sorted(record.fields)}"
        )
    if not isinstance(label, int) or isinstance(label, bool):
        raise DataError(f"{record.where}: expected an integer label, found {label!r}")
    identity = hashlib.sha256(f"{label} ".encode() + content).digest()
    return Picture(record.where, content, label, identity)


def _digest(image: Array, label: int) -> bytes:
    head = f"{label} {image.dtype} {image.shape}".encode()
    return hashlib.sha256(head + image.tobytes()).digest()


def _decoded(picture: Picture, num_channels: int) -> Array:
    module = optional_import("PIL.Image", what=picture.where)
    mode = {1: "L", 3: "RGB", 4: "RGBA"}.get(num_channels)
    if mode is None:
        raise DataError(
            f"{picture.where}: expected a model of 1, 3 or 4 channels, which image "
            f"files have, found {num_channels}; give it arrays"
        )
    source = picture.content
    try:
        with module.open(
            io.BytesIO(source) if isinstance(source, bytes) else source
        ) as i:
            return np.asarray(i.convert(mode))
    except (OSError, SyntaxError, ValueError) as error:
        raise DataError(
            f"{picture.where}: expected an image, but it cannot be read: {error}"
        ) from error


def _resized(image: Array, shape: ImageShape, where: str) -> Array:
    """Converts an image to a model's shape: repeats gray, and resizes bilinearly."""
    height, width, channels = shape
    image = image[..., None] if image.ndim == 2 else image
    if image.shape[2] == 1:
        image = np.broadcast_to(image, (*image.shape[:2], channels))
    if image.shape[2] != channels:
        raise DataError(
            f"{where}: expected {channels} channels, found {image.shape[2]}"
        )
    if image.shape[:2] == (height, width):
        return image
    module = optional_import("PIL.Image", what=where)
    planes = [
        module.fromarray(np.ascontiguousarray(image[..., c], np.float32)).resize(
            (width, height), module.Resampling.BILINEAR
        )
        for c in range(channels)
    ]
    resized = np.stack([np.asarray(plane) for plane in planes], axis=-1)
    return resized if image.dtype.kind == "f" else resized.round().astype(np.uint8)


def _scaled(image: Array) -> Array:
    """Scales 0 to 255 (or 0 to 1 for floats) to -1 to 1."""
    scale = np.float32(1 if image.dtype.kind == "f" else 255)
    return image.astype(np.float32) / scale * np.float32(2) - np.float32(1)
