// Blocks of int8 codes, several elements at a time, bit for bit as defined by codecs.hpp.
//
//   largest magnitude ─► inverse ─► decade of each ─► factor, count ─► place + random
#pragma once

#include "codecs.hpp"
#include "code_lanes.hpp"

namespace jaxinf {

class BlockCodec {
  using L = CodeLanes;
  using F32 = L::F32;
  using I32 = L::I32;
  using U32 = L::U32;

 public:
  static void encode(const float* x, int length, Word first, Word key,
                     std::uint8_t* codes, float* scale) {
    I32 sizes = {};
    L::Mask below_zero = {};
    int i = 0;
    for (; i + L::size <= length; i += L::size) {
      const F32 v = L::load(x + i);
      sizes = L::max(sizes, (I32)v & 0x7fffffff);  // as bits, NaN is the largest
      below_zero |= L::is_negative(v);
    }
    std::int32_t largest_bits = L::largest(sizes);
    bool is_signed = L::any(below_zero);
    for (; i < length; ++i) {
      const std::int32_t bits = (std::int32_t)(bits_of_float(x[i]) & 0x7fffffffu);
      largest_bits = largest_bits < bits ? bits : largest_bits;
      is_signed |= x[i] < 0.0f;
    }
    const bool is_bad = (Word)largest_bits > largest_coded_bits;
    if (is_bad || largest_bits < 0x00800000) {  // denormals are zero
      *scale = is_bad ? __builtin_nanf("") : 0.0f;
      std::memset(codes, 0, (size_t)length);
      return;
    }
    const float largest = float_of_bits((Word)largest_bits);
    *scale = is_signed ? -largest : largest;
    const float inverse = 1.0f / largest;
    if (is_signed)
      encode_all<true>(x, length, inverse, first, key, codes);
    else
      encode_all<false>(x, length, inverse, first, key, codes);
  }

  static void decode(const std::uint8_t* codes, float scale, int length, float* x) {
    const float* const table =
        scale < 0.0f ? code_tables.of_signed : code_tables.of_unsigned;
    const float size = magnitude(scale);
    int i = 0;
    for (; i + Lanes::size <= length; i += Lanes::size) {
      std::uint64_t eight;  // looked up one by one: a gather takes longer
      std::memcpy(&eight, codes + i, sizeof eight);
      const auto share = [&](int k) { return table[eight >> (8 * k) & 0xff]; };
      const Lanes::F32 shares = {share(0), share(1), share(2), share(3),
                          share(4), share(5), share(6), share(7)};
      Lanes::store(x + i, shares * size);
    }
    for (; i < length; ++i) x[i] = table[codes[i]] * size;
  }

 private:
  template <bool is_signed>
  static void encode_all(const float* x, int length, float inverse, Word first,
                         Word key, std::uint8_t* codes) {
    U32 counter = L::numbers + first;
    int i = 0;
    for (; i + L::size <= length; i += L::size, counter += (Word)L::size) {
      const F32 v = L::load(x + i), random = L::f32((I32)random_bits(counter, key));
      if (is_signed)
        L::store_bytes(L::with_sign(code_of<64, 7>(L::abs(v) * inverse, random), v),
                       codes + i);
      else
        L::store_bytes(L::of_positive(code_of<128, 8>(v * inverse, random), v),
                       codes + i);
    }
    for (; i < length; ++i) {
      const float up = uniform_of(first + (Word)i, key);
      codes[i] = is_signed ? signed_code(x[i], inverse, up)
                           : unsigned_code(x[i], inverse, up);
    }
  }

  // `random`: of 0 … 65535; that over 65536 is exact, so the sum is rounded once. Codes of
  // the last decade are not below 0.
  template <int top, int decades>
  static JAXINF_INLINE I32 code_of(F32 y, F32 random) {
    const I32 decade = L::template decade<decades - 1>(y);
    const I32 count = (I32{} + top) >> decade;
    const F32 steps = (y * L::lookup(L::factors, decade) - 0.1f) * 1.1111112f;
    const F32 place = L::plus_share(steps * L::f32(count), random);
    return L::min(count - 1 + L::truncated(place), 2 * count - 1);
  }
};

// `start` is a multiple of the block; so are all lengths but a chunk's last. `first`:
// number of the chunk's first element, which with `key` decides the rounding.
inline void encode_blocks(const float* x, long start, long num, Word first, Word key,
                          std::uint8_t* codes, float* scales) {
  for (long i = 0; i < num; i += code_block) {
    const int length = (int)(num - i < code_block ? num - i : code_block);
    BlockCodec::encode(x + i, length, first + (Word)(start + i), key, codes + start + i,
                       scales + (start + i) / code_block);
  }
}

inline void decode_blocks(const std::uint8_t* codes, const float* scales, long start,
                          long num, float* x) {
  for (long i = 0; i < num; i += code_block) {
    const int length = (int)(num - i < code_block ? num - i : code_block);
    BlockCodec::decode(codes + start + i, scales[(start + i) / code_block], length,
                       x + i);
  }
}

}  // namespace jaxinf
