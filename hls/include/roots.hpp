// 1 / sqrt(x) with the bits of the host: from its processor's table of estimates.
//
//   port ─► load ─► copies of the table, each in memory with two ports ─► two lanes each
#pragma once

#include "lane.hpp"
#include "rsqrt.hpp"
#include "streams.hpp"

namespace jaxinf {

// Of the table in words, two estimates each, after a block that begins with the number of
// Newton steps: jaxinf/kernels/estimates.py.
constexpr Word estimate_words = num_estimates / 2;
constexpr Word table_words = 16 + estimate_words;

struct RootLane : CardLane {
  const Word* estimates;
  Word num_steps;

  // Without steps, two roundings: the host has no estimate.
  F32 rsqrt(F32 x) const {
    if (num_steps == 0) return reciprocal(sqrt(x));
    const Word bits = bits_of(x.value), index = estimate_index(bits);
    const Word entry = estimates[index / 2] >> 16 * (index % 2) & 0xffffu;
    return refined_rsqrt<CardLane>(x, float_of(estimate_of(bits, entry)), num_steps > 1);
  }
};

struct Roots {
  using Lanes = RootLane;
  Word num_steps;
  Word copies[num_lanes / 2][estimate_words];

  explicit Roots(Wides& from) {
#pragma HLS INLINE
#pragma HLS ARRAY_PARTITION variable=copies dim=1 complete
    num_steps = from.read().word[0];
    Wide wide = zero_wide();
  fill_words:
    for (Word i = 0; i < estimate_words; ++i) {
#pragma HLS PIPELINE II=1
      if (i % 16 == 0) wide = from.read();
    fill_copies:
      for (Word copy = 0; copy < num_lanes / 2; ++copy) {
#pragma HLS UNROLL
        copies[copy][i] = wide.word[i % 16];
      }
    }
  }

  RootLane lane(Word number) const {
    RootLane lane;
    lane.estimates = copies[number / 2];
    lane.num_steps = num_steps;
    return lane;
  }
};

// Of a body that takes no such root.
struct NoRoots {
  using Lanes = CardLane;
  CardLane lane(Word) const { return CardLane(); }
};

}  // namespace jaxinf
