"""Writes a value of 32 MiB to scratch files in a folder, and is killed."""

import os
import signal
import sys

import numpy as np

from jaxinf.streaming.move.scratch import Scratch


def main(folder):
    scratch = Scratch([folder])
    (place,) = scratch.allocate([32 << 20])
    for part in place:
        scratch.write(part, np.ones(32 << 20, np.uint8))
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main(*sys.argv[1:])
