"""What notebooks start with: cells of commands whose output is text, and that may fail.

IPython's own ``%%bash`` prints colours, and in pieces of 100 bytes.
"""

import os
import subprocess
import sys

from IPython.core.magic import register_cell_magic


@register_cell_magic
def bash(line: str, cell: str) -> None:
    """Runs the cell; its output is shown at the end, and an error is one."""
    env = {k: v for k, v in os.environ.items() if "COLOR" not in k}
    command = ["bash", "-euo", "pipefail", "-c", cell]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    print("\n".join(text.rstrip() for text in done.stdout.splitlines()))
    if done.returncode:
        print(done.stderr, file=sys.stderr)
        done.check_returncode()
