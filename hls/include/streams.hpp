// The data between the stages of a kernel.
//
// A memory port moves a `Wide` in one cycle, and the update computes a `Beat` in one
// cycle. A beat has 4 elements by default, at 250 MHz 1 G elements/s; a drive feeds 0.13.
// A subgroup of n elements is ceil(n / lanes) beats. In the last one the lanes beyond n
// are undefined, until `update` has set them to zero.
#pragma once

#include <cstdint>

#include <hls_stream.h>  // the vendor's; in csim hls/csim/hls_stream.h

#ifdef JAXINF_CSIM
#define JAXINF_CARD_KERNEL extern "C" __attribute__((visibility("default")))
#define JAXINF_REGION jaxinf::csim::Region region
#define JAXINF_STAGE(...) region.stage(#__VA_ARGS__, [&] { __VA_ARGS__; })
#define JAXINF_RUN region.run()
#define JAXINF_ITERATION jaxinf::csim::Region::iteration()
#define JAXINF_WRITE_LATE(stream, value, cycles) \
  jaxinf::csim::Region::write_late(stream, value, cycles)
#else  // plain calls, as a dataflow region needs them
#define JAXINF_CARD_KERNEL extern "C"
#define JAXINF_REGION
#define JAXINF_STAGE(...) __VA_ARGS__
#define JAXINF_RUN
#define JAXINF_ITERATION
#define JAXINF_WRITE_LATE(stream, value, cycles) (stream).write(value)
#endif

#ifndef JAXINF_LANES  // elements a beat: 4, 8 or 16
#define JAXINF_LANES 4
#endif

namespace jaxinf {

using Word = std::uint32_t;

struct alignas(64) Wide {
  Word word[16];
};

template <Word lanes>
struct BeatOf {
  static_assert(lanes == 4 || lanes == 8 || lanes == 16, "a block is whole beats");
  float lane[lanes];
};

template <Word lanes>
using BeatsOf = hls::stream<BeatOf<lanes>, 32>;

using Wides = hls::stream<Wide, 32>;
using Beats = BeatsOf<JAXINF_LANES>;
using Words = hls::stream<Word, 2>;

inline Word ceil_div(Word n, Word by) { return n / by + (n % by != 0); }

template <Word lanes>
inline Word num_beats(Word num_elements) {
  return ceil_div(num_elements, lanes);
}

// ---- formats in a port's memory: bytes of an item, and the number of its elements

struct F32 {
  static constexpr Word bytes = 4, elements = 1;
};
struct Bf16 {
  static constexpr Word bytes = 2, elements = 1;
};
struct F16 {
  static constexpr Word bytes = 2, elements = 1;
};
struct Indices {
  static constexpr Word bytes = 4, elements = 1;
};
struct Table {  // items are words
  static constexpr Word bytes = 4, elements = 1;
};
struct Codes {
  static constexpr Word bytes = 1, elements = 1;
};
struct Scales {
  static constexpr Word bytes = 4, elements = 256;
};

// ---- bits

inline Word bits_of(float x) {
  union {
    float number;
    Word bits;
  } either;
  either.number = x;
  return either.bits;
}

inline float float_of(Word bits) {
  union {
    float number;
    Word bits;
  } either;
  either.bits = bits;
  return either.number;
}

inline bool is_finite(float x) { return (bits_of(x) & 0x7f800000u) != 0x7f800000u; }

// Item `i` of a wide of items that have `bytes` bytes each.
template <int bytes>
inline Word item(const Wide& wide, Word i) {
  constexpr Word each = 4 / bytes;
  constexpr Word mask = bytes == 4 ? ~0u : (1u << (8 * bytes % 32)) - 1;
  return wide.word[i / each] >> (8 * bytes * (i % each)) & mask;
}

template <int bytes>
inline void add_item(Wide& wide, Word i, Word bits) {
  constexpr Word each = 4 / bytes;
  wide.word[i / each] |= bits << (8 * bytes * (i % each));
}

inline Wide zero_wide() {
  Wide wide;
#pragma HLS ARRAY_PARTITION variable=wide.word complete
  for (int i = 0; i < 16; ++i) {
#pragma HLS UNROLL
    wide.word[i] = 0;
  }
  return wide;
}

}  // namespace jaxinf
