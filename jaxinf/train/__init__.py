"""The trainer: ``python -m jaxinf.train``.

Invariant: everything here is built on the public API alone; what it does, a user's own
loop can do. Files to read first: `config`, `loop`, `backend`.
"""
