"""A loss function as programs: traced with its gradient, as a graph, cut into segments.

    trace ─► graph ─► cut ─────► programs
    jaxpr    nodes    segments   two for a segment, and sums of several parts of a batch

`lifetimes` orders the nodes and says what a cut costs; `keys` tells which programs are
equal. `initial` makes the first params. Where params and gradients are: `meshes`,
`units`.

Invariant: the user's function is never changed; the parts of its one jaxpr run.
"""
