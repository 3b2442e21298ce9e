"""Threads and their queue: order, and what a reset drops."""

import gc
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


def test_threads_end_with_their_jobs_and_the_process():
    jobs = Jobs("jaxinf-test-of-ends", 2)
    jobs.submit(lambda: None)
    own = [one for one in threading.enumerate() if one.name == "jaxinf-test-of-ends"]
    del jobs
    gc.collect()
    for thread in own:
        thread.join(60)
    assert [thread.is_alive() for thread in own] == [False] * 2


def test_a_thread_that_outlives_the_main_one_goes_on(run_python):
    code = """
import threading
from jaxinf.streaming.move.jobs import Jobs

def train():
    threading.main_thread().join()
    ran = threading.Event()
    jobs.submit(ran.set)
    print(ran.wait(60))
    jobs.submit(threading.Event().wait)  # a drive that never answers

jobs = Jobs("jaxinf-test")
jobs.submit(lambda: None)
threading.Thread(target=train).start()
"""
    assert run_python(code).stdout == "True\n"
