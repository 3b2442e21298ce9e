#include "memory.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cinttypes>
#include <cstring>

#include "fail.hpp"

namespace {
constexpr std::uint64_t kPage = 4096;
}

DeviceMemory::DeviceMemory() {
  file_ = memfd_create("card-ddr", MFD_CLOEXEC);
  if (file_ < 0 || ftruncate(file_, kNumBytes) != 0)
    fail("no memory file: %s", std::strerror(errno));
  void* mapped =
      mmap(nullptr, kNumBytes, PROT_READ | PROT_WRITE, MAP_SHARED, file_, 0);
  if (mapped == MAP_FAILED) fail("cannot map memory: %s", std::strerror(errno));
  bytes_ = static_cast<std::byte*>(mapped);
  path_ = "/proc/" + std::to_string(getpid()) + "/fd/" + std::to_string(file_);
}

DeviceMemory::~DeviceMemory() {
  munmap(bytes_, kNumBytes);
  close(file_);
}

void DeviceMemory::allocate(std::uint64_t address, std::uint64_t num_bytes) {
  if (num_bytes > kNumBytes || address > kNumBytes - num_bytes)
    fail("buffer of %" PRIu64 " bytes at 0x%" PRIx64 ": the DDR ends at 0x%" PRIx64,
         num_bytes, address, kNumBytes);
  const std::lock_guard lock(mutex_);
  buffers_[address] = num_bytes;
}

void DeviceMemory::release(std::uint64_t address) {
  const std::lock_guard lock(mutex_);
  const auto found = buffers_.find(address);
  if (found == buffers_.end())
    fail("release of 0x%" PRIx64 ": no buffer is there", address);
  punch(found->first, found->second);
  buffers_.erase(found);
}

void DeviceMemory::release_all() {
  const std::lock_guard lock(mutex_);
  for (const auto& [address, num_bytes] : buffers_) punch(address, num_bytes);
  buffers_.clear();
}

std::byte* DeviceMemory::at(std::uint64_t address, std::uint64_t num_bytes) {
  const std::lock_guard lock(mutex_);
  auto after = buffers_.upper_bound(address);
  if (after != buffers_.begin()) {
    const auto& [begin, length] = *--after;
    const std::uint64_t offset = address - begin;
    if (offset <= length && num_bytes <= length - offset) return bytes_ + address;
  }
  fail("access to %" PRIu64 " bytes at 0x%" PRIx64 ": not within a buffer", num_bytes,
       address);
}

// Buffers start at a page each, so that a whole last page is this buffer's own.
void DeviceMemory::punch(std::uint64_t address, std::uint64_t num_bytes) {
  const std::uint64_t whole = (num_bytes + kPage - 1) / kPage * kPage;
  if (whole && fallocate(file_, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE,
                         static_cast<off_t>(address), static_cast<off_t>(whole)) != 0)
    fail("cannot free memory at 0x%" PRIx64 ": %s", address, std::strerror(errno));
}
