"""Training on emulated cards equals training on the host, to the bit."""

import json

import numpy as np
import pytest

pytestmark = pytest.mark.cards


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_losses_are_the_hosts(run, losses, lines, tmp_path, dtype):
    words = ["--param-dtype", dtype]
    for number in range(4):
        (tmp_path / f"csd{number}").mkdir()
        words += ["--csd-root", tmp_path / f"csd{number}"]
    cards = [*words, "--csd", "emulated", "--store", tmp_path / "cards"]
    assert run(*words, "--store", tmp_path / "host", "--steps", 6) == 0
    assert run(*cards, "--steps", 3) == 0
    assert run(*cards, "--steps", 6) == 0
    assert losses(tmp_path / "cards-log") == losses(tmp_path / "host-log")
    leaves = json.loads((tmp_path / "cards/jaxinf.json").read_text())["leaves"]
    num_params = sum(np.prod(leaf["shape"], dtype=int) for leaf in leaves)
    item_bytes = 4 if dtype == "float32" else 2
    for line in lines(tmp_path / "cards-log"):
        assert line["link_down_bytes"] == item_bytes * num_params  # gradients alone
        assert line["link_up_bytes"] == item_bytes * num_params
