// The cards' fused multiply-add against the C library's, with denormals as zero.
#include "check.hpp"
#include "fma.hpp"

#include <cmath>

using jaxinf::bits_of;
using jaxinf::float_of;

namespace {

// Volatile, so that the compiler computes nothing before denormals are flushed.
void check(float a, float b, float c) {
  volatile float va = a, vb = b, vc = c;
  const std::uint32_t expected = bits_of(std::fma(va, vb, vc));
  const std::uint32_t found = bits_of(jaxinf::fused_multiply_add(a, b, c));
  const bool both_nan = testbench::is_nan(expected) && testbench::is_nan(found);
  CHECK(found == expected || both_nan, "%08x %08x %08x gives %08x, expected %08x",
        bits_of(a), bits_of(b), bits_of(c), found, expected);
}

}  // namespace

int main() {
  const jaxinf::csim::FlushToZero section;
  testbench::Random random(1);
  const float special[] = {0.0f,     -0.0f,     1.0f,      -1.0f,    1.5f,
                           INFINITY, -INFINITY, NAN,       1e-38f,   -1.2e-38f,
                           3.4e38f,  1e-45f,    1.9e-38f,  5.9e-8f,  16777217.0f,
                           float_of(0x00800000u), float_of(0x00ffffffu),
                           float_of(0x3f7fffffu), float_of(0x3f800001u)};
  for (float a : special)
    for (float b : special)
      for (float c : special) check(a, b, c);

  // Products half-way between two numbers, where any addend decides the rounding.
  for (int m = 1; m < 1000; m += 2)
    for (int exponent = -120; exponent < 0; ++exponent) {
      const float a = 1.0f + std::ldexp(static_cast<float>(m), -12);
      const float c = std::ldexp(1.0f, exponent);
      check(a, a, c);
      check(a, a, -c);
      check(a, -a, c);
    }

  constexpr int rounds = 3000000;
  for (int i = 0; i < rounds; ++i) {
    check(random.number(), random.number(), random.number());
    // Terms that cancel to any degree.
    const float a = float_of(0x3f000000u + random.below(1 << 25));
    const float b = float_of(0x3f000000u + random.below(1 << 25));
    const float near = -a * b;
    check(a, b, float_of(bits_of(near) + random.below(9) - 4));
    check(a, b, float_of(bits_of(near) ^ (1u << random.below(31))));
    // Results near the smallest normal number.
    const float tiny = float_of((1 + random.below(30)) << 23 | random.below(1 << 23));
    check(a * 1e-30f, b * 1e-8f, random.below(2) ? tiny : -tiny);
  }
  std::printf("fma: %d sums, the bits of the C library\n", rounds * 4);
}
