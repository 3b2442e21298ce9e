// The device's DDR: one anonymous file that the host maps, too.
//
// The address of a buffer, chosen by the host's allocator, is its offset in the file.
// The file has no name: nothing is left of it when both processes are gone.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <string>

class DeviceMemory {
 public:
  // As much as the host maps where all buffers are in one file.
  static constexpr std::uint64_t kNumBytes = std::uint64_t{2} << 30;

  DeviceMemory();
  ~DeviceMemory();
  DeviceMemory(const DeviceMemory&) = delete;
  DeviceMemory& operator=(const DeviceMemory&) = delete;

  // What the host opens to map the file.
  const std::string& path() const { return path_; }

  void allocate(std::uint64_t address, std::uint64_t num_bytes);
  void release(std::uint64_t address);
  void release_all();

  // The bytes at an address; fails unless all of them are of one buffer.
  std::byte* at(std::uint64_t address, std::uint64_t num_bytes);

 private:
  void punch(std::uint64_t address, std::uint64_t num_bytes);

  int file_;
  std::byte* bytes_;
  std::string path_;
  std::mutex mutex_;
  std::map<std::uint64_t, std::uint64_t> buffers_;  // address -> bytes
};
