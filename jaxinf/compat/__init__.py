"""All uses of JAX, optax, XLA and Orbax that another version may break.

Invariant: uses that are experimental, not exported or not promised go through this
package alone; ``tests/test_compat.py`` fails on others. Supported versions:
docs/dependencies.md; ``make test-newest`` tries newer ones.

A name that is gone makes ``import jaxinf`` fail, if nothing else is said.

==========================  ==========================================================
used here                   where it may break, and the effect
==========================  ==========================================================
``buffer_callback``         experimental. Takes other arguments: the first update fails
                            while it is traced
``jax.shard_map``           ``check_vma`` was ``check_rep``. Renamed: sharded updates
                            fail while they are traced
``PJRT_NPROC``              read by XLA's CPU client. Not read any more: runs on several
                            CPU devices may hang, which the tests of four devices show
``global_state``            of ``jax._src.distributed``: the client of the coordination
                            service, its barriers and keys, the text of a time-out.
                            Others: stores of several processes fail when opened
logger of callbacks         moves with JAX's modules. Moved: JAX's traceback is printed
                            before the error
``Primitive``, ``Literal``  of ``jax.extend.core``, and jaxprs; fields of equations,
                            which ``jaxinf/program`` and ``jaxinf/streaming/program``
                            read. Not there: ``tx.init`` fails while it traces
``jax.interpreters``        rules of a primitive of our own. Not there, or other rules:
                            ``import jaxinf`` fails, or ``tx.update`` while it is traced
``axis_context``            of a lowering: how many devices the computation has. Not
                            there: an update in a process with several devices fails
                            while it is compiled
``manual_axes``             of the mesh in use. Not there: an update in ``pmap`` fails
                            with an error of JAX's
shardings in types          of abstract values, and parameters of
                            ``sharding_constraint``. Others: streaming on several
                            devices fails while it is traced
``get_bind_params``         of primitives, with the equation's context. Another result:
                            the prologue fails while it is traced
names of primitives         an unknown one: ``tx.init`` refuses the optimizer and names
                            the primitive
parameters of primitives    an unknown one: ``KeyError`` in ``tx.init``
tracebacks of equations     not promised. Others: a refusal does not say which optax
                            transformation the primitive came from; a warning of large
                            arrays in a loss function fails
key classes, ``keystr``     of ``jax.tree_util``. Other classes: names of leaves, or of
                            scalars, are not those of a store, which is refused.
                            Another text: error messages have it; no file does
``serialization`` of Flax   registers placeholders, where a program uses Flax. Moved:
                            ``flax.serialization.to_bytes`` of a state fails
placeholder of params       of ``optax.tree.map_params``, not public. Renamed: that
                            function fails for a state
bits of ``jax.random``      computed as Threefry of each element's index. Computed
                            otherwise: streaming draws other first params than jitted
                            code for leaves that are large beside the budget
library fusions of XLA      an option of its CPU compiler. Not there, or other names:
                            programs take the default, and may take more memory than
                            is planned
deterministic ops of XLA    an option of its GPU compiler. Not there, or another name:
                            compiling a streamed program fails and names it;
                            ``deterministic=False`` goes without
``dma_map``                 of XLA's client, with ``dma_unmap``; not public. Not there:
                            streamed params are copied once more on their way to a GPU
Orbax's handler, key type   written to a checkpoint's metadata. Moved: Orbax restores it
                            only when it is told the handler
==========================  ==========================================================

Beyond names: `jaxinf.kernels.lowering` follows what XLA's CPU compiler does with an
update. Another XLA may round otherwise; ``tests/kernels/test_bits.py`` compares.
"""

from jax.experimental import io_callback
from jax.extend.core import Literal
from jax.tree_util import keystr

from jaxinf.compat.callbacks import (
    CALLBACK_LOGGER,
    call_with_buffers,
    raise_in_callback,
)
from jaxinf.compat.jaxprs import (
    ELEMENTWISE,
    IDENTITIES,
    LIGHT,
    POINTWISE,
    ClosedJaxpr,
    Jaxpr,
    Primitive,
    all_equations,
    bind,
    branches,
    called_jaxpr,
    inner_jaxprs,
    source_frames,
    static_params,
)
from jaxinf.compat.libraries import (
    ORBAX_DICT_KEY,
    ORBAX_HANDLER,
    is_params_placeholder,
    register_with_flax,
)
from jaxinf.compat.meshes import (
    call_by_num_devices,
    manual_axes,
    mesh_in_use,
    shard_map,
)
from jaxinf.compat.processes import (
    Coordination,
    coordination,
    forget_failed_tokens,
    has_backend,
)
from jaxinf.compat.tracing import (
    Tracer,
    is_in_transformation,
    is_tracing,
    trace_context,
    without_examples,
)
from jaxinf.compat.trees import path_keys, path_names, register_checked
from jaxinf.compat.xla import (
    CPU_THREADS_VARIABLE,
    DETERMINISTIC,
    compile_lowered,
    cpu_client_threads,
    deterministic_options,
    memory_registry,
    varies_between_runs,
    without_library_reductions,
)
