"""Flips a bit of a chunk."""

from jaxinf.store import StoreDirectory

LEAVES = {"w": ((300, 1025), "float32"), "s": ((), "float32"), "h": ((77,), "bfloat16")}


def flip(driver, leaf, state, byte=0, chunk=0):
    """Flips one bit of a committed chunk; returns its file."""
    number = list(driver.leaves).index(leaf)
    directory = StoreDirectory.open(driver.store.path)
    file = directory.chunk_file(directory.committed_slot(), number, chunk, state)
    with open(file, "r+b") as opened:
        opened.seek(byte)
        value = opened.read(1)[0]
        opened.seek(byte)
        opened.write(bytes([value ^ 4]))
    return file
