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
``PJRT_NPROC``              no longer read: runs on several CPU devices may hang
``manual_axes`` of a mesh   gone: an update in ``pmap`` fails with an error of JAX's
logger of callbacks         moved: the trainer prints JAX's traceback, too
tracebacks of equations     changed: a refusal does not name optax's transformation
key classes                 changed: leaves have other names, so a store is refused
``keystr``                  changed: error messages have other text; no file does
``serialization`` of Flax   moved: ``flax.serialization.to_bytes`` of a state fails
bits of ``jax.random``      not Threefry of each element's index: leaves that are
                            large beside the budget begin otherwise than in jitted code
library fusions of XLA      gone or renamed: CPU programs may take more memory than is
                            planned
``dma_map`` of a client     gone: streamed params are copied once more to a GPU
Orbax's handler, key type   moved: Orbax restores only when it is told the handler
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
    called_jaxpr,
    evaluate_equation,
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
