// Codecs for state in fewer bits, before and after the update. The numbers are those of
// codecs.hpp, and the random bits are the host's.
//
//   bf16:  beats ─► narrow_bf16_stochastic ─► wides
//   int8:  codes, scales ─► decode_int8 ─► beats
//          beats ─► measure ─┬─ beats (a block waits for its scale) ─► quantise ─► codes
//                            └─ one header and one scale a block ────►
#pragma once

#include "codecs.hpp"
#include "streams.hpp"

namespace jaxinf {

constexpr Word blocks_a_wide = 16;  // number of blocks whose scales fill one wide

template <Word lanes>
constexpr Word beats_a_block() {
  return code_block / lanes;
}

// Most cycles from a block's last beat to its header: the vendor's divider takes some 30,
// and the comparisons before it a few.
constexpr Word header_latency = 64;

// A block waits for its header, and the next block arrives while the divider works. In a
// shorter stream `measure` would stall, its divider with it, and the header would never
// come. csim has this latency, too, and stops there (hls/tb/latency_tb.cpp).
template <Word lanes>
constexpr Word waiting_depth() {
  return beats_a_block<lanes>() + header_latency + 16;
}

template <Word lanes>
using WaitingBeatsOf = hls::stream<BeatOf<lanes>, waiting_depth<lanes>()>;
using WaitingBeats = WaitingBeatsOf<JAXINF_LANES>;

struct BlockHeader {
  float inverse;  // of the largest magnitude; undefined if is_zero
  bool is_zero, is_signed;
};
using BlockHeaders = hls::stream<BlockHeader, 4>;

// Slot `slot` of a kernel draws its own random bits.
template <Word slot, Word lanes>
void narrow_bf16_stochastic(BeatsOf<lanes>& from, Word num_elements, Word rounding_key,
                            Word rounding_first, Wides& to) {
  constexpr Word beats_a_wide = 32 / lanes;
  const Word beats = num_beats<lanes>(num_elements), key = rounding_key + 1 + slot;
  Wide wide = zero_wide();
#pragma HLS ARRAY_PARTITION variable=wide.word complete
stochastic_beats:
  for (Word i = 0; i < beats; ++i) {
#pragma HLS PIPELINE II=1
    const Word part = i % beats_a_wide;
    const BeatOf<lanes> beat = from.read();
    if (part == 0) wide = zero_wide();
  stochastic_lanes:
    for (Word lane = 0; lane < lanes; ++lane) {
#pragma HLS UNROLL
      const Word number = i * lanes + lane;
      const Word random = random_bits(rounding_first + number, key);
      const Word code = stochastic_bf16(bits_of(beat.lane[lane]), random);
      add_item<2>(wide, part * lanes + lane, number < num_elements ? code : 0);
    }
    if (part == beats_a_wide - 1 || i == beats - 1) to.write(wide);
  }
}

template <Word lanes>
void decode_int8(Wides& codes, Wides& scales, Word num_elements, BeatsOf<lanes>& to) {
#pragma HLS DISAGGREGATE variable=code_tables
#pragma HLS BIND_STORAGE variable=code_tables.of_signed type=rom_np impl=bram
#pragma HLS BIND_STORAGE variable=code_tables.of_unsigned type=rom_np impl=bram
  constexpr Word beats_a_wide = 64 / lanes, block_beats = beats_a_block<lanes>();
  const Word beats = num_beats<lanes>(num_elements);
  Wide codes_wide = zero_wide(), scales_wide = zero_wide();
#pragma HLS ARRAY_PARTITION variable=codes_wide.word complete
#pragma HLS ARRAY_PARTITION variable=scales_wide.word complete
decode_beats:
  for (Word i = 0; i < beats; ++i) {
#pragma HLS PIPELINE II=1
    const Word block = i / block_beats;
    if (i % beats_a_wide == 0) codes_wide = codes.read();
    if (i % (blocks_a_wide * block_beats) == 0) scales_wide = scales.read();
    const float scale = float_of(scales_wide.word[block % blocks_a_wide]);
    BeatOf<lanes> beat;
  decode_lanes:
    for (Word lane = 0; lane < lanes; ++lane) {
#pragma HLS UNROLL
      const Word code = item<1>(codes_wide, i % beats_a_wide * lanes + lane);
      beat.lane[lane] = decode_code(static_cast<std::uint8_t>(code), scale);
    }
    to.write(beat);
  }
}

// Finds the largest magnitude of each block. Bits of magnitudes have the order of the
// numbers; denormals are zero.
template <Word lanes, class Waiting>
void measure(BeatsOf<lanes>& from, Word num_elements, Waiting& to, BlockHeaders& headers,
             Wides& scales) {
  constexpr Word block_beats = beats_a_block<lanes>();
  const Word beats = num_beats<lanes>(num_elements);
  Word largest = 0;
  bool is_signed = false;
  Wide scales_wide = zero_wide();
#pragma HLS ARRAY_PARTITION variable=scales_wide.word complete
measure_beats:
  for (Word i = 0; i < beats; ++i) {
#pragma HLS PIPELINE II=1
    JAXINF_ITERATION;
    const Word place = i / block_beats % blocks_a_wide;
    if (i % block_beats == 0) largest = 0, is_signed = false;
    if (i % (block_beats * blocks_a_wide) == 0) scales_wide = zero_wide();
    const BeatOf<lanes> beat = from.read();
    to.write(beat);
    Word largest_here = 0;
  measure_lanes:
    for (Word lane = 0; lane < lanes; ++lane) {
#pragma HLS UNROLL
      const Word bits = bits_of(beat.lane[lane]), magnitude = bits & 0x7fffffffu;
      if (magnitude >= 0x800000u) {
        largest_here = magnitude > largest_here ? magnitude : largest_here;
        is_signed |= bits >> 31 != 0;
      }
    }
    largest = largest_here > largest ? largest_here : largest;
    const bool is_last = i == beats - 1;
    if (i % block_beats == block_beats - 1 || is_last) {
      const bool is_bad = largest > largest_coded_bits;
      const Word sign = is_signed ? 0x80000000u : 0u;
      scales_wide.word[place] = is_bad ? 0x7fc00000u : largest ? largest | sign : 0u;
      const bool is_zero = is_bad || largest == 0;
      const float inverse = 1.0f / float_of(is_zero ? 0x3f800000u : largest);
      const BlockHeader header = {inverse, is_zero, is_signed};
      JAXINF_WRITE_LATE(headers, header, header_latency);
      if (place == blocks_a_wide - 1 || is_last) scales.write(scales_wide);
    }
  }
}

template <Word slot, Word lanes, int depth>
void quantise(hls::stream<BeatOf<lanes>, depth>& from, BlockHeaders& headers, Word num_elements,
              Word rounding_key, Word rounding_first, Wides& to) {
  constexpr Word beats_a_wide = 64 / lanes, block_beats = beats_a_block<lanes>();
  const Word beats = num_beats<lanes>(num_elements), key = rounding_key + 1 + slot;
  BlockHeader block = {1.0f, true, false};
  Wide wide = zero_wide();
#pragma HLS ARRAY_PARTITION variable=wide.word complete
quantise_beats:
  for (Word i = 0; i < beats; ++i) {
#pragma HLS PIPELINE II=1
    if (i % block_beats == 0) block = headers.read();
    const Word part = i % beats_a_wide;
    const BeatOf<lanes> beat = from.read();
    if (part == 0) wide = zero_wide();
  quantise_lanes:
    for (Word lane = 0; lane < lanes; ++lane) {
#pragma HLS UNROLL
      const float x = beat.lane[lane];
      const float up = uniform_of(rounding_first + i * lanes + lane, key);
      const Word code = block.is_signed ? signed_code(x, block.inverse, up)
                                        : unsigned_code(x, block.inverse, up);
      add_item<1>(wide, part * lanes + lane, block.is_zero ? 0 : code);
    }
    if (part == beats_a_wide - 1 || i == beats - 1) to.write(wide);
  }
}

}  // namespace jaxinf
