"""Values on a drive that fails: real reads and writes, made to fail."""

import errno

import pytest
from shim import asked


@pytest.fixture(scope="module")
def child(tmp_path_factory):
    """Starts `stream_child`, once for all cases, since the start takes seconds."""
    folder = tmp_path_factory.mktemp("values")
    build = tmp_path_factory.mktemp("shim")
    with asked("stream_child.py", folder, build=build) as ask:
        yield ask
    assert not list(folder.iterdir())


@pytest.fixture(scope="module")
def expected(child):
    """Losses without a failure."""
    answer = child(policy="offload")
    assert not answer["told"]
    return answer["losses"]


@pytest.mark.parametrize(
    ("call", "code", "kind"),
    [
        ("pwritev", errno.ENOSPC, "StoreSpaceError"),
        ("pwritev", errno.EIO, "StoreIOError"),
        ("preadv", errno.EIO, "StoreIOError"),
    ],
)
def test_values_that_cannot_be_moved_end_the_step(child, expected, call, code, kind):
    answer = child(policy="offload", call=call, errno=code, after=5)
    assert answer["hits"] > 0
    assert answer["error"].startswith(kind)
    assert "a file of activations" in answer["error"]
    assert answer["losses"] == expected[:6]  # the step was given up, then made again
