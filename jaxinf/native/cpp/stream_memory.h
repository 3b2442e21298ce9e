// Pinned memory for copies on a stream, and the failures of the driver's calls.
//
// Invariant: the driver is never called with the lock held, as a call may block until a
// stream goes on, and the stream until somebody gets the lock.
#ifndef JAXINF_STREAM_MEMORY_H_
#define JAXINF_STREAM_MEMORY_H_

#include <pthread.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>

#include "cuda_driver.h"

namespace jaxinf_stream {

using jaxinf_cuda::Address;
using jaxinf_cuda::Context;
using jaxinf_cuda::Driver;
using jaxinf_cuda::Event;
using jaxinf_cuda::Result;
using jaxinf_cuda::Stream;

constexpr std::size_t text_bytes = 256;
constexpr std::size_t alignment = 64;  // of the arrays in a block
constexpr std::size_t page_bytes = 4096;

inline Driver driver;
inline pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
inline pthread_cond_t changed = PTHREAD_COND_INITIALIZER;

struct Locked {
  Locked() { pthread_mutex_lock(&lock); }
  ~Locked() { pthread_mutex_unlock(&lock); }
  void wait() { pthread_cond_wait(&changed, &lock); }
  void tell() { pthread_cond_broadcast(&changed); }
};

// The first call of the driver that failed.
struct Failure {
  char text[text_bytes] = "";

  explicit operator bool() const { return text[0]; }

  // Notes a call's result; whether it failed.
  bool is(Result result, const char* what, std::size_t num_bytes = 0) {
    if (!result) return false;
    if (text[0]) return true;
    const char* meaning = nullptr;
    if (driver.error_string(result, &meaning) || !meaning) meaning = "unknown error";
    char size[40] = "";
    if (num_bytes) std::snprintf(size, sizeof size, " of %zu bytes", num_bytes);
    std::snprintf(text, sizeof text, "%s%s: %s (CUDA error %d)", what, size, meaning,
                  result);
    return true;
  }
};

// Makes a context this thread's; some calls of the driver need one.
class Current {
 public:
  Current(Context context, Failure& failure)
      : is_pushed_(!failure.is(driver.push_context(context), "entering a context")) {}
  ~Current() {
    Context popped;
    if (is_pushed_) driver.pop_context(&popped);
  }
  Current(const Current&) = delete;

 private:
  const bool is_pushed_;
};

struct Block {
  char* memory;
  std::size_t num_bytes;
  Event event;         // what was copied has arrived, or has left
  bool is_used;        // by one transfer at a time
  bool is_leaving;     // the event was recorded behind copies to the device
  std::uint32_t turn;  // of a results' block: the flag's value when they are complete
  Block* next;
};

struct Pool {
  Block* blocks;
  std::size_t num_bytes;
};

inline std::size_t aligned(std::size_t num_bytes, std::size_t to = alignment) {
  return (num_bytes + to - 1) / to * to;
}

inline void destroy(Block* block) {
  driver.event_destroy(block->event);
  driver.host_free(block->memory);
  std::free(block);
}

// Frees the blocks that nobody uses; their context is current.
inline void trim(Pool& pool) {
  Block* idle = nullptr;
  {
    Locked locked;
    for (Block** place = &pool.blocks; *place;) {
      Block* block = *place;
      if (block->is_used || block->is_leaving) {
        place = &block->next;
        continue;
      }
      *place = block->next;
      block->next = idle;
      idle = block;
      pool.num_bytes -= block->num_bytes;
    }
  }
  while (idle) {
    Block* next = idle->next;
    destroy(idle);
    idle = next;
  }
}

// Returns the smallest unused block that is large enough, and not twice as large.
inline Block* reused(Pool& pool, std::size_t num_bytes) {
  Locked locked;
  Block* best = nullptr;
  for (Block* block = pool.blocks; block; block = block->next) {
    if (block->is_used || block->num_bytes < num_bytes) continue;
    if (block->num_bytes / 2 > num_bytes) continue;
    if (!best || block->num_bytes < best->num_bytes) best = block;
  }
  if (best) best->is_used = true;
  return best;
}

// Returns a block, made if none is left; null and the failure if that is not possible.
// Idle blocks are freed first where the pool would grow beyond the limit.
inline Block* take(Pool& pool, std::size_t num_bytes, std::size_t limit_bytes,
                   Failure& failure) {
  num_bytes = aligned(num_bytes, page_bytes);
  if (Block* found = reused(pool, num_bytes)) return found;
  if (pool.num_bytes + num_bytes > limit_bytes) trim(pool);
  void* memory = nullptr;
  Event event = nullptr;
  Result result = driver.host_alloc(&memory, num_bytes, jaxinf_cuda::host_alloc_flags);
  if (result == jaxinf_cuda::out_of_memory) {
    trim(pool);
    result = driver.host_alloc(&memory, num_bytes, jaxinf_cuda::host_alloc_flags);
  }
  if (failure.is(result, "pinned memory", num_bytes)) return nullptr;
  result = driver.event_create(&event, jaxinf_cuda::event_flags);
  auto* block = static_cast<Block*>(std::calloc(1, sizeof(Block)));
  if (failure.is(block ? result : jaxinf_cuda::out_of_memory, "making an event")) {
    if (!result) driver.event_destroy(event);
    driver.host_free(memory);
    std::free(block);
    return nullptr;
  }
  block->memory = static_cast<char*>(memory);
  block->num_bytes = num_bytes;
  block->event = event;
  block->is_used = true;
  *reinterpret_cast<std::uint32_t*>(block->memory) = 0;  // a flag of the turn before
  Locked locked;
  block->next = pool.blocks;
  pool.blocks = block;
  pool.num_bytes += num_bytes;
  return block;
}

}  // namespace jaxinf_stream

#endif  // JAXINF_STREAM_MEMORY_H_
