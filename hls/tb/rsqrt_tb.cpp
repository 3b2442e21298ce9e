// The cards' reciprocal square root, with this machine's table, against the host's lanes.
#if defined(__AVX2__)
#define JAXINF_ENTRY rsqrt_estimates
#include "rsqrt_estimates.cpp"  // the host's, with its lanes
#undef JAXINF_INLINE
#include "check.hpp"
#include "memory.hpp"
#include "roots.hpp"

#include <memory>

using jaxinf::bits_of;
using jaxinf::float_of;

namespace {

jaxinf::Wide table[jaxinf::table_words / 16];
std::uint64_t num_compared = 0;

// Compares eight arguments, for a host with one Newton step or two.
void check(jaxinf::RootLane& lane, Lanes::U32 x) {
  const Lanes::F32 numbers = (Lanes::F32)x;
  const Lanes::F32 estimates = (Lanes::F32)instruction(x);
  for (Word steps = 1; steps <= 2; ++steps) {
    const Lanes::U32 expected =
        (Lanes::U32)jaxinf::refined_rsqrt<Lanes>(numbers, estimates, steps == 2);
    lane.num_steps = steps;
    for (int i = 0; i < Lanes::size; ++i) {
      const Word found = bits_of(lane.rsqrt(numbers[i]).value);
      const bool both_nan = testbench::is_nan(found) && testbench::is_nan(expected[i]);
      CHECK(found == expected[i] || both_nan, "%u steps of %08x give %08x, expected %08x",
            steps, x[i], found, expected[i]);
    }
  }
  num_compared += 2 * Lanes::size;
}

void check_all(jaxinf::Wides& words) {
  using Roots = jaxinf::Roots<JAXINF_LANES>;
  std::unique_ptr<Roots> roots(new Roots(words));
  CHECK(roots->lane(0).num_steps == (jaxinf::refines_twice ? 2 : 1), "%u steps",
        roots->lane(0).num_steps);
  const Lanes::U32 next = {0, 1, 2, 3, 4, 5, 6, 7};
  for (Word exponent = 127; exponent <= 128; ++exponent)  // every mantissa
    for (Word m = 0; m < 1u << 23; m += 8)
      check(roots->each[m / 8 % JAXINF_LANES], (exponent << 23 | m) + next);
  // All exponents and both signs; zeros, denormals, infinities and NaNs are among them.
  for (Word exponent = 0; exponent < 512; ++exponent)
    for (Word m = 0; m < 1u << 23; m += 8 * 257)
      check(roots->each[exponent % JAXINF_LANES], (exponent << 23 | m) + next);

  jaxinf::RootLane& lane = roots->each[0];
  lane.num_steps = 0;
  for (float x : {0.0f, 1e-30f, 0.3f, 2.0f, 1e30f})
    CHECK(lane.rsqrt(x).value == 1.0f / std::sqrt(x), "no estimate: %g", x);
}

}  // namespace

int main() {
  const jaxinf::csim::FlushToZero section;
  std::uint16_t entries[jaxinf::num_estimates];
  const int steps = rsqrt_estimates(entries);
  CHECK(steps, "this processor's estimate is no table");
  table[0].word[0] = static_cast<Word>(steps);
  std::memcpy(table + 1, entries, sizeof entries);
  jaxinf::Wides words;
  JAXINF_REGION;
  JAXINF_STAGE(jaxinf::load<jaxinf::Table>(table, jaxinf::table_words, words));
  JAXINF_STAGE(check_all(words));
  JAXINF_RUN;
  std::printf("rsqrt: %llu roots, the bits of the host's\n",
              static_cast<unsigned long long>(num_compared));
}
#else
#include <cstdio>

int main() { std::printf("rsqrt: no host's estimate on this processor\n"); }
#endif
