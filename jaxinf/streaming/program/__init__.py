"""A loss function as programs: traced with its gradient, as a graph, cut into segments.

    trace ─► inline ─► classify ─► lifetimes ─► cut ─► programs ─► sums
    jaxpr    graph     what is     order, and   cuts   two for a   of several parts
                       not cut     its bytes           segment     of a batch

What a program takes in memory is estimated by `peak`, from its `operations`; `keys`
tells which programs are equal. `initial` makes the first params. Where the params and
gradients are: `meshes`, `units`, `shards`.

Invariant: the user's function is never changed; the parts of its one jaxpr run.
"""
