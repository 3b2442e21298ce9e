// Gradients to the host and results back, in the order of a device's stream.
//
//   XLA's thread       start: copies, event                finish: wait, copies, event
//                        │                                     │
//   stream       … ─► copies ─► event ─► other kernels ─► wait ─► copies ─► event ─► …
//                                 │                        ▲
//   engine's threads            next ─► update ─► release ─┘ flag
//
// XLA's thread puts work on the stream and waits for none of it. The stream waits for
// the flag, a word of pinned memory that `release` writes without any call of the driver.
// All that a release depends on was put on a stream before the wait, so the two cannot
// wait for each other. Invariant: every transfer is released, whatever fails.
#include "stream_call.h"
#include "stream_queue.h"

#define JAXINF_EXPORT extern "C" __attribute__((visibility("default")))

namespace jaxinf_stream {

constexpr unsigned failed_status = 2;  // FAILED of jaxinf/optimizer/callback.py
constexpr std::size_t unlimited = ~static_cast<std::size_t>(0);

// Puts the copies of gradients on the stream.
void send(Queue* queue, Transfer* transfer, const Call& call, Failure& failure) {
  const XLA_FFI_Args& args = call.frame->args;
  std::size_t num_bytes = 0;
  for (std::int64_t n = 0; n < args.size; ++n)
    num_bytes += aligned(bytes_of(buffer(args.args[n])));
  hold(queue, transfer, num_bytes);
  Device& device = queue->devices[transfer->device];
  Current current(device.context, failure);
  if (failure) return;
  transfer->landing = take(device.landings, num_bytes, queue->limit_bytes, failure);
  if (failure) return;
  transfer->results =
      take(device.results, alignment + call.result_bytes, unlimited, failure);
  if (failure) return;
  transfer->turn = ++transfer->results->turn;
  if (transfer->results->is_leaving) {
    // The engine writes results when these gradients have arrived.
    const Result result =
        driver.wait_for_event(call.stream, transfer->results->event, 0);
    if (failure.is(result, "waiting for an event")) return;
    transfer->results->is_leaving = false;
  }
  char* place = transfer->landing->memory;
  for (std::int64_t n = 0; n < args.size; ++n) {
    const XLA_FFI_Buffer& given = buffer(args.args[n]);
    const std::size_t own = bytes_of(given);
    if (own && failure.is(driver.copy_to_host(place, address(given.data), own,
                                              call.stream),
                          "copying to the host", own))
      return;
    place += aligned(own);
  }
  failure.is(driver.event_record(transfer->landing->event, call.stream),
             "recording an event");
}

// Puts the wait for the results, and their copies, on the stream.
void bring(Queue* queue, Transfer* transfer, const Call& call, Failure& failure) {
  const XLA_FFI_Rets& rets = call.frame->rets;
  Block* results = transfer->results;
  Current current(queue->devices[transfer->device].context, failure);
  if (failure) return;
  const Result waiting =
      driver.wait_for_value(call.stream, address(results->memory), transfer->turn,
                            jaxinf_cuda::at_least);
  if (failure.is(waiting, "waiting for a value")) return;
  const char* place = results->memory + alignment;
  for (std::int64_t n = 0; n < rets.size; ++n) {
    const XLA_FFI_Buffer& wanted = buffer(rets.rets[n]);
    const std::size_t own = bytes_of(wanted);
    if (own && failure.is(driver.copy_to_device(address(wanted.data), place, own,
                                                call.stream),
                          "copying to the device", own))
      return;
    place += aligned(own);
  }
  if (!failure.is(driver.event_record(results->event, call.stream),
                  "recording an event"))
    results->is_leaving = true;
}

// Of a transfer that failed before its results were asked for: only statuses say so, as
// an error of one device would leave others waiting for it.
void bring_failure(Transfer* transfer, Queue* queue, const Call& call,
                   Failure& failure) {
  {
    Locked locked;  // until the engine has stopped the store
    while (!transfer->is_released) locked.wait();
  }
  const XLA_FFI_Rets& rets = call.frame->rets;
  const XLA_FFI_Buffer& statuses = buffer(rets.rets[rets.size - 1]);
  Current current(queue->devices[transfer->device].context, failure);
  if (failure) return;
  failure.is(driver.fill(address(statuses.data), failed_status, bytes_of(statuses) / 4,
                         call.stream),
             "filling statuses");
}

XLA_FFI_Error* start(Queue* queue, const Call& call) {
  auto* transfer = static_cast<Transfer*>(std::calloc(1, sizeof(Transfer)));
  if (!transfer)
    return call.error(XLA_FFI_Error_Code_RESOURCE_EXHAUSTED, "no memory is left");
  Failure failure;
  transfer->site = call.site;
  transfer->port = call.port;
  transfer->device = device_of(queue, call.stream, failure);
  if (!failure) send(queue, transfer, call, failure);
  std::memcpy(transfer->failure, failure.text, text_bytes);
  append(queue, transfer);
  return nullptr;
}

XLA_FFI_Error* finish(Queue* queue, const Call& call) {
  Failure failure;
  const int device = device_of(queue, call.stream, failure);
  Transfer* transfer = failure ? nullptr : fetched(queue, call.port, device);
  if (!failure && !transfer)
    return call.error(XLA_FFI_Error_Code_INTERNAL,
                      "expected an update to be started before it is fetched");
  if (transfer) {
    bool has_failed;
    {
      Locked locked;
      has_failed = transfer->failure[0];
    }
    if (has_failed)
      bring_failure(transfer, queue, call, failure);
    else
      bring(queue, transfer, call, failure);
  }
  Locked locked;
  if (failure && !queue->failure[0])
    std::memcpy(queue->failure, failure.text, text_bytes);
  if (transfer) {
    transfer->is_fetched = true;
    if (failure) std::memcpy(transfer->failure, failure.text, text_bytes);
    end(transfer);
  }
  locked.tell();
  if (!failure) return nullptr;
  while (!queue->is_heard) locked.wait();  // so that the store is the first to know
  return call.error(XLA_FFI_Error_Code_INTERNAL, failure.text);
}

XLA_FFI_Error* handled(XLA_FFI_CallFrame* frame,
                       XLA_FFI_Error* (*handler)(Queue*, const Call&)) {
  if (is_metadata(frame)) return nullptr;
  Call call{frame};
  if (XLA_FFI_Error* error = call.read()) return error;
  Queue* queue = enter(call.queue);
  if (!queue)
    return call.error(XLA_FFI_Error_Code_FAILED_PRECONDITION, "the store is closed");
  XLA_FFI_Error* error = handler(queue, call);
  leave(queue);
  return error;
}

}  // namespace jaxinf_stream

using namespace jaxinf_stream;

JAXINF_EXPORT XLA_FFI_Error* jaxinf_stream_start(XLA_FFI_CallFrame* frame) {
  return handled(frame, start);
}

JAXINF_EXPORT XLA_FFI_Error* jaxinf_stream_finish(XLA_FFI_CallFrame* frame) {
  return handled(frame, finish);
}

// ---- the engine's side

// Loads the driver; 0, or 1 and a reason in `text`, of `text_bytes`.
JAXINF_EXPORT int jaxinf_stream_load(const char* path, char* text) {
  return !jaxinf_cuda::load(path, driver, text, text_bytes);
}

// Opens a queue; returns its number, or -1 without memory.
JAXINF_EXPORT std::int64_t jaxinf_stream_open(std::int64_t limit_bytes) {
  auto* queue = static_cast<Queue*>(std::calloc(1, sizeof(Queue)));
  Locked locked;
  void* grown = std::realloc(queues, (num_queues + 1) * sizeof(Queue*));
  if (grown) queues = static_cast<Queue**>(grown);
  if (!queue || !grown) {
    std::free(queue);
    return -1;
  }
  queue->limit_bytes = limit_bytes;
  queues[num_queues] = queue;
  return num_queues++;
}

struct Arrival {
  Transfer* transfer;  // null for a failure of `finish`
  std::int64_t site;
  char* gradients;
  char* results;       // may be null after a failure
  char failure[text_bytes];
};

// Waits for the next gradients of a device; 0, or 1 when the queue is closed.
JAXINF_EXPORT int jaxinf_stream_next(std::int64_t number, int device, Arrival* found) {
  Queue* queue = nullptr;
  Transfer* transfer = nullptr;
  bool has_failed;
  std::memset(found, 0, sizeof *found);
  {
    Locked locked;
    for (queue = queues[number];; locked.wait()) {
      Transfer** place = &queue->arrivals;
      while (*place && (*place)->device != device) place = &(*place)->next_arrival;
      if ((transfer = *place)) {
        *place = transfer->next_arrival;
        has_failed = transfer->failure[0];
        break;
      }
      if (!device && queue->failure[0] && !queue->is_told) {
        queue->is_told = true;
        std::memcpy(found->failure, queue->failure, text_bytes);
        return 0;
      }
      if (queue->is_closing && !queue->num_inside) return 1;
    }
  }
  Failure failure;
  if (!has_failed) {
    Current current(queue->devices[device].context, failure);
    if (!failure)
      failure.is(driver.event_synchronize(transfer->landing->event),
                 "waiting for gradients");
  }
  Locked locked;
  if (failure) std::memcpy(transfer->failure, failure.text, text_bytes);
  found->transfer = transfer;
  found->site = transfer->site;
  if (transfer->landing) found->gradients = transfer->landing->memory;
  if (transfer->results) found->results = transfer->results->memory + alignment;
  std::memcpy(found->failure, transfer->failure, text_bytes);
  return 0;
}

// Ends a transfer on the host: its gradients were taken, and its results are complete.
// Without one, the store has stopped for a failure of `finish`.
JAXINF_EXPORT void jaxinf_stream_release(std::int64_t number, Transfer* transfer) {
  Locked locked;
  if (!transfer) {
    queues[number]->is_heard = true;
    return locked.tell();
  }
  queues[number]->devices[transfer->device].held_bytes -= transfer->held_bytes;
  if (transfer->landing && !transfer->failure[0]) transfer->landing->is_used = false;
  if (transfer->results)
    __atomic_store_n(reinterpret_cast<std::uint32_t*>(transfer->results->memory),
                     transfer->turn, __ATOMIC_RELEASE);
  transfer->is_released = true;
  end(transfer);
  locked.tell();
}

// Lets nothing be started or fetched any more. `next` brings what is still to come.
JAXINF_EXPORT void jaxinf_stream_close(std::int64_t number) {
  Locked locked;
  queues[number]->is_closing = true;
  locked.tell();
}

// Frees a queue that is closed, when all was released and `next` is not called any more;
// waits for copies on the stream.
JAXINF_EXPORT void jaxinf_stream_destroy(std::int64_t number) {
  Queue* queue;
  {
    Locked locked;
    queue = queues[number];
    while (queue->num_inside) locked.wait();
    queues[number] = nullptr;
    while (Transfer* transfer = queue->pending) {
      queue->pending = transfer->next_pending;
      transfer->is_fetched = true;
      end(transfer);
    }
  }
  for (int n = 0; n < queue->num_devices; ++n) {
    Device& device = queue->devices[n];
    Failure failure;
    Current current(device.context, failure);
    if (failure) continue;
    for (Block* block = device.results.blocks; block; block = block->next)
      if (block->is_leaving && !driver.event_synchronize(block->event))
        block->is_leaving = false;
    trim(device.landings);
    trim(device.results);
  }
  std::free(queue);
}
