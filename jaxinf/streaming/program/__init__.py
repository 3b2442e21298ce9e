"""A loss function as programs: traced with its gradient, as a graph, cut into segments.

    trace ─► inline ─► lifetimes ─► cut ─────► programs
    jaxpr    graph     order and    segments   two for a segment, and sums of
                       its bytes               several parts of a batch

`graph` has the inputs of a graph; `keys` tells which programs are equal. `initial`
makes the first params. Where params and gradients are: `meshes`, `units`, `shards`.

Invariant: the user's function is never changed; the parts of its one jaxpr run.
"""
