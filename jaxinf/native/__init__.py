"""C++ that is compiled here: the toolchain, shared headers, libraries and their cache.

Invariant: the same source gives the same bits whatever compiler and level it is
compiled with.
"""
