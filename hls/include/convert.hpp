// Converts between the formats in memory and float32, one beat a cycle.
#pragma once

#include "codecs.hpp"
#include "streams.hpp"

namespace jaxinf {

// ---- one number

inline float widen_item(F32, Word bits) { return float_of(bits); }
inline float widen_item(Bf16, Word bits) { return float_of(bits << 16); }
inline float widen_item(F16, Word bits) {
  const Word sign = (bits & 0x8000u) << 16, exponent = bits >> 10 & 31u;
  const Word fraction = bits & 0x3ffu;
  Word magnitude = (exponent + 112) << 23 | fraction << 13;
  if (exponent == 31)
    magnitude = 0x7f800000u | fraction << 13 | (fraction ? 0x400000u : 0u);
  if (exponent == 0)  // a subnormal half: units of 2^-24
    magnitude = bits_of(static_cast<float>(static_cast<std::int32_t>(fraction)) *
                        5.9604644775390625e-8f);
  return float_of(sign | magnitude);
}

// To nearest, ties to even.
inline Word narrow_item(F32, float x) { return bits_of(x); }
inline Word narrow_item(Bf16, float x) { return narrow_bf16(bits_of(x)); }
inline Word narrow_item(F16, float x) {
  const Word sign = bits_of(x) >> 16 & 0x8000u, magnitude = bits_of(x) & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return sign | 0x7e00u | (magnitude >> 13 & 0x3ffu);
  if (magnitude >= 0x477ff000u) return sign | 0x7c00u;  // 65,520 and above
  if (magnitude >= 0x38800000u)
    return sign | (magnitude + 0xfffu + (magnitude >> 13 & 1u) - 0x38000000u) >> 13;
  const Word exponent = magnitude >> 23;
  if (exponent < 102) return sign;  // below half the smallest number
  const Word significand = (magnitude & 0x7fffffu) | 0x800000u, shift = 126 - exponent;
  const Word whole = significand >> shift, half = 1u << (shift - 1);
  const Word rest = significand & ((1u << shift) - 1);
  return sign | (whole + (rest > half || (rest == half && (whole & 1u))));
}

// ---- stages

template <class Format, Word lanes>
void widen(Wides& from, Word num_elements, BeatsOf<lanes>& to) {
  constexpr Word beats_a_wide = 64 / Format::bytes / lanes;
  const Word beats = num_beats<lanes>(num_elements);
  Wide wide = zero_wide();
#pragma HLS ARRAY_PARTITION variable=wide.word complete
widen_beats:
  for (Word i = 0; i < beats; ++i) {
#pragma HLS PIPELINE II=1
    const Word part = i % beats_a_wide;
    if (part == 0) wide = from.read();
    BeatOf<lanes> beat;
  widen_lanes:
    for (Word lane = 0; lane < lanes; ++lane) {
#pragma HLS UNROLL
      const Word bits = item<Format::bytes>(wide, part * lanes + lane);
      beat.lane[lane] = widen_item(Format(), bits);
    }
    to.write(beat);
  }
}

template <class Format, Word lanes>
void narrow(BeatsOf<lanes>& from, Word num_elements, Wides& to) {
  constexpr Word beats_a_wide = 64 / Format::bytes / lanes;
  const Word beats = num_beats<lanes>(num_elements);
  Wide wide = zero_wide();
#pragma HLS ARRAY_PARTITION variable=wide.word complete
narrow_beats:
  for (Word i = 0; i < beats; ++i) {
#pragma HLS PIPELINE II=1
    const Word part = i % beats_a_wide;
    const BeatOf<lanes> beat = from.read();
    if (part == 0) wide = zero_wide();
  narrow_lanes:
    for (Word lane = 0; lane < lanes; ++lane) {
#pragma HLS UNROLL
      const Word bits = narrow_item(Format(), beat.lane[lane]);
      add_item<Format::bytes>(wide, part * lanes + lane, bits);
    }
    if (part == beats_a_wide - 1 || i == beats - 1) to.write(wide);
  }
}

}  // namespace jaxinf
