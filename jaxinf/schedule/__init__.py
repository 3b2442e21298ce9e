"""What is in memory during each call of a step, and what leaves to make room.

Invariant: pure functions of call numbers and bytes, whatever the tensors are.
"""
