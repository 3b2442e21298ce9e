"""FPGA cards: their kinds of CSD, their memory, and the runtime that drives them.

Invariant: XRT is loaded here alone, and at first use.
"""
