"""Images from folders, arrays and tables: pixels, classes, refusals."""

import io
import struct
import zipfile
import zlib

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
from PIL import Image

from jaxinf.train.data import images
from jaxinf.train.data.errors import DataError


def png(pixels):
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "png")
    return file.getvalue()


def pixels_of(seed, *shape):
    return np.random.default_rng(seed).integers(0, 256, shape, np.uint8)


def all_rows(rows):
    return [rows[number] for number in range(len(rows))]


@pytest.fixture
def classify(load):
    """Loads images for a model of this shape."""

    def call(*paths, shape=(4, 4, 3), **options):
        return load(*paths, task="classification", image_shape=shape, **options)

    return call


@pytest.fixture
def folder(tmp_path):
    """Two classes with two images each, of the models' shape."""
    root = tmp_path / "pictures"
    for label, name in enumerate(("cat", "dog")):
        (root / name).mkdir(parents=True)
        for n in range(2):
            (root / name / f"{n}.png").write_bytes(
                png(pixels_of(2 * label + n, 4, 4, 3))
            )
    return root


def test_folder_by_class(classify, folder):
    data = classify(folder)
    rows = all_rows(data.train) + all_rows(data.validation)
    assert data.num_labels == 2
    assert sorted(int(row["labels"]) for row in rows) == [0, 0, 1, 1]
    found = {row["images"].tobytes() for row in rows}
    assert found == {
        (pixels_of(seed, 4, 4, 3).astype(np.float32) / 255 * 2 - 1).tobytes()
        for seed in range(4)
    }


def test_validation_folder_is_held_out(classify, folder, tmp_path):
    both = tmp_path / "both"
    both.mkdir()
    folder.rename(both / "train")
    (both / "val" / "cat").mkdir(parents=True)
    (both / "val" / "dog").mkdir()
    (both / "val" / "dog" / "x.png").write_bytes(png(pixels_of(9, 4, 4, 3)))
    data = classify(both)
    assert (len(data.train), len(data.validation)) == (4, 1)
    assert data.validation[0]["labels"] == 1
    assert data.num_labels == 2


def test_classes_of_the_parts_have_to_agree(classify, folder, tmp_path):
    (tmp_path / "other" / "bird").mkdir(parents=True)
    (tmp_path / "other" / "bird" / "x.png").write_bytes(png(pixels_of(9, 4, 4, 3)))
    with pytest.raises(DataError, match=r"classes \['cat', 'dog'\], found \['bird'\]"):
        classify(folder, validation=(str(tmp_path / "other"),))


def test_arrays(classify, tmp_path):
    pixels, labels = pixels_of(0, 6, 4, 4, 3), np.arange(6) % 3
    np.savez(tmp_path / "a.npz", images=pixels, labels=labels)
    data = classify(tmp_path / "a.npz")
    assert data.num_labels == 3
    expected = {i.tobytes() for i in pixels.astype(np.float32) / 255 * 2 - 1}
    rows = all_rows(data.train) + all_rows(data.validation)
    assert {row["images"].tobytes() for row in rows} == expected


def test_mapped_arrays(classify, tmp_path):
    np.save(tmp_path / "images.npy", pixels_of(0, 6, 4, 4))
    np.save(tmp_path / "labels.npy", np.arange(6) % 2)
    data = classify(tmp_path)
    row = data.train[0]["images"]
    np.testing.assert_array_equal(row[..., 0], row[..., 2])  # gray is repeated


def test_floats_are_from_0_to_1(classify, tmp_path):
    images = np.linspace(0, 1, 4 * 16, dtype=np.float64).reshape(4, 4, 4)
    np.savez(tmp_path / "a.npz", x=images, y=np.arange(4))
    data = classify(tmp_path / "a.npz", shape=(4, 4, 1))
    rows = all_rows(data.train) + all_rows(data.validation)
    values = np.sort(np.concatenate([row["images"].ravel() for row in rows]))
    np.testing.assert_allclose(values, np.linspace(-1, 1, 64), atol=1e-6)
    assert values.dtype == np.float32


def test_rows_of_a_table(classify, tmp_path):
    rows = [
        {"image": {"bytes": png(pixels_of(n, 4, 4, 3)), "path": None}, "label": n % 2}
        for n in range(4)
    ]
    pyarrow.parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    data = classify(tmp_path / "a.parquet")
    assert data.train[0]["images"].shape == (4, 4, 3)
    assert data.num_labels == 2


def test_resized(classify, tmp_path):
    flat = np.full((3, 9, 5), 51, np.uint8)
    np.savez(tmp_path / "a.npz", images=flat, labels=np.arange(3))
    row = classify(tmp_path / "a.npz").train[0]["images"]
    np.testing.assert_allclose(row, np.full((4, 4, 3), -0.6), atol=1e-6)


def test_identity_tells_data_apart(classify, folder):
    before = classify(folder).identity
    assert classify(folder).identity == before
    assert classify(folder, shape=(8, 8, 3)).identity != before
    (folder / "cat" / "0.png").rename(folder / "dog" / "9.png")
    assert classify(folder).identity != before


def test_damaged_image_is_named(classify, folder):
    for path in folder.glob("*/*.png"):
        path.write_bytes(b"no image")
    data = classify(folder)
    with pytest.raises(DataError, match=r"\d.png: expected an image, .*; mend or rem"):
        data.train[0]


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"a": np.zeros(3)}, r"expected arrays images and labels, found \['a'\]"),
        ({"images": np.zeros((3, 4)), "labels": np.zeros(3, int)}, r"found \(3, 4\)"),
        ({"images": np.zeros((3, 4, 4)), "labels": np.zeros(2, int)}, r"and \(2,\)"),
        ({"images": np.zeros((3, 4, 4)), "labels": np.zeros(3)}, "labels of integers"),
        (
            {"images": np.zeros((3, 4, 4), int), "labels": np.zeros(3, int)},
            "images of uint8",
        ),
        (
            {"images": np.zeros((3, 4, 4)), "labels": np.array([0, 1, -1])},
            "expected labels of 0 to 2 .*found -1",
        ),
        (
            {"images": np.zeros((3, 4, 4)), "labels": np.array([0, 1, 9])},
            "expected labels of 0 to 2 .*found 9",
        ),
        (
            {"images": np.zeros((1, 4, 4)), "labels": np.zeros(1, int)},
            "at least 2 imag",
        ),
        (
            {"images": np.array([None] * 3), "labels": np.zeros(3, int)},
            "expected arrays of NumPy",
        ),
    ],
)
def test_arrays_that_are_none(classify, tmp_path, arrays, message):
    np.savez(tmp_path / "a.npz", **arrays)
    with pytest.raises(DataError, match=message):
        classify(tmp_path / "a.npz")


def test_channels_that_do_not_fit(classify, tmp_path):
    np.savez(tmp_path / "a.npz", images=np.zeros((3, 4, 4, 2)), labels=np.arange(3))
    data = classify(tmp_path / "a.npz")
    with pytest.raises(DataError, match="expected 3 channels, found 2"):
        data.train[0]


def test_folders_that_are_none(classify, folder, tmp_path):
    (folder / "dog" / "notes.txt").write_text("no image")
    with pytest.raises(DataError, match=r"notes.txt: expected an image"):
        classify(folder)
    (tmp_path / "void").mkdir()
    with pytest.raises(DataError, match="0 folders and no image"):
        classify(tmp_path / "void")
    with pytest.raises(DataError, match="found no such file"):
        classify(tmp_path / "nowhere")
    with pytest.raises(DataError, match="this model takes no text"):
        classify()
    text = tmp_path / "a.txt"
    text.write_text("text")
    with pytest.raises(DataError, match="expected images: a folder for each class"):
        classify(text)


def test_table_without_images(classify, tmp_path):
    table = pa.table({"image": ["a", "b"], "label": [0, 1]})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(DataError, match="row 1: expected the bytes of an image"):
        classify(tmp_path / "a.parquet")


def jpeg(pixels, **options):
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "jpeg", quality=90, **options)
    return file.getvalue()


def of_size(content, mark, skip, form, *size):
    at = content.index(mark) + skip
    packed = struct.pack(form, *size)
    return content[:at] + packed + content[at + len(packed) :]


def with_bomb(folder, suffix, content):
    for path in folder.glob("*/*.png"):
        path.unlink()
        path.with_suffix(suffix).write_bytes(content)


def test_large_jpeg_is_decoded_at_a_half(classify, folder, monkeypatch):
    monkeypatch.setattr(images, "MOST_PIXELS", 32 * 32)
    shades = np.repeat(np.arange(0, 256, 4, dtype=np.uint8)[None], 64, axis=0)
    with_bomb(folder, ".jpg", jpeg(shades))
    decoded = []
    resized = images._resized
    monkeypatch.setattr(
        images,
        "_resized",
        lambda i, *rest: decoded.append(i.shape) or resized(i, *rest),
    )
    row = classify(folder, shape=(4, 4, 1)).train[0]["images"][0, :, 0]
    assert decoded == [(32, 32)]
    np.testing.assert_allclose(row, [-0.75, -0.25, 0.25, 0.75], atol=0.1)


@pytest.mark.parametrize(
    ("suffix", "content"),
    [
        (".png", of_size(png(pixels_of(0, 4, 4, 3)), b"IHDR", 4, ">I", 1 << 26)),
        (".gif", b"GIF89a" + b"\xff" * 4 + b"\0\0\0,\0\0\0\0\1\0\1\0\0\2\0;"),
        (".ppm", b"P6\n9000 9000\n255\n"),
        (
            ".jpg",
            of_size(jpeg(pixels_of(0, 4, 4)), b"\xff\xc0", 5, ">HH", 40000, 40000),
        ),
        (
            ".jpg",
            of_size(
                jpeg(pixels_of(0, 4, 4), progressive=True),
                *(b"\xff\xc2", 5, ">HH", 9000, 9000),
            ),
        ),
    ],
)
def test_decompression_bombs_are_refused(classify, folder, suffix, content):
    if suffix == ".png":
        head = content[12:29]
        content = content[:29] + struct.pack(">I", zlib.crc32(head)) + content[33:]
    with_bomb(folder, suffix, content)
    # Pillow has a limit of its own for larger ones that are no JPEG.
    with pytest.raises(DataError, match=r"at most 67,108,864 pixels|Decompression"):
        classify(folder).train[0]


def lying_npz(path, descr, shape, data=b""):
    header = repr({"descr": descr, "fortran_order": False, "shape": shape}) + "\n"
    member = b"\x93NUMPY\1\0" + struct.pack("<H", len(header)) + header.encode() + data
    np.savez(path, labels=np.arange(4))
    with zipfile.ZipFile(path, "a", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("images.npy", member)


@pytest.mark.parametrize(
    ("descr", "shape"),
    [
        ("|u1", (4, 2**20, 2**20)),
        ("|u1", (4, -4, 4)),
        ("|V0", (2**40, 4, 4)),
        ("<f8", (4, 4, 4)),
        ("|O", (4, 2, 2)),
        ("|u1", (4, 0, 2**40)),
    ],
)
def test_arrays_that_their_file_does_not_hold(classify, tmp_path, descr, shape):
    lying_npz(tmp_path / "a.npz", descr, shape, bytes(64))
    with pytest.raises(DataError, match=r"a.npz: expected .*(bytes|found|objects)"):
        classify(tmp_path / "a.npz")


def test_archives_that_are_damaged_or_too_large(classify, tmp_path, monkeypatch):
    path = tmp_path / "a.npz"
    lying_npz(path, "|u1", (4, 4, 4), bytes(64))
    assert len(classify(path).train) == 3
    monkeypatch.setattr(images, "MACHINE_MEMORY_BYTES", 200)
    with pytest.raises(DataError, match="and this machine has 200"):
        classify(path)
    whole = path.read_bytes()
    for cut in (3, 40, len(whole) - 30):
        path.write_bytes(whole[:cut])
        with pytest.raises(DataError, match=r"a.npz: expected arrays of NumPy: BadZip"):
            classify(path)


def test_pixels_have_to_be_finite(classify, tmp_path):
    np.savez(tmp_path / "a.npz", images=np.full((3, 4, 4), np.inf), labels=np.arange(3))
    with pytest.raises(DataError, match="expected finite pixels"):
        classify(tmp_path / "a.npz").train[0]


def test_labels_beyond_int32(classify, tmp_path):
    rows = [{"image": png(pixels_of(n, 4, 4, 3)), "label": 2**31 + n} for n in range(4)]
    pyarrow.parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    with pytest.raises(DataError, match="row 1: expected an integer label"):
        classify(tmp_path / "a.parquet", num_labels=2**32)
