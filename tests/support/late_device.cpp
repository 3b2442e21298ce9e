// A model of NVIDIA's driver on which asynchronous code can be wrong.
//
// Streams are threads. A copy starts late and takes its time, in the order of its stream;
// memory that was just allocated holds NaN. What a real device would do without a word is
// a fault here: a copy to or from memory that is not pinned, or was freed before the copy
// had ended, a call without a context. A call can be made to fail, and memory to run out.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <vector>

namespace {

using Result = int;
constexpr Result invalid_value = 1, out_of_memory = 2, invalid_context = 201;

std::mutex lock;
std::condition_variable changed;
std::map<std::string, std::int64_t> counts;
std::map<char*, std::size_t> pinned;
std::string faults, failed_call;
std::int64_t num_calls, failing_call, failing_code, pinned_bytes;
bool all_fail;  // from then on
std::int64_t memory_bytes = std::int64_t{1} << 40;
thread_local std::vector<void*> contexts;

void fault(const std::string& text) {
  std::lock_guard locked(lock);
  faults += text + "\n";
}

// Counts a call; its failure, if it is its turn.
Result called(const char* name) {
  std::lock_guard locked(lock);
  ++counts[name];
  ++num_calls;
  if (!failing_call || num_calls < failing_call) return 0;
  if (num_calls > failing_call && !all_fail) return 0;
  if (failed_call.empty()) failed_call = name;
  return static_cast<Result>(failing_code);
}

Result called_with_context(const char* name) {
  if (contexts.empty()) {
    fault(std::string(name) + " without a context");
    return invalid_context;
  }
  return called(name);
}

bool is_pinned(const void* place, std::size_t num_bytes) {
  std::lock_guard locked(lock);
  const char* begin = static_cast<const char*>(place);
  auto after = pinned.upper_bound(const_cast<char*>(begin));
  if (after == pinned.begin()) return false;
  --after;
  return begin + num_bytes <= after->first + after->second;
}

class Stream {
 public:
  explicit Stream(void* context) : context(context), thread_([this] { run(); }) {
    thread_.detach();
  }

  void put(std::function<void()> work) {
    std::lock_guard locked(guard_);
    work_.push_back(std::move(work));
    changed_.notify_all();
  }

  // Waits until all that was put on it is done; only tests do.
  void drain() {
    std::unique_lock locked(guard_);
    changed_.wait(locked, [this] { return work_.empty() && !is_busy_; });
  }

  void pause() {
    std::this_thread::sleep_for(std::chrono::microseconds(random_() % 300));
  }

  // Waits before a copy to the device while that is held up.
  void pass() {
    while (is_held) std::this_thread::sleep_for(std::chrono::microseconds(20));
  }

  void* const context;
  std::atomic<bool> is_held{false};

 private:
  void run() {
    std::unique_lock locked(guard_);
    for (;;) {
      changed_.wait(locked, [this] { return !work_.empty(); });
      auto work = std::move(work_.front());
      work_.pop_front();
      is_busy_ = true;
      locked.unlock();
      work();
      locked.lock();
      is_busy_ = false;
      changed_.notify_all();
    }
  }

  std::mutex guard_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> work_;
  bool is_busy_ = false;
  std::minstd_rand random_{7};
  std::thread thread_;
};

struct Event {
  void* context;
  std::int64_t recorded = 0, reached = 0;  // behind the global lock
};

// Copies late, and the second half later.
void copy(Stream* stream, void* to, const void* from, std::size_t num_bytes,
          const void* host) {
  const bool is_to_device = from == host;
  if (!is_pinned(host, num_bytes)) fault("a copy of memory that is not pinned");
  stream->put([=] {
    const std::size_t half = num_bytes / 2;
    if (is_to_device) stream->pass();
    stream->pause();
    std::memcpy(to, from, half);
    stream->pause();
    if (!is_pinned(host, num_bytes)) return fault("memory was freed before its copy");
    std::memcpy(static_cast<char*>(to) + half, static_cast<const char*>(from) + half,
                num_bytes - half);
  });
}

Stream* of(void* stream) { return static_cast<Stream*>(stream); }

}  // namespace

extern "C" {

Result cuStreamGetCtx(void* stream, void** context) {
  *context = of(stream)->context;
  return called("cuStreamGetCtx");
}

Result cuCtxPushCurrent_v2(void* context) {
  const Result result = called("cuCtxPushCurrent");
  if (!result) contexts.push_back(context);
  return result;
}

Result cuCtxPopCurrent_v2(void** context) {
  const Result result = called_with_context("cuCtxPopCurrent");
  *context = contexts.back();
  contexts.pop_back();
  return result;
}

Result cuMemHostAlloc(void** memory, std::size_t num_bytes, unsigned) {
  if (Result result = called_with_context("cuMemHostAlloc")) return result;
  std::lock_guard locked(lock);
  if (pinned_bytes + static_cast<std::int64_t>(num_bytes) > memory_bytes)
    return out_of_memory;
  *memory = std::aligned_alloc(4096, (num_bytes + 4095) / 4096 * 4096);
  std::memset(*memory, 0xff, num_bytes);
  pinned[static_cast<char*>(*memory)] = num_bytes;
  pinned_bytes += num_bytes;
  return 0;
}

Result cuMemFreeHost(void* memory) {
  if (Result result = called_with_context("cuMemFreeHost")) return result;
  std::lock_guard locked(lock);
  auto found = pinned.find(static_cast<char*>(memory));
  if (found == pinned.end()) return invalid_value;
  pinned_bytes -= found->second;
  pinned.erase(found);
  std::free(memory);
  return 0;
}

Result cuEventCreate(void** event, unsigned) {
  if (Result result = called_with_context("cuEventCreate")) return result;
  *event = new Event{contexts.back()};
  return 0;
}

Result cuEventRecord(void* given, void* stream) {
  auto* event = static_cast<Event*>(given);
  if (event->context != of(stream)->context) return invalid_value;
  if (Result result = called("cuEventRecord")) return result;
  std::lock_guard locked(lock);
  const std::int64_t number = ++event->recorded;
  of(stream)->put([=] {
    std::lock_guard locked(lock);
    event->reached = std::max(event->reached, number);
    changed.notify_all();
  });
  return 0;
}

Result cuEventSynchronize(void* given) {
  if (Result result = called_with_context("cuEventSynchronize")) return result;
  auto* event = static_cast<Event*>(given);
  std::unique_lock locked(lock);
  const std::int64_t number = event->recorded;
  changed.wait(locked, [=] { return event->reached >= number; });
  return 0;
}

Result cuEventDestroy_v2(void* event) {
  const Result result = called("cuEventDestroy");
  delete static_cast<Event*>(event);
  return result;
}

Result cuMemcpyDtoHAsync_v2(void* to, unsigned long long from, std::size_t num_bytes,
                            void* stream) {
  if (Result result = called_with_context("cuMemcpyDtoHAsync")) return result;
  copy(of(stream), to, reinterpret_cast<void*>(from), num_bytes, to);
  return 0;
}

Result cuMemcpyHtoDAsync_v2(unsigned long long to, const void* from,
                            std::size_t num_bytes, void* stream) {
  if (Result result = called_with_context("cuMemcpyHtoDAsync")) return result;
  copy(of(stream), reinterpret_cast<void*>(to), from, num_bytes, from);
  return 0;
}

Result cuMemsetD32Async(unsigned long long to, unsigned value, std::size_t count,
                        void* stream) {
  if (Result result = called_with_context("cuMemsetD32Async")) return result;
  of(stream)->put([=] {
    of(stream)->pause();
    std::fill_n(reinterpret_cast<unsigned*>(to), count, value);
  });
  return 0;
}

Result cuStreamWaitEvent(void* stream, void* given, unsigned) {
  if (Result result = called("cuStreamWaitEvent")) return result;
  auto* event = static_cast<Event*>(given);
  std::lock_guard locked(lock);
  const std::int64_t number = event->recorded;
  of(stream)->put([=] {
    std::unique_lock locked(lock);
    changed.wait(locked, [=] { return event->reached >= number; });
  });
  return 0;
}

Result cuStreamWaitValue32_v2(void* stream, unsigned long long place,
                              std::uint32_t value, unsigned flags) {
  if (Result result = called_with_context("cuStreamWaitValue32")) return result;
  const auto* word = reinterpret_cast<const std::uint32_t*>(place);
  if (flags || !is_pinned(word, sizeof *word)) return invalid_value;
  of(stream)->put([=] {
    while (static_cast<std::int32_t>(__atomic_load_n(word, __ATOMIC_ACQUIRE) - value) < 0)
      std::this_thread::sleep_for(std::chrono::microseconds(20));
  });
  return 0;
}

Result cuGetErrorString(Result result, const char** text) {
  *text = result == out_of_memory ? "out of memory" : "made to fail";
  return 0;
}

// ---- for tests

void* late_device_stream(int device) {
  static char devices[64];
  return new Stream(devices + device);
}

void late_device_put(void* stream, void (*work)(void*), void* data) {
  of(stream)->put([=] {
    of(stream)->pause();
    work(data);
  });
}

void late_device_drain(void* stream) { of(stream)->drain(); }

// Holds up copies to the device, or lets them go on.
void late_device_hold(void* stream, int is_held) { of(stream)->is_held = is_held; }

// Makes the call with this number, counted from now on, fail, and perhaps all later ones;
// none if it is 0.
void late_device_fail(std::int64_t call, int code, int lasts) {
  std::lock_guard locked(lock);
  all_fail = lasts;
  num_calls = 0;
  failing_call = call;
  failing_code = code;
  failed_call.clear();
}

// Returns the name of the call that was made to fail; empty before it is reached.
const char* late_device_failed() {
  std::lock_guard locked(lock);
  return failed_call.c_str();
}

void late_device_limit(std::int64_t num_bytes) {
  std::lock_guard locked(lock);
  memory_bytes = num_bytes;
}

std::int64_t late_device_pinned() {
  std::lock_guard locked(lock);
  return pinned_bytes;
}

std::int64_t late_device_count(const char* name) {
  std::lock_guard locked(lock);
  return counts[name];
}

// Returns what went wrong so far; empty if nothing did.
const char* late_device_faults() {
  std::lock_guard locked(lock);
  static std::string shown;
  shown = faults;
  return shown.c_str();
}

}
