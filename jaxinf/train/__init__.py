"""The trainer: ``python -m jaxinf.train``.

Invariant: nothing below this package knows of it; what it does, a user's own loop can.
Files to read first: `config`, `loop`, `backend`.
"""
