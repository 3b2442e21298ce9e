// 1 / sqrt(x) with the bits of the host: from its processor's table of estimates.
//
//   port ─► load ─► a copy of the table for each lane
#pragma once

#include "lane.hpp"
#include "rsqrt.hpp"
#include "streams.hpp"

namespace jaxinf {

// Lengths in words. The table is a block that begins with the number of Newton steps, then
// two estimates in each word: jaxinf/kernels/card_library.py.
constexpr Word estimate_words = num_estimates / 2;
constexpr Word table_words = 16 + estimate_words;

// A lane with its own copy of the table, instead of a pointer to a shared one.
struct RootLane : CardLane {
  Word estimates[estimate_words];
  Word num_steps;

  // Without steps the host has no estimate: round the root, then its reciprocal.
  F32 rsqrt(F32 x) const {
    if (num_steps == 0) return reciprocal(sqrt(x));
    const Word bits = bits_of(x.value), index = estimate_index(bits);
    const Word entry = estimates[index / 2] >> 16 * (index % 2) & 0xffffu;
    return refined_rsqrt<CardLane>(x, float_of(estimate_of(bits, entry)), num_steps > 1);
  }
};

template <Word lanes>
struct Roots {
  using Lanes = RootLane;
  RootLane each[lanes];

  explicit Roots(Wides& from) {
#pragma HLS INLINE
#pragma HLS DISAGGREGATE variable=each
#pragma HLS ARRAY_PARTITION variable=each complete
    const Word num_steps = from.read().word[0];
    Wide wide = zero_wide();
#pragma HLS ARRAY_PARTITION variable=wide.word complete
  fill_words:
    for (Word i = 0; i < estimate_words; ++i) {
#pragma HLS PIPELINE II=1
      if (i % 16 == 0) wide = from.read();
    fill_copies:
      for (Word lane = 0; lane < lanes; ++lane) {
#pragma HLS UNROLL
        each[lane].num_steps = num_steps;
        each[lane].estimates[i] = wide.word[i % 16];
      }
    }
  }

  const RootLane& lane(Word number) const { return each[number]; }
};

// For bodies without such a root.
struct NoRoots {
  using Lanes = CardLane;
  CardLane lane(Word) const { return CardLane(); }
};

}  // namespace jaxinf
