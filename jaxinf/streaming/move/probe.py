"""Measures the bandwidth of drives between steps, with a few bytes.

Invariant: nothing is left on a drive, and its traffic is not a step's.
"""

import time
from collections.abc import Callable, Sequence

import numpy as np

from jaxinf.errors import StoreError
from jaxinf.io.buffers import aligned
from jaxinf.streaming.move.scratch import Folders, Part, Place, Scratch
from jaxinf.streaming.plan.forms import PART_BYTES
from jaxinf.streaming.plan.retrying import Moved


def probe(folders: Folders) -> dict[str, Moved]:
    """Writes a part of 4 MiB to each drive and reads it back; blocks.

    It takes 8 MiB of memory, less than writing values takes, which no one does then.

    Returns:
      What was `"written"` and `"read"`; empty if a drive is full or fails.
    """
    scratch = Scratch(folders)
    raw, bounce = aligned(PART_BYTES), aligned(PART_BYTES)
    raw[:] = np.frombuffer(np.random.default_rng(0).bytes(PART_BYTES), np.uint8)
    places = [scratch.allocate(PART_BYTES) for _ in folders]
    try:
        scratch.reserve()
        return {
            "written": _moved(places, lambda part: scratch.write(part, raw, bounce)),
            "read": _moved(places, lambda part: scratch.read(part, raw, bounce)),
        }
    except StoreError:
        return {}
    finally:
        scratch.close()


def _moved(places: Sequence[Place], move: Callable[[Part], object]) -> Moved:
    began_s = time.perf_counter()
    for place in places:
        for part in place.parts:
            move(part)
    seconds = time.perf_counter() - began_s
    return Moved(sum(place.num_bytes for place in places), seconds)
