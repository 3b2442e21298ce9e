"""Runs a program of `program_styles` and is killed at its fifth step.

python killed_style.py STYLE FOLDER
"""

import os
import signal
import sys
from pathlib import Path

from program_styles import run_changed


def kill(number):
    if number == 5:
        os.kill(os.getpid(), signal.SIGKILL)


run_changed(sys.argv[1], Path(sys.argv[2]), kill=kill)
