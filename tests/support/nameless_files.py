"""Failures of drives that hold files without names."""

import os

__all__ = ["failing"]


def failing(patched, call, code, numbers):
    """Lets calls of these numbers fail, on files that have no name."""
    real, hits = getattr(os, call), []

    def fail(fd, *args):
        if "(deleted)" in os.readlink(f"/proc/self/fd/{fd}"):
            hits.append(fd)
            if len(hits) in numbers:
                raise OSError(code, os.strerror(code))
        return real(fd, *args)

    patched.setattr(os, call, fail)
