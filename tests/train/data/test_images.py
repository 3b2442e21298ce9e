"""Images from folders: pixels, classes, refusals."""

import io
import struct
import zlib

import numpy as np
import pytest
from PIL import Image

from jaxinf.train.data.errors import DataError


def encoded(pixels, kind="png", **options):
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, kind, **options)
    return file.getvalue()


def pixels_of(seed, *shape):
    return np.random.default_rng(seed).integers(0, 256, shape, np.uint8)


def all_rows(rows):
    return [rows[number] for number in range(len(rows))]


@pytest.fixture
def classify(load):
    def call(*paths, shape=(4, 4, 3), **options):
        return load(*paths, task="classification", image_shape=shape, **options)

    return call


@pytest.fixture
def folder(tmp_path, write):
    for seed, name in enumerate(("cat/0", "cat/1", "dog/0", "dog/1")):
        write(f"pictures/{name}.png", encoded(pixels_of(seed, 4, 4, 3)))
    return tmp_path / "pictures"


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


def test_classes_of_the_parts_have_to_agree(classify, folder, write):
    bird = write("other/bird/x.png", encoded(pixels_of(9, 4, 4, 3)))
    with pytest.raises(DataError, match="classes 'cat', 'dog', found 'bird'"):
        classify(folder, validation=(str(bird.parents[1]),))


def test_resized(classify, folder):
    for path in folder.glob("*/*.png"):
        path.write_bytes(encoded(np.full((9, 5), 51, np.uint8)))
    row = classify(folder).train[0]["images"]
    np.testing.assert_allclose(row, np.full((4, 4, 3), -0.6), atol=1e-6)
    row = classify(folder, shape=(9, 5, 1)).train[0]["images"]
    np.testing.assert_allclose(row, np.full((9, 5, 1), -0.6), atol=1e-6)
    with pytest.raises(DataError, match="expected a model of 1, 3 or 4 channels"):
        classify(folder, shape=(4, 4, 2)).train[0]


def test_folders_that_are_none(classify, folder, tmp_path):
    (folder / "dog" / "notes.txt").write_text("no image")
    (tmp_path / "void").mkdir()
    (tmp_path / "a.txt").write_text("text")
    for paths, message in (
        ([folder], r"notes.txt: expected an image"),
        ([tmp_path / "void"], "0 folders and no image"),
        ([tmp_path / "nowhere"], r"nowhere: expected images, .*no image"),
        ([], "this model takes no text"),
        ([tmp_path / "a.txt"], r"a.txt: expected images, in a folder"),
    ):
        with pytest.raises(DataError, match=message):
            classify(*paths)
    (folder / "dog" / "notes.txt").unlink()
    for path in sorted(folder.glob("*/*.png"))[1:]:
        path.unlink()
    with pytest.raises(DataError, match="at least 2 imag"):
        classify(folder)


def of_size(content, mark, skip, form, *size):
    at = content.index(mark) + skip
    packed = struct.pack(form, *size)
    return content[:at] + packed + content[at + len(packed) :]


PIXELS = np.random.default_rng(0).integers(0, 256, (4, 4, 3), np.uint8)
PROGRESSIVE = encoded(PIXELS, "jpeg", progressive=True)


@pytest.mark.parametrize(
    ("suffix", "content"),
    [
        (".png", of_size(encoded(PIXELS), b"IHDR", 4, ">I", 1 << 26)),
        (".gif", b"GIF89a" + b"\xff" * 4 + b"\0\0\0,\0\0\0\0\1\0\1\0\0\2\0;"),
        (".ppm", b"P6\n9000 9000\n255\n"),
        (".jpg", of_size(encoded(PIXELS, "jpeg"), b"\xff\xc0", 5, ">HH", 40000, 40000)),
        (".jpg", of_size(PROGRESSIVE, b"\xff\xc2", 5, ">HH", 9000, 9000)),
        (".txt.png", b"no image"),
    ],
)
def test_decompression_bombs_and_damage_are_refused(classify, folder, suffix, content):
    if suffix == ".png":
        head = content[12:29]
        content = content[:29] + struct.pack(">I", zlib.crc32(head)) + content[33:]
    for path in folder.glob("*/*.png"):
        path.unlink()
        path.with_suffix(suffix).write_bytes(content)
    # Pillow has a limit of its own for larger ones.
    message = r"at most 67,108,864 pixels|Decompression"
    if content == b"no image":
        message = r"\d.txt.png: expected an image, .*; mend or rem"
    with pytest.raises(DataError, match=message):
        classify(folder).train[0]
