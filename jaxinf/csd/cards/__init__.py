"""FPGA cards: their kinds of CSD, their memory, and the runtime that drives them.

Invariant: pyxrt is imported here alone, and at first use.
"""
