// The functions of NVIDIA's driver that copies on a stream need, found at run time.
#ifndef JAXINF_CUDA_DRIVER_H_
#define JAXINF_CUDA_DRIVER_H_

#include <dlfcn.h>

#include <cstddef>
#include <cstdint>
#include <cstdio>

namespace jaxinf_cuda {

using Result = int;
using Context = struct CUctx_st*;
using Stream = struct CUstream_st*;
using Event = struct CUevent_st*;
using Address = unsigned long long;

constexpr Result out_of_memory = 2;
constexpr unsigned host_alloc_flags = 1 | 2;  // for all contexts, and devices' addresses
constexpr unsigned event_flags = 1 | 2;       // threads sleep, and no times are taken
constexpr unsigned at_least = 0;              // of a wait for a value, modulo 2^32

// Suffixes are those of the versions whose arguments these are (CUDA 11.7 and newer).
#define JAXINF_CUDA_FUNCTIONS(F)                                                  \
  F(stream_context, "cuStreamGetCtx", (Stream, Context*))                         \
  F(push_context, "cuCtxPushCurrent_v2", (Context))                               \
  F(pop_context, "cuCtxPopCurrent_v2", (Context*))                                \
  F(host_alloc, "cuMemHostAlloc", (void**, std::size_t, unsigned))                \
  F(host_free, "cuMemFreeHost", (void*))                                          \
  F(event_create, "cuEventCreate", (Event*, unsigned))                            \
  F(event_record, "cuEventRecord", (Event, Stream))                               \
  F(event_synchronize, "cuEventSynchronize", (Event))                             \
  F(event_destroy, "cuEventDestroy_v2", (Event))                                  \
  F(copy_to_host, "cuMemcpyDtoHAsync_v2", (void*, Address, std::size_t, Stream))  \
  F(copy_to_device, "cuMemcpyHtoDAsync_v2",                                       \
    (Address, const void*, std::size_t, Stream))                                  \
  F(fill, "cuMemsetD32Async", (Address, unsigned, std::size_t, Stream))           \
  F(wait_for_event, "cuStreamWaitEvent", (Stream, Event, unsigned))               \
  F(wait_for_value, "cuStreamWaitValue32_v2",                                     \
    (Stream, Address, std::uint32_t, unsigned))                                   \
  F(error_string, "cuGetErrorString", (Result, const char**))

struct Driver {
#define JAXINF_CUDA_FIELD(name, symbol, arguments) Result(*name) arguments;
  JAXINF_CUDA_FUNCTIONS(JAXINF_CUDA_FIELD)
#undef JAXINF_CUDA_FIELD
};

// Finds all functions in a library; otherwise false, and the reason is in `text`.
inline bool load(const char* path, Driver& driver, char* text, std::size_t num_bytes) {
  void* library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  if (!library) {
    std::snprintf(text, num_bytes, "%s", dlerror());
    return false;
  }
#define JAXINF_CUDA_FIND(name, symbol, arguments)                               \
  driver.name = reinterpret_cast<Result(*) arguments>(dlsym(library, symbol));  \
  if (!driver.name) {                                                           \
    std::snprintf(text, num_bytes, "%s has no %s", path, symbol);               \
    return false;                                                               \
  }
  JAXINF_CUDA_FUNCTIONS(JAXINF_CUDA_FIND)
#undef JAXINF_CUDA_FIND
  return true;
}

}  // namespace jaxinf_cuda

#endif  // JAXINF_CUDA_DRIVER_H_
