"""Moves tensors between drives, the host and the JAX device while programs run.

Invariant: what is in memory at any time is what the plan says; a tensor comes back with
its bits.
"""
