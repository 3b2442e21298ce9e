#include "compute_unit.hpp"

#include <cinttypes>

#include "fail.hpp"

namespace {
// The control register of an HLS kernel.
constexpr std::uint32_t kStart = 1, kDone = 2, kIdle = 4;

void* resolve(void* memory, std::uint64_t address) {
  return static_cast<DeviceMemory*>(memory)->at(address, 1);
}
}  // namespace

ComputeUnit::ComputeUnit(const CardUnit& unit, DeviceMemory& memory)
    : unit_(unit), memory_(memory), registers_(kNumBytes, '\0') {
  thread_ = std::thread([this] { serve(); });
}

ComputeUnit::~ComputeUnit() {
  {
    const std::lock_guard lock(mutex_);
    closing_ = true;
  }
  changed_.notify_all();
  thread_.join();
}

void ComputeUnit::write(std::uint64_t offset, std::string_view bytes) {
  check(offset, bytes.size());
  const std::lock_guard lock(mutex_);
  if (running_) fail("%s: registers written while it runs", unit_.name);
  registers_.replace(offset, bytes.size(), bytes);
  const auto* registers = reinterpret_cast<const unsigned char*>(registers_.data());
  if (offset != 0 || !(card_register<std::uint32_t>(registers, 0) & kStart)) return;
  running_ = true;
  changed_.notify_all();
}

std::string ComputeUnit::read(std::uint64_t offset, std::uint64_t num_bytes) {
  check(offset, num_bytes);
  const std::lock_guard lock(mutex_);
  const std::uint32_t control =
      running_ ? kStart : kIdle | (finished_ ? kDone : std::uint32_t{0});
  std::memcpy(registers_.data(), &control, sizeof control);
  return registers_.substr(offset, num_bytes);
}

void ComputeUnit::serve() {
  std::unique_lock lock(mutex_);
  for (;;) {
    changed_.wait(lock, [this] { return running_ || closing_; });
    if (!running_) return;
    const std::string registers = registers_;
    lock.unlock();
    unit_.run(reinterpret_cast<const unsigned char*>(registers.data()),
              CardAddresses{resolve, &memory_});
    lock.lock();
    running_ = false;
    finished_ = true;
  }
}

void ComputeUnit::check(std::uint64_t offset, std::uint64_t num_bytes) const {
  if (offset > kNumBytes || num_bytes > kNumBytes - offset)
    fail("%s: register 0x%" PRIx64 " is beyond its register file", unit_.name, offset);
}
