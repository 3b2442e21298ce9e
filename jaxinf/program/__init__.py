"""Optimizers as programs: an optax update split between JAX and the storage.

    tx.update ─► graph ─► split ─────► kernel, one a leaf    runs near the storage
                   └────► prologue ─► passes                 runs in JAX

`graph` makes the nodes of streamed functions, too.

Invariant: optax is the only definition of an optimizer; nothing here knows one by name.
`trace_update` divides ``tx.update`` into a *prologue* (scalars and reductions, run in
JAX) and one elementwise `Kernel` per leaf, run on chunks near the storage.
"""

from jaxinf.program.average import Average, ema, parse_ema, with_average
from jaxinf.program.graph import (
    Graph,
    Inliner,
    Node,
    Value,
    ancestors,
    aval_bytes,
    evaluate,
    evaluate_node,
    graph_of,
    prune,
)
from jaxinf.program.kernel import (
    Constant,
    Equation,
    Input,
    Kernel,
    Operand,
    Result,
    inputs_of,
    needed_by,
)
from jaxinf.program.nonfinite import NonFinitePolicy, nonfinite_error
from jaxinf.program.on_device import (
    is_computable,
    join_params,
    kernel_function,
    split_params,
)
from jaxinf.program.passes import PassComputation, Passes
from jaxinf.program.prologue import LeafInputs, key_data, typed_like
from jaxinf.program.standard import trace_standard_kernels
from jaxinf.program.state import StateLayout, StateSlot, state_keys
from jaxinf.program.tree import (
    is_trained,
    keep_trained,
    leaf_infos,
    leaf_path,
    path_name,
)
from jaxinf.program.update import InitProgram, UpdateProgram, trace_init, trace_update
