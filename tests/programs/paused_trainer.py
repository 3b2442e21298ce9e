"""The trainer on a tiny model, which pauses before one of its batches.

    python paused_trainer.py NUMBER FILE WORD...

It takes so many batches, says so, and takes the next one when the file is there.
"""

import sys
import time
from pathlib import Path

from jaxinf_models import PRESETS, GPT2Config

from jaxinf.train import loop
from jaxinf.train.__main__ import main
from jaxinf.train.data.loader import iterate_from


def pausing(number, file):
    def coming(batches, position):
        for i, batch in enumerate(iterate_from(batches, position)):
            if i == number:
                print("paused", flush=True)
                while not file.exists():
                    time.sleep(0.01)
            yield batch

    return coming


if __name__ == "__main__":
    tiny = GPT2Config(256, 16, num_layers=1, num_heads=2, num_features=16)
    PRESETS["nano"] = tiny
    program, number, file, *words = sys.argv
    loop.iterate_from = pausing(int(number), Path(file))
    sys.argv = [program, *words]
    sys.exit(main())
