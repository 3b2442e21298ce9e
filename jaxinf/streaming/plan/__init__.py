"""The plan of a step: its calls in order, and where each tensor is during each of them.

Invariant: memory is decided here, before a step runs, call by call and tier by tier.
"""
