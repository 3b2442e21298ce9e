"""The gradients of a step: summed over micro-batches, and taken by an optimizer.

Invariant: an update happens once, when its gradient is complete.
"""
