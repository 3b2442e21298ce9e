"""``python -m jaxinf.train``: the command line of the trainer.

Invariant: a known error is one message on standard error, without a traceback. The exit
status is 2 for an error in the command line, 1 for one of the store, the drives or
the numbers, 3 if the run is complete and an export of it failed, and 130 or 143 if
SIGINT or SIGTERM stopped the run before its last step, which is committed.
"""

import logging
import sys
from collections.abc import Sequence

from jaxinf import compat
from jaxinf.command_line import UsageError
from jaxinf.errors import JaxinfError, printable
from jaxinf.train.loop import train
from jaxinf.train.run_file import parse_config


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the trainer, by default on the process's words; returns the exit status."""
    words = sys.argv[1:] if arguments is None else list(arguments)
    # JAX logs a callback's exception with a traceback before it raises it. The store
    # keeps the exception, which becomes the message here.
    logging.getLogger(compat.CALLBACK_LOGGER).setLevel(logging.CRITICAL)
    try:
        return train(parse_config(words))
    except UsageError as error:
        return _fail(2, error)
    except (JaxinfError, OSError) as error:
        return _fail(1, error)
    except KeyboardInterrupt:
        return 130


def _fail(status: int, error: Exception) -> int:
    text = printable(str(error), keep="\n")
    print(f"jaxinf.train: {text}", file=sys.stderr)
    return status


if __name__ == "__main__":
    sys.exit(main())
