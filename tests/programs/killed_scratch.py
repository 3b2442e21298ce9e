"""Writes a value of 32 MiB to scratch files in a folder, and is killed."""

import os
import signal
import sys

import numpy as np

from jaxinf.streaming.move.scratch import PART_BYTES, Scratch
from jaxinf.transfer.pool import aligned


def main(folder):
    scratch = Scratch([folder])
    place = scratch.allocate(32 << 20)
    scratch.reserve()
    for part in place.parts:
        scratch.write(part, np.ones(32 << 20, np.uint8), aligned(PART_BYTES))
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main(*sys.argv[1:])
