"""Runs of equal parts in sequences of tokens."""

from hypothesis import given
from hypothesis import strategies as st

from jaxinf.streaming.program.cut import Run, find_runs


def test_a_model_is_blocks_between_other_things():
    tokens = *"embed", *("abcb" * 12), *"head"
    assert find_runs(tokens) == [Run(5, 4, 48)]


def test_encoder_and_decoder_are_two_runs():
    tokens = *"x", *("ab" * 6), *"y", *("abcdc" * 4), *"z"
    assert find_runs(tokens) == [Run(1, 2, 12), Run(14, 5, 20)]


def test_twice_is_no_run():
    assert find_runs(tuple("abcabc")) == []
    assert find_runs(()) == []


@given(st.lists(st.sampled_from("abc"), max_size=40))
def test_runs_repeat_and_do_not_overlap(tokens):
    end = 0
    for run in find_runs(tuple(tokens)):
        assert run.start >= end
        end = run.start + run.length
        assert run.length >= 3 * run.period
        assert (
            tokens[run.start : end - run.period]
            == (tokens[run.start + run.period : end])
        )
    assert end <= len(tokens)
