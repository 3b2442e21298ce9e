"""A killed creation: its files show their owner, and the next creation removes them."""

import signal
from pathlib import Path

import pytest
from store_driver import Driver

import jaxinf
from jaxinf.engine import convert_store
from jaxinf.errors import StoreFormatError
from jaxinf.store import StoreDirectory

LEAVES = {"half": ((33, 257), "bfloat16"), "w": ((3, 4096), "float32")}

CONVERT = Path(__file__).parents[1] / "programs" / "killed_conversion.py"
MOMENTS = [
    ("make_csds", 0),
    ("_claim", 0),  # directories without a note
    ("_claim", 1),
    ("create_documents", 0),
    ("_create_chunks", 3),
    ("publish", 0),
]


@pytest.fixture
def source(tmp_path):
    options = {"leaves": LEAVES, "chunk_elements": 4096}
    Driver(tmp_path / "store", **options).init().steps(2).close()
    return tmp_path / "store"


@pytest.mark.long
@pytest.mark.parametrize(("name", "after"), MOMENTS)
def test_a_conversion(run_python, source, tmp_path, name, after):
    new, roots = tmp_path / "new", [tmp_path / "csd0", tmp_path / "csd1"]
    for root in roots:
        root.mkdir()
    done = run_python(CONVERT, name, after, source, new, *roots, check=False)
    assert done.returncode == -signal.SIGKILL
    left = StoreDirectory.open(new)
    for csd, root in enumerate(roots):
        # If a root has files, the manifest names the root, and the root the store.
        found = list(root.iterdir())
        assert found in ([], [left.csd_directory(csd)])
        if found and list(found[0].iterdir()):
            assert str(new) in (found[0] / "store.json").read_text()
    assert convert_store(source, new, "bf16", csds=roots) == 2
    with jaxinf.open_store(new) as store:
        assert store.step == 2
    made = StoreDirectory.open(new)
    assert made.manifest.store_id != left.manifest.store_id
    for csd, root in enumerate(roots):
        assert list(root.iterdir()) == [made.csd_directory(csd)]


@pytest.mark.parametrize("place", ["checkpoints/kept", "slots/a"])
def test_a_step_is_not_taken_for_something_unfinished(source, tmp_path, place):
    """Neither is an export, which has a manifest and no committed slot."""
    driver = Driver(source, leaves=LEAVES).init()
    driver.store.checkpoint("kept")
    driver.close()
    target = source / place
    before = {p: p.stat().st_mtime_ns for p in target.rglob("*") if p.is_file()}
    with pytest.raises(StoreFormatError):
        convert_store(source, target, "bf16")
    assert {p: p.stat().st_mtime_ns for p in before} == before
    del tmp_path
