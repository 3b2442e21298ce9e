"""A run that an earlier version trained goes on as that version went on.

If it was meant to change, say so in the changelog, and write the store anew:
``python tests/support/golden_training.py``.
"""

import pytest
from golden_training import losses, trained, unpacked


def test_the_golden_run_goes_on_from_its_step_and_batch(tmp_path, capsys):
    record = unpacked(tmp_path)
    assert trained(tmp_path, "--steps", 6) == 0
    assert "resuming at step 3" in capsys.readouterr().out
    found = losses(tmp_path)
    assert [*found] == [4, 5, 6]
    for step, loss in found.items():
        assert loss == pytest.approx(record["losses"][str(step)], rel=1e-4), step


def test_the_golden_run_goes_on_with_no_other_data(tmp_path, capsys):
    unpacked(tmp_path)
    data = tmp_path / "data.jsonl"
    data.write_text(data.read_text().replace("drive", "Drive", 1))
    assert trained(tmp_path, "--steps", 6) == 1
    assert "--data: the run has" in capsys.readouterr().err
