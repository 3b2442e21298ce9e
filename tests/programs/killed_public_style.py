"""Runs a program of `public_styles` and is killed in its fifth step, or third.

python killed_public_style.py STYLE FOLDER
"""

import os
import signal
import sys
from pathlib import Path

from program_styles import Run
from public_styles import all_changes, run_style

from jaxinf.engine.steps import StepEngine

style, place = sys.argv[1], Path(sys.argv[2])
FINISH = StepEngine.finish


def kill(number):
    if number == 5 and style != "purejaxrl":
        os.kill(os.getpid(), signal.SIGKILL)


def finish_or_die(steps, step, *arguments, **named):
    if step == 3 and style == "purejaxrl":  # its steps begin in one jit
        os.kill(os.getpid(), signal.SIGKILL)
    return FINISH(steps, step, *arguments, **named)


StepEngine.finish = finish_or_die
run_style(style, all_changes(style), Run(place, kill=kill))
