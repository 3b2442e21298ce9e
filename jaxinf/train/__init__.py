"""The trainer: ``python -m jaxinf.train``.

Where a question is answered:

    which flags there are, and defaults  config.py, optimizers.py
    what a wrong flag is told            checks.py
    how a run is read from a file        run_file.py
    whether a run may go on              resume.py
    what a step is, in each mode         modes.py, step.py
    the loop                             loop.py
    where rows come from                 data/files.py, data/rows.py, data/texts.py
    what `jaxinf plan` counts            count.py

Invariant: no package below imports this one; a user's own loop can do all that it does.
"""
