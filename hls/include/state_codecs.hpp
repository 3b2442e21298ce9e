// State in fewer bits, on its way to and from the update; the numbers are those of
// codecs.hpp, and the random bits those that the host draws.
//
//   bf16:  beats ─► narrow_bf16_stochastic ─► wides
//   int8:  codes, scales ─► decode_int8 ─► beats
//          beats ─► measure ─┬─ beats (a block waits for its scale) ─► quantise ─► codes
//                            └─ one header and one scale a block ────►
#pragma once

#include "codecs.hpp"
#include "streams.hpp"

namespace jaxinf {

constexpr Word beats_a_block = code_block / num_lanes;
constexpr Word blocks_a_wide = 16;  // whose scales are one wide

using WaitingBeats = hls::stream<Beat, 4 * beats_a_block>;

struct BlockHeader {
  float inverse;  // of the largest magnitude; of no meaning where is_zero
  bool is_zero, is_signed;
};
using BlockHeaders = hls::stream<BlockHeader, 4>;

// Slot `slot` of a kernel draws its own random bits.
template <Word slot>
void narrow_bf16_stochastic(Beats& from, Word num_elements, Word rounding_key,
                            Word rounding_first, Wides& to) {
  const Word beats = num_beats(num_elements), key = rounding_key + 1 + slot;
  Wide wide = zero_wide();
stochastic_beats:
  for (Word i = 0; i < beats; ++i) {
#pragma HLS PIPELINE II=1
    const Word part = i % 2;
    const Beat beat = from.read();
    if (part == 0) wide = zero_wide();
  stochastic_lanes:
    for (Word lane = 0; lane < num_lanes; ++lane) {
#pragma HLS UNROLL
      const Word number = i * num_lanes + lane;
      const Word random = random_bits(rounding_first + number, key);
      const Word code = stochastic_bf16(bits_of(beat.lane[lane]), random);
      add_item<2>(wide, part * num_lanes + lane, number < num_elements ? code : 0);
    }
    if (part == 1 || i == beats - 1) to.write(wide);
  }
}

inline void decode_int8(Wides& codes, Wides& scales, Word num_elements, Beats& to) {
  Wide codes_wide = zero_wide(), scales_wide = zero_wide();
decode_beats:
  for (Word i = 0; i < num_beats(num_elements); ++i) {
#pragma HLS PIPELINE II=1
    const Word block = i / beats_a_block;
    if (i % 4 == 0) codes_wide = codes.read();
    if (i % (blocks_a_wide * beats_a_block) == 0) scales_wide = scales.read();
    const float scale = float_of(scales_wide.word[block % blocks_a_wide]);
    Beat beat;
  decode_lanes:
    for (Word lane = 0; lane < num_lanes; ++lane) {
#pragma HLS UNROLL
      const Word code = item<1>(codes_wide, i % 4 * num_lanes + lane);
      beat.lane[lane] = decode_code(static_cast<std::uint8_t>(code), scale);
    }
    to.write(beat);
  }
}

// The largest magnitude of each block. Bits of magnitudes compare as the numbers do;
// denormals are zero.
inline void measure(Beats& from, Word num_elements, WaitingBeats& to,
                    BlockHeaders& headers, Wides& scales) {
  const Word beats = num_beats(num_elements);
  Word largest = 0;
  bool is_signed = false;
  Wide scales_wide = zero_wide();
measure_beats:
  for (Word i = 0; i < beats; ++i) {
#pragma HLS PIPELINE II=1
    const Word place = i / beats_a_block % blocks_a_wide;
    if (i % beats_a_block == 0) largest = 0, is_signed = false;
    if (i % (beats_a_block * blocks_a_wide) == 0) scales_wide = zero_wide();
    const Beat beat = from.read();
    to.write(beat);
    Word largest_here = 0;
  measure_lanes:
    for (Word lane = 0; lane < num_lanes; ++lane) {
#pragma HLS UNROLL
      const Word bits = bits_of(beat.lane[lane]), magnitude = bits & 0x7fffffffu;
      if (magnitude >= 0x800000u) {
        largest_here = magnitude > largest_here ? magnitude : largest_here;
        is_signed |= bits >> 31 != 0;
      }
    }
    largest = largest_here > largest ? largest_here : largest;
    const bool is_last = i == beats - 1;
    if (i % beats_a_block == beats_a_block - 1 || is_last) {
      const bool is_bad = largest > largest_coded_bits;
      const Word sign = is_signed ? 0x80000000u : 0u;
      scales_wide.word[place] = is_bad ? 0x7fc00000u : largest ? largest | sign : 0u;
      const bool is_zero = is_bad || largest == 0;
      headers.write({1.0f / float_of(is_zero ? 0x3f800000u : largest), is_zero, is_signed});
      if (place == blocks_a_wide - 1 || is_last) scales.write(scales_wide);
    }
  }
}

template <Word slot>
void quantise(WaitingBeats& from, BlockHeaders& headers, Word num_elements,
              Word rounding_key, Word rounding_first, Wides& to) {
  const Word beats = num_beats(num_elements), key = rounding_key + 1 + slot;
  BlockHeader block = {1.0f, true, false};
  Wide wide = zero_wide();
quantise_beats:
  for (Word i = 0; i < beats; ++i) {
#pragma HLS PIPELINE II=1
    if (i % beats_a_block == 0) block = headers.read();
    const Word part = i % 4;
    const Beat beat = from.read();
    if (part == 0) wide = zero_wide();
  quantise_lanes:
    for (Word lane = 0; lane < num_lanes; ++lane) {
#pragma HLS UNROLL
      const float x = beat.lane[lane];
      const float up = uniform_of(rounding_first + i * num_lanes + lane, key);
      const Word code = block.is_signed ? signed_code(x, block.inverse, up)
                                        : unsigned_code(x, block.inverse, up);
      add_item<1>(wide, part * num_lanes + lane, block.is_zero ? 0 : code);
    }
    if (part == 3 || i == beats - 1) to.write(wide);
  }
}

}  // namespace jaxinf
