// A compute unit: a register file, and a thread that runs the kernel.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <string>
#include <string_view>
#include <thread>

#include "card_units.hpp"
#include "memory.hpp"

class ComputeUnit {
 public:
  ComputeUnit(const CardUnit& unit, DeviceMemory& memory);
  ~ComputeUnit();  // waits for the kernel
  ComputeUnit(const ComputeUnit&) = delete;
  ComputeUnit& operator=(const ComputeUnit&) = delete;

  std::uint64_t base() const { return unit_.base; }

  // Writes registers; the start bit in the first starts the kernel.
  void write(std::uint64_t offset, std::string_view bytes);

  // Reads registers; the first tells whether the kernel runs.
  std::string read(std::uint64_t offset, std::uint64_t num_bytes);

 private:
  static constexpr std::uint64_t kNumBytes = 4096;

  void serve();
  void check(std::uint64_t offset, std::uint64_t num_bytes) const;

  const CardUnit& unit_;
  DeviceMemory& memory_;
  std::mutex mutex_;
  std::condition_variable changed_;
  bool running_ = false;
  bool finished_ = false;  // a kernel has ended, and none has started since
  bool closing_ = false;
  std::string registers_;
  std::thread thread_;
};
