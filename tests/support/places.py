"""Helpers of the fault tests: their length, and a durable step."""

import os

LONG = os.environ.get("JAXINF_FAULTS") == "long"
"""Whether `make faults` runs, with long tests."""


def step_durably(driver) -> None:
    """Makes a step of a run; raises the errors of its commit."""
    driver.step()
    driver.store.wait()
