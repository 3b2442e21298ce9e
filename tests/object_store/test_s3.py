"""Exports to an S3-compatible server that answers, fails, forgets and lies."""

import re
from pathlib import Path

import pytest
from copies import chunks_of, copied
from store_driver import Driver

from jaxinf.cli.commands import main
from jaxinf.errors import ExchangeError
from jaxinf.exchange import ObjectStore, export_url
from jaxinf.store import StoreDirectory, read_step

LEAVES = {"w": ((6, 4096), "float32"), "half": ((33, 257), "bfloat16")}
KILLED = Path(__file__).parents[1] / "programs/killed_export.py"


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    path = tmp_path_factory.mktemp("s3") / "store"
    driver = Driver(path, leaves=LEAVES, chunk_elements=4096, state="bf16")
    driver.init().steps(2).close()
    return path


@pytest.fixture
def step(store):
    return read_step(StoreDirectory.open(store), store / "current")


def is_put_of(environ, name):
    return environ["REQUEST_METHOD"] == "PUT" and environ["PATH_INFO"].endswith(name)


def test_there_and_back_by_commands(store, tmp_path, capsys):
    url = "s3://bucket/runs/first"
    assert main(["checkpoint", "export", str(store), url]) == 0
    assert f"{url}: step 2" in capsys.readouterr().out
    made = tmp_path / "made"
    assert main(["store", "copy", url, str(made)]) == 0
    assert main(["verify", str(made)]) == 0
    assert chunks_of(made) == chunks_of(store)
    place = ObjectStore(url)
    texts = [place.read(name) for name in place.names() if name.endswith(".json")]
    out = capsys.readouterr()
    said = [out.out.encode(), out.err.encode(), *texts]
    assert not any(b"AKIA" in text or b"a-secret" in text for text in said)


@pytest.mark.parametrize("name", ["params.w/c/3/0", "export.json"])
def test_a_server_that_drops_an_object(s3, step, tmp_path, name):
    url = f"s3://bucket/drop-{name[:6]}"
    s3.fault = lambda environ: ("200 OK", b"") if is_put_of(environ, name) else None
    with pytest.raises(ExchangeError, match=f"{re.escape(name)}: .*found none"):
        export_url(step, url)
    s3.fault = None
    with pytest.raises(ExchangeError, match="export was interrupted"):
        copied(url, tmp_path / "made")
    export_url(step, url)
    copied(url, tmp_path / "made")
    assert StoreDirectory.open(tmp_path / "made").read_commit().step == 2


def test_a_bucket_that_is_not_there_or_forbidden(s3, step, capfd):
    with pytest.raises(ExchangeError, match="NoSuchBucket") as caught:
        export_url(step, "s3://nobucket/a")
    body = b"<Error><Code>AccessDenied</Code><Key>AKIAOFTHETEST</Key></Error>"
    s3.fault = lambda environ: (
        ("403 Forbidden", body) if environ["REQUEST_METHOD"] == "PUT" else None
    )
    with pytest.raises(ExchangeError, match=r"cannot write export-begun\.json") as also:
        export_url(step, "s3://bucket/forbidden")
    for error in (caught, also):
        assert "AKIA" not in str(error.value)
    assert [r for r in s3.requests if r[0] == "PUT" and "begun" not in r[1]] == []


def test_interrupted_twenty_times_at_random_bytes(step, store, tmp_path, run_python):
    run_python(KILLED, store, "s3://bucket/killed", 20)
    copied("s3://bucket/killed", tmp_path / "made")
    assert chunks_of(tmp_path / "made") == chunks_of(store)
