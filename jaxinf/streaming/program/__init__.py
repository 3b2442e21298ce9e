"""A loss function as programs: traced with its gradient, as a graph, cut into segments.

Invariant: the user's function is never changed; the parts of its one jaxpr run.
"""
