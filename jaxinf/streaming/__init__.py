"""Training of models larger than memory, by cutting a loss function's program.

    program/   jaxpr ─► graph ─► segments ─► their programs
    plan/      a list of calls: what each reads, takes, makes and frees
    run.py     for each call: params, values ─► outputs; two are in flight
    move/      params, values and gradients between device, host and drives
    update/    a gradient ─► the store's update
    step.py    a batch's way through these

Where a question is answered:

    where params and state are             in_store.py, in_memory.py, function.py
    what these are to a step's programs    backend.py
    how a loss becomes a graph             program/trace.py, program/graph.py
    in which order its nodes run           program/lifetimes.py
    where a program is cut                 program/cut.py
    which programs are equal               program/keys.py
    which pieces of params move as one     program/units.py
    how the first params are made          program/initial.py
    how memory is divided                  plan/memory.py
    how memory becomes cuts                plan/cut_to_fit.py
    the order of calls, and of parts       plan/order.py
    how a batch becomes parts              micro_batches.py
    which values leave, and to where       plan/offload.py
    what is recomputed instead             plan/recompute.py
    which params are read when             plan/reads.py
    how params come to a call              move/params.py
    how values leave and come back         move/values.py
    how gradients wait for the last        move/spill.py
    which memory they are read into        move/host_buffers.py
    which threads do this                  move/work_queues.py
    how gradients come to the host         update/gradients.py
    where a gradient becomes an update     update/apply_gradients.py, in_memory.py
    which optimizers can run, in passes    update/update_plan.py
    what kernels take beside state         update/gradient_passes.py
    what the device updates itself         update/device_updates.py
    which cuts a store keeps               plan/kept.py
    how processes begin and end alike      compiled_step.py
    what happens after Ctrl-C              step.py; compiled_step.py cleans up

Invariant: a user's loss function is traced with its gradient and never changed; the
segments of that one jaxpr run.
"""

from jaxinf.streaming.api import stream, stream_function, stream_in_memory
from jaxinf.streaming.count import Count, program_bytes
from jaxinf.streaming.plan.calls import Plan, Policy
from jaxinf.streaming.plan.memory import (
    DeviceLimit,
    device_is_host,
    gpu_limit,
    store_memory_bytes,
)
from jaxinf.streaming.step import StreamedStep
from jaxinf.streaming.update.update_plan import check_init, passes_for
