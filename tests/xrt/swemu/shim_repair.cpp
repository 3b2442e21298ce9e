// Debian's libxrt_swemu 202210.2.13.466+dfsg-8 grows its message buffer with realloc()
// but keeps the old pointer. This function takes the place of the one that does; the
// offsets are those of that build, for amd64.
#include <cstddef>
#include <cstdlib>
#include <cstring>

namespace {
constexpr std::size_t kBuffer = 0x670, kBufferBytes = 0x678;

template <typename T>
T& member(char* object, std::size_t offset) {
  return *reinterpret_cast<T*>(object + offset);
}
}  // namespace

// CpuemShim::alloc_void(size_t): returns how much the buffer holds; the caller keeps it.
extern "C" std::size_t _ZN12xclcpuemhal29CpuemShim10alloc_voidEm(
    char* shim, std::size_t num_bytes) {
  void*& buffer = member<void*>(shim, kBuffer);
  const std::size_t held_bytes = member<std::size_t>(shim, kBufferBytes);
  if (held_bytes != 0 && held_bytes >= num_bytes) return held_bytes;
  void* grown = std::realloc(held_bytes ? buffer : nullptr, num_bytes);
  if (!grown) std::abort();
  buffer = grown;
  return num_bytes;
}
