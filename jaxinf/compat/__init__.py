"""All uses of JAX, optax, XLA and Orbax that another version may break.

Invariant: uses that are experimental, not exported or not promised go through this
package alone; ``tests/test_compat.py`` fails on others. Supported versions:
docs/dependencies.md; ``make test-newest`` tries newer ones.

A name that is gone fails loudly and names itself: at import, or while an update or a
streamed step is traced or compiled. So do other arguments, parameters and fields of
JAX's primitives, jaxprs, lowerings and shardings. These say less:

==========================  ==========================================================
used here                   the effect, should it change
==========================  ==========================================================
``PJRT_NPROC``              read by XLA's CPU client. Not read any more: runs on several
                            CPU devices may hang, which the tests of four devices show
``manual_axes``             of the mesh in use. Not there: an update in ``pmap`` fails
                            with an error of JAX's
logger of callbacks         moves with JAX's modules. Moved: the trainer prints JAX's
                            traceback before the error
tracebacks of equations     not promised. Others: a refusal does not say which optax
                            transformation the primitive came from
key classes, ``keystr``     of ``jax.tree_util``. Other classes: names of leaves, or of
                            scalars, are not those of a store, which is refused.
                            Another text: error messages have it; no file does
``serialization`` of Flax   registers placeholders, where a program uses Flax. Moved:
                            ``flax.serialization.to_bytes`` of a state fails
bits of ``jax.random``      computed as Threefry of each element's index. Computed
                            otherwise: streaming draws other first params than jitted
                            code for leaves that are large beside the budget
library fusions of XLA      an option of its CPU compiler. Not there, or other names:
                            programs take the default, and may take more memory than
                            is planned
``dma_map``                 of XLA's client, with ``dma_unmap``; not public. Not there:
                            streamed params are copied once more on their way to a GPU
Orbax's handler, key type   written to a checkpoint's metadata. Moved: Orbax restores it
                            only when it is told the handler
==========================  ==========================================================

Beyond names: `jaxinf.kernels.lowering` follows what XLA's CPU compiler does with an
update. Another XLA may round otherwise; ``tests/kernels/test_bits.py`` compares.
"""

from jax.experimental import io_callback
from jax.experimental.buffer_callback import buffer_callback
from jax.extend.core import Literal
from jax.tree_util import keystr

from jaxinf.compat.jaxprs import (
    CALLBACK_LOGGER,
    ELEMENTWISE,
    IDENTITIES,
    LIGHT,
    POINTWISE,
    ClosedJaxpr,
    Jaxpr,
    Primitive,
    Tracer,
    all_equations,
    bind,
    called_jaxpr,
    inner_jaxprs,
    is_in_transformation,
    is_tracing,
    source_frames,
    static_params,
    trace_context,
)
from jaxinf.compat.meshes import call_by_num_devices, manual_axes, mesh_in_use
from jaxinf.compat.processes import (
    Coordination,
    coordination,
    forget_failed_tokens,
    has_backend,
)
from jaxinf.compat.trees import (
    ORBAX_DICT_KEY,
    ORBAX_HANDLER,
    path_keys,
    path_names,
    register_with_check,
    register_with_flax,
)
from jaxinf.compat.xla import (
    CPU_THREADS_VARIABLE,
    compile_lowered,
    cpu_client_threads,
    deterministic_options,
    memory_registry,
    without_library_reductions,
)
