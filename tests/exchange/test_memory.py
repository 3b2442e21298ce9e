"""Memory stays within its limit for leaves of any size."""

import pytest

PROGRAM = """
import resource, sys
from pathlib import Path
import jaxinf.exchange as exchange
from jaxinf.store import CopyLayout, StoreDirectory, copy_step, step_of
way, store, export, again = sys.argv[1], *map(Path, sys.argv[2:])
url = f"file://{export}"
step = step_of(StoreDirectory.open(store), store / "current")
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
if way == "copy_step":
    copy_step(exchange.export_source(url, 16 << 20), again, CopyLayout())
elif way == "export_url":
    exchange.export_url(step, url, options=exchange.ExportOptions(16 << 20))
else:
    exchange.export_safetensors(step, export, exchange.ExportOptions(8 << 20))
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


@pytest.mark.long
@pytest.mark.parametrize(
    ("shape", "chunk_elements", "ways"),
    [
        ((1600, 9999), 1 << 26, ["export_safetensors"]),  # 61 MiB, one chunk
        ((1 << 14, 1 << 10), 1 << 18, ["export_url", "copy_step"]),  # 240 MiB in all
    ],
)
def test_memory_does_not_grow_with_a_leaf(
    make_step, run_python, tmp_path, shape, chunk_elements, ways
):
    leaves = {("wide",): (shape, (1, 1))}
    step, _ = make_step(leaves=leaves, chunk_elements=chunk_elements)
    for way in ways:
        places = [step.path.parent, tmp_path / "export", tmp_path / "again"]
        done = run_python(PROGRAM, way, *places)
        assert int(done.stdout) << 10 < 40 << 20, way
