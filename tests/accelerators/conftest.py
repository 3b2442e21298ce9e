"""Finds the plugins for other platforms.

They are not in the environment of the other tests, where JAX would start them.
"""

import os
import sys

import pytest

PLUGINS = os.environ.get("JAXINF_TEST_ACCELERATORS")
if PLUGINS and PLUGINS not in sys.path:
    sys.path.append(PLUGINS)

collect_ignore_glob = [] if PLUGINS else ["test_*.py"]


@pytest.fixture(autouse=True, scope="session")
def keeps_what_is_compiled():
    """Replaces the suite's: nothing here is compiled twice."""
