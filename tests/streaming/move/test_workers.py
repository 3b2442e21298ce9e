"""Threads and their queues: order, and what a reset drops."""

import threading

from jaxinf.streaming.move.workers import Workers


def test_jobs_of_a_queue_run_in_order():
    workers, found = Workers([1, 1], "jaxinf-test"), []
    with workers.changed:
        for number in range(20):
            workers.submit(number % 2, lambda n=number: found.append(n))
        workers.changed.wait_for(lambda: len(found) == 20)
    assert [n for n in found if n % 2] == list(range(1, 20, 2))
    assert [n for n in found if not n % 2] == list(range(0, 20, 2))
    workers.close()


def test_a_reset_drops_what_the_end_of_a_job_submits(monkeypatch):
    workers, ran = Workers([1], "jaxinf-test"), []
    begun, waiting = threading.Event(), threading.Event()

    def move():
        begun.set()
        assert waiting.wait(60)
        with workers.changed:
            workers.submit(0, lambda: ran.append("next"))

    with workers.changed:
        workers.submit(0, move)
        workers.submit(0, lambda: ran.append("queued"))
    assert begun.wait(60)
    real = workers.changed.wait_for

    def wait_for(predicate, timeout=None):
        waiting.set()  # the reset waits for the job
        return real(predicate, timeout)

    with monkeypatch.context() as patched:
        patched.setattr(workers.changed, "wait_for", wait_for)
        workers.reset()
    with workers.changed:
        workers.submit(0, lambda: ran.append("later"))
        workers.changed.wait_for(lambda: "later" in ran)
    assert ran == ["later"]
    workers.close()
