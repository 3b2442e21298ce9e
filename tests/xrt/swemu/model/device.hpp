// The device: memory and compute units, and the requests that reach them.
#pragma once

#include <cstdint>
#include <memory>
#include <string_view>
#include <vector>

#include "compute_unit.hpp"
#include "memory.hpp"
#include "wire.hpp"

class Device {
 public:
  Device() = default;
  ~Device();

  // Answers a request; `closed` becomes true with the last one.
  Reply answer(std::uint32_t request, const Message& message, bool& closed);

 private:
  Reply reset_or_close(const Message& message, bool& closed);
  Reply load(const Message& message);
  Reply allocate(const Message& message);
  Reply release(const Message& message);
  Reply copy_in(const Message& message);
  Reply copy_out(const Message& message);
  Reply write_registers(const Message& message);
  Reply read_registers(const Message& message);

  ComputeUnit& unit_at(std::uint64_t address);
  void unload();

  DeviceMemory memory_;
  void* library_ = nullptr;
  std::vector<std::unique_ptr<ComputeUnit>> units_;
};
