"""What these tests have in common: how long to take, how to step."""

import os

LONG = os.environ.get("JAXINF_FAULTS") == "long"
"""Whether `make faults` runs, which takes its time."""


def step_durably(driver) -> None:
    """One step of a run; raises what its commit raises."""
    driver.step()
    driver.store.wait()
