// XRT's C functions over the host's memory, for tests of jaxinf/csd/cards/library.py.
//
// One kernel: it adds its last argument to every byte of its first. What the host maps
// of a buffer and what the card has are two memories, as with a card, P2P excepted.
// `stub_*` are the tests' own: how many handles are open, and a sync that lasts until
// another thread says so.
#include <atomic>
#include <chrono>
#include <cerrno>
#include <cstdarg>
#include <cstdint>
#include <cstring>
#include <map>
#include <string>
#include <thread>
#include <vector>

namespace {

struct Buffer {
  std::uint8_t *host, *card;
  std::size_t size;
  bool owns;
};

struct Run {
  std::map<int, std::uint64_t> arguments;
  int state = 1;
};

std::atomic<int> open_handles{0};
std::atomic<int> waiting{0}, released{0};
std::atomic<int> wait_ms{0};
constexpr std::uint64_t p2p = std::uint64_t(1) << 30;
constexpr char uuid_bytes[16] = {1, 0, 2};

template <class T>
void* opened(T* handle) {
  ++open_handles;
  return handle;
}

template <class T>
int closed(void* handle) {
  delete static_cast<T*>(handle);
  --open_handles;
  return 0;
}

}  // namespace

extern "C" {

int stub_open_handles() { return open_handles; }
int stub_waiting() { return waiting; }
void stub_release() { released = 1; }
void stub_wait_in_sync(int milliseconds) { wait_ms = milliseconds, released = 0; }

void* xrtDeviceOpen(unsigned index) {
  if (index < 2) return opened(new std::string("card"));
  errno = ENODEV;
  return nullptr;
}
void* xrtDeviceOpenByBDF(const char* address) {
  if (std::string(address) == "0000:01:00.1") return opened(new std::string(address));
  errno = ENODEV;
  return nullptr;
}
int xrtDeviceClose(void* device) { return closed<std::string>(device); }
int xrtDeviceLoadXclbinFile(void*, const char* path) {
  if (std::string(path).find("refused") == std::string::npos) return 0;
  errno = EINVAL;
  return -1;
}
int xrtDeviceGetXclbinUUID(void*, unsigned char* out) {
  std::memcpy(out, uuid_bytes, 16);
  return 0;
}
void* xrtPLKernelOpen(void*, const unsigned char* uuid, const char* name) {
  const bool is_loaded = !std::memcmp(uuid, uuid_bytes, 16);
  if (is_loaded && std::string(name) == "add") return opened(new std::string(name));
  errno = ENOENT;
  return nullptr;
}
int xrtKernelArgGroupId(void*, int argument) { return argument == 0 ? 0 : -1; }
int xrtKernelClose(void* kernel) { return closed<std::string>(kernel); }

void* xrtBOAlloc(void*, std::size_t size, std::uint64_t flags, std::uint32_t) {
  if (size > std::size_t(4) << 30) {
    errno = ENOMEM;
    return nullptr;
  }
  auto* card = new std::uint8_t[size]();
  auto* host = flags & p2p ? card : new std::uint8_t[size]();
  return opened(new Buffer{host, card, size, true});
}
void* xrtBOSubAlloc(void* parent, std::size_t size, std::size_t offset) {
  auto& whole = *static_cast<Buffer*>(parent);
  if (offset + size > whole.size) {
    errno = EINVAL;
    return nullptr;
  }
  return opened(new Buffer{whole.host + offset, whole.card + offset, size, false});
}
void* xrtBOMap(void* buffer) { return static_cast<Buffer*>(buffer)->host; }
int xrtBOSync(void* handle, int direction, std::size_t size, std::size_t offset) {
  auto& buffer = *static_cast<Buffer*>(handle);
  if (wait_ms) {
    waiting = 1;
    for (int i = 0; i < wait_ms && !released; ++i)
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    waiting = 0;
    if (!released) {
      errno = ETIMEDOUT;
      return -1;
    }
  }
  if (buffer.host == buffer.card) return 0;
  if (direction == 0) std::memcpy(buffer.card + offset, buffer.host + offset, size);
  if (direction == 1) std::memcpy(buffer.host + offset, buffer.card + offset, size);
  return 0;
}
int xrtBOFree(void* handle) {
  auto& buffer = *static_cast<Buffer*>(handle);
  if (buffer.owns) {
    if (buffer.host != buffer.card) delete[] buffer.host;
    delete[] buffer.card;
  }
  return closed<Buffer>(handle);
}

void* xrtRunOpen(void*) { return opened(new Run); }
int xrtRunSetArg(void* handle, int number, ...) {
  std::va_list values;
  va_start(values, number);
  auto& arguments = static_cast<Run*>(handle)->arguments;
  if (number == 0)
    arguments[0] = reinterpret_cast<std::uint64_t>(va_arg(values, void*));
  else
    arguments[number] = static_cast<std::uint32_t>(va_arg(values, int));
  va_end(values);
  if (number < 2) return 0;
  errno = EINVAL;
  return -1;
}
int xrtRunStart(void* handle) {
  auto& run = *static_cast<Run*>(handle);
  auto& buffer = *reinterpret_cast<Buffer*>(run.arguments[0]);
  for (std::size_t i = 0; i < buffer.size; ++i)
    buffer.card[i] += static_cast<std::uint8_t>(run.arguments[1]);
  run.state = 4;
  return 0;
}
int xrtRunState(void* handle) { return static_cast<Run*>(handle)->state; }
int xrtRunClose(void* handle) { return closed<Run>(handle); }

}  // extern "C"
