"""The trainer's help, and names of other programs' flags."""

import re

import pytest

from jaxinf.cli import main as jaxinf_main
from jaxinf.train import options
from jaxinf.train.__main__ import main
from jaxinf.train.run_file import _OTHER_NAMES

FLAGS = {f"--{name}" for name in options.FLAGS}


@pytest.mark.parametrize("words", [["train", "--help"], ["train", "-h"]])
def test_help_shows_each_flag(capsys, words):
    with pytest.raises(SystemExit) as ended:
        jaxinf_main(words)
    assert ended.value.code == 0
    listed = re.findall(r"(?m)^\W{1,3}(--\w[\w-]+)", capsys.readouterr().out)
    assert sorted(listed) == sorted(FLAGS)


@pytest.mark.parametrize(
    ("word", "answer"),
    [
        ("--lr", "write --learning-rate"),
        ("--num-train-epochs=3", "write --epochs"),
        ("--gradient_accumulation_steps", "--micro-batches"),
        ("--output-dir", "write --store"),
    ],
)
@pytest.mark.parametrize("start", [main, lambda w: jaxinf_main(["plan", *w])])
def test_names_of_other_programs_are_answered(start, word, answer, capsys):
    assert start([word, "1"]) == 2
    err = capsys.readouterr().err
    assert word.partition("=")[0].replace("_", "-") + ": not known" in err
    assert answer in err


def test_answers_name_flags():
    for names, answer in _OTHER_NAMES.items():
        assert FLAGS.issuperset(re.findall(r"--[\w-]+", answer))
        assert FLAGS.isdisjoint(f"--{name}" for name in names.split())
