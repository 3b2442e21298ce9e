#include "device.hpp"

#include <dlfcn.h>

#include <cinttypes>
#include <cstring>
#include <string>

#include "fail.hpp"

namespace {
enum Request : std::uint32_t {
  kClose = 1,
  kLoadBitstream = 3,
  kAllocateBuffer = 4,
  kFreeBuffer = 5,
  kCopyHostToDevice = 6,
  kCopyDeviceToHost = 7,
  kWriteRegisters = 9,
  kReadRegisters = 11,
  kSetEnvironment = 20,
  kSetupInstance = 28,
};

constexpr std::uint64_t kRegisterRange = 0x10000;  // of one compute unit

Reply acknowledge() {
  Reply reply;
  reply.number(1, 1);
  return reply;
}

template <typename T>
T* symbol(void* library, const char* name) {
  void* found = dlsym(library, name);
  if (!found) fail("the bitstream is not a kernel library: it has no %s", name);
  return static_cast<T*>(found);
}
}  // namespace

Device::~Device() { unload(); }

Reply Device::answer(std::uint32_t request, const Message& message, bool& closed) {
  switch (request) {
    case kClose: return reset_or_close(message, closed);
    case kLoadBitstream: return load(message);
    case kAllocateBuffer: return allocate(message);
    case kFreeBuffer: return release(message);
    case kCopyHostToDevice: return copy_in(message);
    case kCopyDeviceToHost: return copy_out(message);
    case kWriteRegisters: return write_registers(message);
    case kReadRegisters: return read_registers(message);
    case kSetEnvironment:
    case kSetupInstance: return acknowledge();
  }
  fail("request %u is not one that this model knows", request);
}

// Field 3 tells a reset, which precedes a load, from the end of the session.
Reply Device::reset_or_close(const Message& message, bool& closed) {
  closed = message.number(3) != 0;
  if (!closed) {
    unload();
    memory_.release_all();
  }
  return acknowledge();
}

Reply Device::load(const Message& message) {
  const std::string path(message.bytes(2));
  if (path.empty()) return acknowledge();  // a buffer is wanted before an xclbin
  unload();
  library_ = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (!library_) fail("cannot load the bitstream: %s", dlerror());
  const auto* units = symbol<const CardUnit>(library_, "card_units");
  const unsigned num_units = *symbol<const unsigned>(library_, "card_num_units");
  for (unsigned i = 0; i < num_units; ++i)
    units_.push_back(std::make_unique<ComputeUnit>(units[i], memory_));
  return acknowledge();
}

Reply Device::allocate(const Message& message) {
  memory_.allocate(message.number(1), message.number(2));
  const bool shared = message.number(3) != 0;
  Reply reply = acknowledge();
  reply.bytes(2, shared ? std::string_view(memory_.path()) : std::string_view());
  return reply;
}

Reply Device::release(const Message& message) {
  memory_.release(message.number(1));
  return acknowledge();
}

Reply Device::copy_in(const Message& message) {
  const std::string_view bytes = message.bytes(4);
  std::memcpy(memory_.at(message.number(3), bytes.size()), bytes.data(), bytes.size());
  Reply reply;
  reply.number(1, bytes.size());
  return reply;
}

Reply Device::copy_out(const Message& message) {
  const std::uint64_t num_bytes = message.number(5);
  const std::byte* bytes = memory_.at(message.number(4), num_bytes);
  Reply reply;
  reply.number(1, num_bytes);
  reply.bytes(2, {reinterpret_cast<const char*>(bytes), num_bytes});
  return reply;
}

Reply Device::write_registers(const Message& message) {
  ComputeUnit& unit = unit_at(message.number(2));
  unit.write(message.number(2) - unit.base(), message.bytes(4));
  return acknowledge();
}

Reply Device::read_registers(const Message& message) {
  ComputeUnit& unit = unit_at(message.number(2));
  Reply reply = acknowledge();
  reply.bytes(2, unit.read(message.number(2) - unit.base(), message.number(3)));
  return reply;
}

ComputeUnit& Device::unit_at(std::uint64_t address) {
  for (const auto& unit : units_)
    if (address >= unit->base() && address - unit->base() < kRegisterRange)
      return *unit;
  fail("register 0x%" PRIx64 " is of no compute unit", address);
}

void Device::unload() {
  units_.clear();
  if (library_) dlclose(library_);
  library_ = nullptr;
}
