"""Every small change of a document of ours is refused, or is known to be no matter."""

import contextlib
import json

import pytest
from fuzzing import changes

from jaxinf.errors import JaxinfError
from jaxinf.store import StoreDirectory, seal

ALLOWED = {
    ("created_by", "*"): {"dropped", "other text"},  # for people
    ("committed_at",): {"other text"},
    ("kernels", "*"): {"item dropped", "item twice"},  # compared with the optimizer's
    ("kernels", "*", "*"): {"other text"},
    ("leaves", "*", "shard_counts", "*"): {"one more"},
    ("leaves", "*", "shape", "*"): {"one more"},  # compared with the chunks' files
    ("leaves", "*", "chunk_shape", "*"): {"one more"},
    ("step",): {"one more"},  # nothing else has it
    ("skipped_steps",): {"one more"},
    ("scalar_state",): {"item dropped"},  # compared with the optimizer's
    ("scalar_state", "*", "path"): {"other text"},
    ("scalar_state", "*", "value"): {"dropped", "other text"},  # for people
    ("documents",): {"dropped"},  # of older stores, and not used
    ("documents", "*"): {"dropped"},
    ("to", "csds"): {"item twice"},
}
"""Changes that leave a document of the format, and why that is no matter."""


@pytest.fixture(params=["store", "scalars"])
def store(request, golden_store):
    return golden_store(request.param)


def test_of_the_manifest(store):
    assert refused_but_for(store / "jaxinf.json", lambda: opened(store)) > 500


def test_of_the_record(store):
    file = store / "current/commit.json"
    assert refused_but_for(file, lambda: opened(store)) > 100


def test_a_key_that_comes_twice(store):
    for file in (store / "jaxinf.json", store / "current/commit.json"):
        whole = file.read_text()
        file.write_text(whole.replace("{", '{"format_version": 3,', 1))
        with pytest.raises(JaxinfError, match="a key comes twice"):
            opened(store)
        file.write_text(whole)


def opened(store):
    return StoreDirectory.open(store).read_commit()


def refused_but_for(file, read):
    """Makes each change, and expects that `read` refuses it; returns how many."""
    whole = file.read_bytes()
    document = json.loads(whole)
    del document["crc32c"]
    refused, accepted = 0, []
    for change, new in changes(document):
        file.write_text(json.dumps(new))
        with contextlib.suppress(TypeError, ValueError, AttributeError):
            file.write_bytes(seal(new))
        try:
            read()
        except JaxinfError:
            refused += 1
        else:
            accepted.append(change)
    file.write_bytes(whole)
    read()
    assert not [change for change in accepted if not is_allowed(*change)]
    return refused


def is_allowed(path, kind):
    if path[:1] == ("payload",) and (len(path) > 1 or kind != "dropped"):
        return True
    return any(
        kind in kinds
        and len(path) == len(known)
        and all(b in ("*", a) for a, b in zip(path, known, strict=True))
        for known, kinds in ALLOWED.items()
    )
