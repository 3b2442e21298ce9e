// What a kernel library exports to the device model; written from the kernels' table.
#pragma once

#include <cstdint>
#include <cstring>

// Turns an address of the device's memory into a pointer of this process.
struct CardAddresses {
  void* (*resolve)(void* memory, std::uint64_t address);
  void* memory;

  void* operator()(std::uint64_t address) const { return resolve(memory, address); }
};

// One compute unit: a kernel, and where its register file is.
struct CardUnit {
  const char* name;
  std::uint64_t base;
  void (*run)(const unsigned char* registers, const CardAddresses& addresses);
};

// An argument of the register file, by its C type.
template <typename T>
T card_register(const unsigned char* registers, unsigned offset) {
  T value;
  std::memcpy(&value, registers + offset, sizeof value);
  return value;
}

extern "C" const CardUnit card_units[];
extern "C" const unsigned card_num_units;
