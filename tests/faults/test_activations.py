"""Values on a drive that fails: real reads and writes, made to fail."""

import errno
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def child(tmp_path_factory):
    """Starts `stream_child`, once for all cases, since the start takes seconds."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler to build the shim with")
    library = tmp_path_factory.mktemp("shim") / "shim.so"
    flags = ["-shared", "-fPIC", "-O1", "-o", library, HERE / "shim.c", "-ldl"]
    subprocess.run([compiler, *flags], check=True)
    environment = {**os.environ, "LD_PRELOAD": str(library), "JAX_PLATFORMS": "cpu"}
    folder = tmp_path_factory.mktemp("values")
    with subprocess.Popen(
        [sys.executable, HERE / "stream_child.py", folder],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        stdin, stdout = process.stdin, process.stdout

        def ask(**case):
            print(json.dumps(case), file=stdin)
            stdin.flush()
            return json.loads(stdout.readline())

        yield ask
        stdin.close()
    assert not list(folder.iterdir())


@pytest.fixture(scope="module", params=["offload", "plan"])
def policy(request):
    return request.param


@pytest.fixture(scope="module")
def expected(child, policy):
    """Losses without a failure."""
    answer = child(policy=policy)
    assert not answer["told"]
    return answer["losses"]


@pytest.mark.parametrize("after", [0, 5])
def test_values_that_cannot_be_read_are_computed_again(child, expected, policy, after):
    answer = child(policy=policy, call="preadv", errno=errno.EIO, after=after)
    assert answer["written_bytes"] > 0
    assert answer["hits"] > 0
    assert answer["losses"] == expected
    assert all("the value was computed again" in text for text in answer["told"])
    assert answer["told"]


@pytest.mark.parametrize(
    ("code", "kind"), [(errno.ENOSPC, "StoreSpaceError"), (errno.EIO, "StoreIOError")]
)
def test_values_that_cannot_be_written_end_the_step(
    child, expected, policy, code, kind
):
    answer = child(policy=policy, call="pwritev", errno=code, after=5)
    assert answer["hits"] > 0
    assert answer["error"].startswith(kind)
    assert "a file of activations" in answer["error"]
    assert answer["losses"] == expected[:6]  # the step was given up, then made again
