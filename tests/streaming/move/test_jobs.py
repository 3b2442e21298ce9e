"""Threads and their queue: order, and what a reset drops."""

import threading

from jaxinf.streaming.move.jobs import Jobs


def test_jobs_run_in_order():
    jobs, found = Jobs("jaxinf-test"), []
    with jobs.changed:
        for number in range(20):
            jobs.submit(lambda n=number: found.append(n))
        jobs.changed.wait_for(lambda: len(found) == 20)
    assert found == [*range(20)]
    jobs.close()


def test_a_reset_waits_for_a_job_and_drops_the_others():
    jobs, ran, ended = Jobs("jaxinf-test"), [], []
    begun, goes_on = threading.Event(), threading.Event()

    def move():
        begun.set()
        assert goes_on.wait(60)
        ran.append("first")

    jobs.submit(move, ended.append)
    jobs.submit(lambda: ran.append("second"), ended.append)
    assert begun.wait(60)
    threading.Timer(0.05, goes_on.set).start()
    jobs.reset()
    assert ran == ["first"]
    assert sorted(move.cancelled() for move in ended) == [False, True]
    jobs.submit(lambda: ran.append("later"))
    jobs.close()
    assert ran[1:] in ([], ["later"])
