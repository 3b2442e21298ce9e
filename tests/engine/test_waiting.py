"""A process waits for another one as long as that reports progress."""

import time

import pytest

from jaxinf.engine import members


class Service:
    """A coordination service with one key, which is there after a time."""

    def __init__(self, after_s):
        self.at_s = time.monotonic() + after_s

    def get(self, key, timeout_s):
        del key
        left_s = self.at_s - time.monotonic()
        time.sleep(max(0, min(timeout_s, left_s)))
        return "there" if left_s <= timeout_s else None


@pytest.fixture
def heard(monkeypatch):
    monkeypatch.setattr(members, "LIMIT_S", 0.3)
    monkeypatch.setattr(members, "SLICE_S", 0.05)

    def wait(after_s, progress, gone=dict):
        service, now_s = Service(after_s), time.monotonic()
        return members._Waiting(service, gone, progress, now_s).heard("key", 1)

    return wait


def test_progress_extends_the_wait(heard):
    assert heard(1.0, lambda: {1: str(time.monotonic())}) == "there"


def test_progress_counts_while_another_is_waited_for(monkeypatch):
    monkeypatch.setattr(members, "LIMIT_S", 0.3)
    monkeypatch.setattr(members, "SLICE_S", 0.05)

    def progress():
        return dict.fromkeys((1, 2), str(time.monotonic()))

    waiting = members._Waiting(Service(1.0), dict, progress, time.monotonic())
    assert waiting.heard("key", 1) == "there"
    waiting._service = Service(0.2)
    assert waiting.heard("key", 2) == "there"


@pytest.mark.parametrize("said", [{}, {1: "7"}, {0: "other"}])
def test_silence_ends_it(heard, said):
    began_s = time.monotonic()
    assert heard(60, lambda: said) is None
    assert time.monotonic() - began_s < 30


def test_that_of_another_process_does_not_count(heard):
    assert heard(60, lambda: {0: str(time.monotonic())}) is None


def test_one_that_is_gone_is_not_waited_for(heard, monkeypatch):
    monkeypatch.setattr(members, "LIMIT_S", 600)
    assert heard(60, dict, gone=lambda: {1: "it closed the store"}) is None
