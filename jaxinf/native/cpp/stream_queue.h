// Transfers between a device and the engine, from their start until both have done.
//
// Invariant: a transfer has two owners, the engine until `release` and the stream until
// its results were fetched; the last one ends it.
#ifndef JAXINF_STREAM_QUEUE_H_
#define JAXINF_STREAM_QUEUE_H_

#include "stream_memory.h"

namespace jaxinf_stream {

constexpr int max_devices = 64;

struct Device {
  Context context;
  Pool landings;           // for gradients
  Pool results;
  std::size_t held_bytes;  // of gradients that wait
};

struct Transfer {
  std::int64_t site;  // of the call that started it
  std::int64_t port;  // of the call that fetches its results
  int device;
  Block* landing;
  Block* results;
  std::size_t held_bytes;
  std::uint32_t turn;
  bool is_released;   // the engine has done with it
  bool is_fetched;    // so has the stream, or nobody will ask for the results
  char failure[text_bytes];
  Transfer* next_arrival;
  Transfer* next_pending;
};

struct Queue {
  std::size_t limit_bytes;  // of gradients of a device that wait
  bool is_closing;
  bool is_told;             // the failure, by `next`
  bool is_heard;            // the store has stopped for it
  int num_inside;           // threads in a handler
  int num_devices;
  char failure[text_bytes];
  Device devices[max_devices];
  Transfer* arrivals;
  Transfer* pending;        // until they are fetched
};

inline Queue** queues;
inline std::int64_t num_queues;

// Returns an open queue, which stays until `leave`; or null.
inline Queue* enter(std::int64_t number) {
  Locked locked;
  Queue* queue = number < num_queues ? queues[number] : nullptr;
  if (!queue || queue->is_closing) return nullptr;
  ++queue->num_inside;
  return queue;
}

inline void leave(Queue* queue) {
  Locked locked;
  --queue->num_inside;
  locked.tell();
}

// Returns the number of a stream's device, in order of appearance.
inline int device_of(Queue* queue, Stream stream, Failure& failure) {
  Context context = nullptr;
  if (failure.is(driver.stream_context(stream, &context), "a stream's context"))
    return 0;
  Locked locked;
  for (int n = 0; n < queue->num_devices; ++n)
    if (queue->devices[n].context == context) return n;
  if (failure.is(queue->num_devices == max_devices, "more than 64 devices")) return 0;
  queue->devices[queue->num_devices].context = context;
  return queue->num_devices++;
}

// Blocks while the gradients of a device that wait take too much memory.
inline void hold(Queue* queue, Transfer* transfer, std::size_t num_bytes) {
  Device& device = queue->devices[transfer->device];
  Locked locked;
  while (device.held_bytes && device.held_bytes + num_bytes > queue->limit_bytes)
    locked.wait();
  device.held_bytes += num_bytes;
  transfer->held_bytes = num_bytes;
}

// Gives the results' block back, and forgets the transfer; the lock is held. Blocks that
// copies may still use, since a call has failed, are kept for good.
inline void end(Transfer* transfer) {
  if (!transfer->is_released || !transfer->is_fetched) return;
  if (transfer->results && !transfer->failure[0]) transfer->results->is_used = false;
  std::free(transfer);
}

inline void append(Queue* queue, Transfer* transfer) {
  Locked locked;
  for (Transfer** place = &queue->pending; *place;) {
    Transfer* old = *place;
    if (old->port == transfer->port && old->device == transfer->device) {
      *place = old->next_pending;  // its step was given up
      old->is_fetched = true;
      end(old);
    } else {
      place = &old->next_pending;
    }
  }
  transfer->next_pending = queue->pending;
  queue->pending = transfer;
  Transfer** last = &queue->arrivals;
  while (*last) last = &(*last)->next_arrival;
  *last = transfer;
  locked.tell();
}

inline Transfer* fetched(Queue* queue, std::int64_t port, int device) {
  Locked locked;
  for (Transfer** place = &queue->pending; *place; place = &(*place)->next_pending) {
    Transfer* transfer = *place;
    if (transfer->port != port || transfer->device != device) continue;
    *place = transfer->next_pending;
    return transfer;
  }
  return nullptr;
}

}  // namespace jaxinf_stream

#endif  // JAXINF_STREAM_QUEUE_H_
