"""A store that an earlier version streamed to goes on as that version went on.

If it was meant to change, say so in the changelog, and write the store anew:
``python tests/support/golden_streams.py``.
"""

import json

import jax
import numpy as np
import pytest
from golden_streams import CUTS, PARAMS, edit, opened, run, streams, unpacked

pytestmark = pytest.mark.optimized


@pytest.mark.long
@pytest.mark.parametrize("kept_in", ["file", "record"])
def test_the_golden_store_goes_on_to_the_bit(tmp_path, kept_in):
    path, record = unpacked(tmp_path)
    (file,) = (path / "stream").iterdir()
    if kept_in == "record":
        plan = json.loads(file.read_text())
        del plan["crc32c"]
        edit(path / "current/commit.json", streams={file.stem: plan})
        file.unlink()
    files = [*(path / "stream").iterdir()]
    step = opened(path)
    assert step.store.step == 2
    if jax.__version__ == record["jax"]:
        assert run(step, 2) == record["losses"][2:]
        assert list(step.plan.cuts) == CUTS
    else:
        # Another version of JAX may trace another program, whose plan is refused.
        step.close()
        step = opened(path, replan=True)
        assert run(step, 2) == record["losses"][2:]
    found = step.store.params(like=PARAMS)
    jax.tree.map(np.testing.assert_array_equal, found, record["params"])
    step.close()
    assert [tuple(one["cuts"]) for one in streams(path).values()] == [step.plan.cuts]
    assert [*(path / "stream").iterdir()] == files


def test_its_losses_are_those_of_a_new_store(tmp_path):
    _, record = unpacked(tmp_path)
    step = opened(tmp_path / "new")
    assert run(step, 4) == record["losses"]
    assert list(step.plan.cuts) != CUTS
    step.close()
