"""Runs the scripts of `scripts/`, in processes of their own."""

import os
import subprocess
import sys
from pathlib import Path

SCRIPTS = Path(__file__).parents[2] / "scripts"


def run_script(name, *arguments):
    command = [sys.executable, str(SCRIPTS / name), *map(str, arguments)]
    beside = {**os.environ, "PYTHONSAFEPATH": ""}  # scripts import each other
    return subprocess.run(
        command, env=beside, capture_output=True, text=True, check=False
    )
