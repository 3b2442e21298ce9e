import errno
import json
import os

import pytest

from jaxinf.errors import StoreIOError
from jaxinf.store import steps

STORE_KEYS = (
    "store store_id created_by pinned warnings step committed_at skipped_steps "
    "num_params leaves state_bytes disk_bytes checkpoints drives writer"
).split()


def test_document_of_a_store(trained, run_json):
    found = run_json("inspect", trained)
    assert list(found) == STORE_KEYS
    num_params = 300 * 128 + 129 + 1
    assert found["store"] == str(trained)
    assert (found["step"], found["skipped_steps"]) == (3, 0)
    assert found["num_params"] == num_params
    assert found["pinned"] is True
    assert found["writer"] is None
    assert found["warnings"] == []
    assert set(found["created_by"]) >= {"jaxinf", "jax", "optax"}
    names = ("params", "mu", "nu")
    assert found["state_bytes"] == dict.fromkeys(names, 4 * num_params)


def test_text_has_it_all_and_nothing_stays(trained, run):
    result = run("inspect", trained)
    assert result.status == 0
    assert result.err == ""
    for part in (
        str(trained),
        "38,530 in 3 leaves",
        "h/0/kernel",
        "(300, 128)",
        "float16",
        "params mu nu float32",
        f"{trained}/current/params.h.0.bias",
        "none on this machine",
    ):
        assert part in result.out
    assert max(map(len, result.out.splitlines())) < 200
    assert not list((trained / "snapshots").iterdir())


@pytest.mark.parametrize("code", [errno.EROFS, errno.EACCES])
def test_a_store_that_cannot_be_written_is_read(trained, code, run, monkeypatch):
    def refuse(directory):
        raise StoreIOError("no") from OSError(code, os.strerror(code))

    monkeypatch.setattr(steps, "pinned_step", refuse)
    result = run("inspect", trained, "--json")
    assert result.status == 0
    assert result.err.startswith("warning: ")
    assert "chunks may be of different steps" in result.err
    document = json.loads(result.out)
    assert document["pinned"] is False
    assert len(document["warnings"]) == 1


@pytest.mark.parametrize(
    ("name", "text", "part"),
    [
        ("gone", None, "found nothing"),
        ("file", None, "found a file"),
        ("", None, "found no jaxinf.json"),
        *(("", text, "jaxinf.json") for text in ("", "{", "[]", "\x00")),
    ],
)
def test_not_a_store(tmp_path, run, name, text, part):
    (tmp_path / "file").touch()
    if text is not None:
        (tmp_path / "jaxinf.json").write_text(text)
    result = run("inspect", tmp_path / name)
    assert (result.status, result.out) == (1, "")
    assert result.err.startswith("jaxinf: ")
    assert result.err.count("\n") == 1
    assert part in result.err
