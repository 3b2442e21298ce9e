"""Threads and their queues: order, and what a reset drops."""

import threading

from jaxinf.streaming.move.workers import Job, Workers


def test_jobs_of_a_queue_run_in_order():
    workers, found = Workers([1, 1]), []
    with workers.changed:
        for number in range(20):
            job = Job(lambda _, n=number: n, lambda moved, _: found.append(moved))
            workers.submit(number % 2, job)
        workers.changed.wait_for(lambda: len(found) == 20)
    assert [n for n in found if n % 2] == list(range(1, 20, 2))
    assert [n for n in found if not n % 2] == list(range(0, 20, 2))
    workers.close()


def test_an_error_is_handed_on():
    workers, found = Workers([1]), []
    with workers.changed:
        workers.submit(0, Job(lambda _: 1 // 0, lambda *ended: found.append(ended)))
        workers.changed.wait_for(lambda: found)
    ((moved, error),) = found
    assert moved is None
    assert isinstance(error, ZeroDivisionError)
    workers.close()


def test_a_reset_drops_what_the_end_of_a_job_submits(monkeypatch):
    workers, ran = Workers([1]), []
    begun, waiting = threading.Event(), threading.Event()

    def move(bounce):
        begun.set()
        assert waiting.wait(60)

    def ended(moved, error):
        workers.submit(0, Job(lambda _: ran.append("next"), lambda *_: None))

    with workers.changed:
        workers.submit(0, Job(move, ended))
        workers.submit(0, Job(lambda _: ran.append("queued"), lambda *_: None))
    assert begun.wait(60)
    real = workers.changed.wait_for

    def wait_for(predicate, timeout=None):
        waiting.set()  # the reset waits for the job
        return real(predicate, timeout)

    with monkeypatch.context() as patched:
        patched.setattr(workers.changed, "wait_for", wait_for)
        workers.reset()
    with workers.changed:
        workers.submit(0, Job(lambda _: ran.append("later"), lambda *_: None))
        workers.changed.wait_for(lambda: "later" in ran)
    assert ran == ["later"]
    workers.close()
