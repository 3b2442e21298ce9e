// Scalars arrive as 32-bit words, whatever their bits stand for.
#pragma once

#include <cstdint>
#include <cstring>

using Scalar = std::uint32_t;

template <typename T>
T from_bits(Scalar word) {
  static_assert(sizeof(T) == sizeof word);
  T value;
  std::memcpy(&value, &word, sizeof value);
  return value;
}
