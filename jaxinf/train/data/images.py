"""Images with labels: folders by class, arrays, rows of tables.

    DIR/CLASS/*.png                      the classes are the folders' names, sorted
    DIR/train/CLASS/*, DIR/validation/…  the same, with a validation split
    FILE.npz                             arrays `images` and `labels`
    DIR/images.npy, DIR/labels.npy       the same, mapped into memory
    FILE.parquet, saved datasets         fields `image` and `label`

Invariant: images are returned as float32 [height, width, channels] of the model's
  shape, scaled to -1 to 1; a file is decoded when its row is read. Nothing is decoded
  to more pixels than `MOST_PIXELS`, and no array is read that its file does not hold.
"""

import dataclasses
import hashlib
import io
import math
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple, TypeAlias

import numpy as np

from jaxinf.documents import shown
from jaxinf.io import MACHINE_MEMORY_BYTES
from jaxinf.train.data.errors import DataError, optional_import, refusing
from jaxinf.train.data.examples import MOST_LABELS
from jaxinf.train.data.packing import Row
from jaxinf.train.data.records import Record
from jaxinf.typing import Array

_SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm")
_FORMATS = ("PNG", "WEBP", "BMP", "GIF", "TIFF", "PPM")
"""Formats beside JPEG; some of Pillow's others run programs."""

MOST_PIXELS = 1 << 26
"""Limit of a decoded image. A JPEG of up to four times that is decoded at a half."""

_MOST_JPEG_PIXELS = 1 << 28  # the decoder may keep 2 bytes for each channel of a pixel
_JPEG_MARK = b"\xff\xd8\xff"
_ARRAY_NAMES = (("images", "labels"), ("x", "y"), ("x_train", "y_train"))

ImageShape: TypeAlias = tuple[int, int, int]
"""Height, width, channels."""


class Picture(NamedTuple):
    """One labelled image, not yet decoded.

    Attributes:
      content: an array [h, w] or [h, w, c], a file, or a file's bytes.
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
        with np.errstate(over="ignore", invalid="ignore"):
            pixels = _scaled(_resized(image, self.shape, picture.where))
        if not np.isfinite(pixels).all():
            raise DataError(
                f"{picture.where}: expected finite pixels, found others; mend or "
                "remove it"
            )
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
    with refusing(f"{path}: expected arrays of NumPy"):
        images, labels = _folder_arrays(path) if path.is_dir() else _archive(path)
    return [
        Picture(f"{path}: image {n}", image, int(label), _digest(image, int(label)))
        for n, (image, label) in enumerate(zip(images, labels, strict=True))
    ]


def _folder_arrays(folder: Path) -> tuple[Array, Array]:
    paths = [folder / name for name in ("images.npy", "labels.npy")]
    with open(paths[0], "rb") as images, open(paths[1], "rb") as labels:
        sizes = [path.stat().st_size for path in paths]
        _check_headers(folder, (images, labels), sizes)
    return np.load(paths[0], mmap_mode="r"), np.load(paths[1], mmap_mode="r")


def _archive(path: Path) -> tuple[Array, Array]:
    with zipfile.ZipFile(path) as archive:
        sizes = {member.filename: member.file_size for member in archive.infolist()}
        members = next(
            ([f"{n}.npy" for n in names] for names in _ARRAY_NAMES
             if all(f"{n}.npy" in sizes for n in names)), None
        )  # fmt: skip
        if members is None:
            found = [name.removesuffix(".npy") for name in list(sizes)[:8]]
            raise DataError(f"{path}: expected arrays images and labels, found {found}")
        with archive.open(members[0]) as images, archive.open(members[1]) as labels:
            num_bytes = [sizes[name] for name in members]
            _check_headers(path, (images, labels), num_bytes)
        if sum(num_bytes) > MACHINE_MEMORY_BYTES:
            raise DataError(
                f"{path}: holds arrays of {sum(num_bytes)} bytes, and this machine has "
                f"{MACHINE_MEMORY_BYTES}; give a folder with images.npy and "
                "labels.npy, which are not read as a whole"
            )
        with archive.open(members[0]) as images, archive.open(members[1]) as labels:
            return np.lib.format.read_array(images), np.lib.format.read_array(labels)


def _check_headers(
    path: Path, files: Sequence[IO[bytes]], sizes: Sequence[int]
) -> None:
    """Refuses arrays of other shapes or dtypes, or that their files do not hold."""
    (shape, dtype), (labels, label_dtype) = map(_header, files, sizes)
    if len(shape) not in (3, 4) or labels != shape[:1] or 0 in shape:
        raise DataError(
            f"{path}: expected images [n, height, width] or [n, height, width, "
            f"channels] and labels [n], found {shape} and {labels}"
        )
    if label_dtype.kind not in "iu":
        raise DataError(f"{path}: expected labels of integers, found {label_dtype}")
    if dtype != np.uint8 and dtype.kind != "f":
        raise DataError(
            f"{path}: expected images of uint8 (0 to 255) or floats (0 to 1), found "
            f"{dtype}"
        )


def _header(file: IO[bytes], num_bytes: int) -> tuple[tuple[int, ...], np.dtype[Any]]:
    """Reads the header of an array of NumPy, in a file of so many bytes.

    Raises:
      ValueError: the array does not have the file's bytes, or consists of objects.
    """
    form = np.lib.format
    versions = {(1, 0): form.read_array_header_1_0, (2, 0): form.read_array_header_2_0}
    version = form.read_magic(file)
    if version not in versions:
        raise ValueError(f"version {version} of the format")
    shape, _, dtype = versions[version](file)
    if dtype.hasobject:
        raise ValueError("objects, which are not unpickled")
    wanted = math.prod(shape) * dtype.itemsize
    if min(shape, default=0) < 0 or file.tell() + wanted != num_bytes:
        raise ValueError(
            f"shape {shape} of {dtype} needs {shown(wanted)} bytes, the file has "
            f"{num_bytes - file.tell()} for it"
        )
    return shape, dtype


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
            f"fields {record.names}"
        )
    if type(label) is not int or not 0 <= label < MOST_LABELS:
        raise DataError(
            f"{record.where}: expected an integer label from 0 to {MOST_LABELS - 1}, "
            f"found {shown(label)}"
        )
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
    what = f"{picture.where}: expected an image, but it cannot be read"
    with refusing(what, "mend or remove it"):
        source = picture.content
        with (
            io.BytesIO(source) if isinstance(source, bytes) else open(source, "rb") as f
        ):
            return np.asarray(_opened(module, f, mode, picture.where).convert(mode))


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
