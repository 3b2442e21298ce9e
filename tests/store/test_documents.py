"""A document with a flipped bit is refused."""

import shutil

import pytest
from golden_stores import golden

from jaxinf.errors import StoreFormatError
from jaxinf.store import CommitRecord, Manifest, StoreDirectory, seal, verify_step


@pytest.mark.long
@pytest.mark.parametrize("name", ["jaxinf.json", "commit.json"])
def test_any_flipped_bit_is_refused(tmp_path, name):
    kind = Manifest if name == "jaxinf.json" else CommitRecord
    file = tmp_path / name
    kind.read(golden("scalars") / "checkpoints/2" / name).write(file)
    whole = file.read_bytes()
    kind.read(file)
    for place in range(len(whole)):
        file.write_bytes(
            whole[:place] + bytes([whole[place] ^ 1 << place % 8]) + whole[place + 1 :]
        )
        with pytest.raises(StoreFormatError, match=name):
            kind.read(file)


def test_an_edited_document_says_how_to_restore_it(tmp_path):
    file = tmp_path / "commit.json"
    record = (golden("scalars") / "slots/b/commit.json").read_text()
    file.write_text(record.replace('"skipped_steps": 0', '"skipped_steps": 1'))
    with pytest.raises(
        StoreFormatError,
        match=r"edited or damaged: undo the edit.* checkpoint restore STORE NAME",
    ):
        CommitRecord.read(file)


def test_a_seal_is_the_last_key_and_stays_what_it_is():
    raw = seal({"crc32c": "00000000", "a": 1})
    assert raw.endswith(b"\n}\n")
    assert raw == seal({"a": 1})


@pytest.mark.parametrize("step", ["slots/b", "checkpoints/2"])
@pytest.mark.parametrize(
    "name",
    ["zarr.json", "_METADATA", "_CHECKPOINT_METADATA", "commit_success.txt"],
)
@pytest.mark.parametrize("is_gone", [False, True])
def test_verify_sees_what_other_tools_read(tmp_path, step, name, is_gone):
    path = shutil.copytree(golden("store"), tmp_path / "store", symlinks=True)
    directory = StoreDirectory.open(path)
    assert verify_step(directory, path / step) == []
    file = path / step / name
    content = file.read_bytes()
    file.unlink() if is_gone else file.write_bytes(b"[" + content[1:])
    [damage] = verify_step(directory, path / step)
    assert damage.what == name
    assert ("ENOENT" if is_gone else "cannot be read") in damage.problem
