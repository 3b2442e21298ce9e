// Expands top-k pairs to a dense gradient: zeros, and each value at its position.
//
//   values, indices ─► one pair a cycle ─► the beat it lies in ─► beats
//
// Positions ascend, so one beat is open at a time and no memory is needed: n elements
// with k pairs take n / lanes + k cycles. A pair that does not ascend, or lies beyond the
// subgroup, is left out, and `valid` becomes 0. Of equal positions the last is used.
#pragma once

#include "convert.hpp"
#include "streams.hpp"

namespace jaxinf {

template <class Format, Word lanes>
void decompress(Wides& values, Wides& indices, Word num_elements, Word num_selected,
                BeatsOf<lanes>& to, Words& valid) {
  constexpr Word values_a_wide = 64 / Format::bytes;
  const Word beats = num_beats<lanes>(num_elements);
  Wide values_wide = zero_wide(), indices_wide = zero_wide();
  BeatOf<lanes> open;
#pragma HLS ARRAY_PARTITION variable=values_wide.word complete
#pragma HLS ARRAY_PARTITION variable=indices_wide.word complete
#pragma HLS ARRAY_PARTITION variable=open.lane complete
clear_lanes:
  for (Word lane = 0; lane < lanes; ++lane) {
#pragma HLS UNROLL
    open.lane[lane] = 0.0f;
  }
  Word taken = 0, written = 0;
  bool have_pair = false, all_valid = true;
  Word index = 0, last_index = 0;
  float value = 0.0f;
decompress_steps:
  for (std::uint64_t step = 0; step < std::uint64_t(beats) + num_selected; ++step) {
#pragma HLS PIPELINE II=1
    if (!have_pair && taken < num_selected) {
      if (taken % values_a_wide == 0) values_wide = values.read();
      if (taken % 16 == 0) indices_wide = indices.read();
      index = indices_wide.word[taken % 16];
      value = widen_item(Format(), item<Format::bytes>(values_wide, taken % values_a_wide));
      all_valid &= index < num_elements && (taken == 0 || index >= last_index);
      last_index = index;
      have_pair = true;
      ++taken;
    }
    const Word beat_of_pair = index / lanes;
    if (have_pair && (beat_of_pair <= written || written == beats)) {
    place_lanes:
      for (Word lane = 0; lane < lanes; ++lane) {
#pragma HLS UNROLL
        const bool is_here = beat_of_pair == written && index % lanes == lane;
        open.lane[lane] = is_here ? value : open.lane[lane];
      }
      have_pair = false;
    } else {
      to.write(open);
      ++written;
    empty_lanes:
      for (Word lane = 0; lane < lanes; ++lane) {
#pragma HLS UNROLL
        open.lane[lane] = 0.0f;
      }
    }
  }
  valid.write(all_valid);
}

}  // namespace jaxinf
