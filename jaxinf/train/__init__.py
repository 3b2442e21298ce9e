"""The trainer: ``python -m jaxinf.train``.

Invariant: no package below imports this one; a user's own loop can do all that it does.
Files to read first: `config`, `loop`, `opening`.
"""
