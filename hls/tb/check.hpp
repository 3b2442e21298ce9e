// Helpers of the testbenches: random numbers of all magnitudes, and failing checks.
#pragma once

#include <cstdint>
#include <cstdio>
#include <cstdlib>

#include "streams.hpp"

#define CHECK(condition, ...)                                              \
  do {                                                                     \
    if (!(condition)) {                                                    \
      std::printf("%s:%d: %s: ", __FILE__, __LINE__, #condition);          \
      std::printf(__VA_ARGS__);                                            \
      std::printf("\n");                                                   \
      std::exit(1);                                                        \
    }                                                                      \
  } while (0)

namespace testbench {

class Random {
 public:
  explicit Random(std::uint64_t seed) : state_(seed * 2 + 1) {}

  std::uint32_t bits() {
    state_ = state_ * 6364136223846793005u + 1442695040888963407u;
    return static_cast<std::uint32_t>(state_ >> 32);
  }
  std::uint32_t below(std::uint32_t limit) { return bits() % limit; }
  float number() { return jaxinf::float_of(bits()); }

 private:
  std::uint64_t state_;
};

inline bool is_nan(std::uint32_t bits) { return (bits & 0x7fffffffu) > 0x7f800000u; }

}  // namespace testbench
