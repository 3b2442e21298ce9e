// Blocks of int8 codes, several elements at a time, bit for bit as defined by codecs.hpp.
//
//   largest magnitude ─► inverse ─► decade of each ─► factor ─► place + random
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
    I32 above = {};  // as bits: the largest, and the one farthest below zero
    U32 below = {};
    int i = 0;
    for (; i + L::size <= length; i += L::size) {
      const F32 v = L::load(x + i);
      above = L::max(above, (I32)v);
      below = L::max(below, (U32)v);
    }
    std::int32_t largest_bits = L::largest(above);
    Word lowest_bits = L::largest(below);
    for (; i < length; ++i) {
      const Word bits = bits_of_float(x[i]);
      if (largest_bits < (std::int32_t)bits) largest_bits = (std::int32_t)bits;
      if (lowest_bits < bits) lowest_bits = bits;
    }
    const bool is_signed = lowest_bits >= 0x80800000u;  // not by -0 and denormals
    const std::int32_t lowest_size = (std::int32_t)(lowest_bits & 0x7fffffffu);
    if (largest_bits < lowest_size) largest_bits = lowest_size;  // NaN is the largest
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
  // The counters of a block differ in their last 8 bits, so that all of the first round
  // but a product is the same: (row + lane) * factor = row * factor + lane * factor.
  struct Rounds {
    Word rows[code_block / L::size];
    U32 lanes;

    Rounds(Word first, Word key) {
      const Word x = first ^ key, same = x ^ x >> 16, part = same & (L::size - 1);
      lanes = (L::numbers ^ part) * first_factor;
      for (int k = 0; k < code_block / L::size; k += L::size) {
        const U32 row = (L::numbers + (Word)k) * (Word)L::size ^ (same ^ part);
        const U32 products = row * first_factor;
        std::memcpy(rows + k, &products, sizeof products);
      }
    }
  };

  template <bool is_signed>
  static void encode_all(const float* x, int length, float inverse, Word first,
                         Word key, std::uint8_t* codes) {
    constexpr int at_once = L::vectors_at_once * L::size;
    int i = 0;
    if (first % code_block == 0) {
      const Rounds rounds(first, key);
      for (; i + at_once <= length; i += at_once) {
        I32 found[L::vectors_at_once];
#pragma GCC unroll 4
        for (int k = 0; k < L::vectors_at_once; ++k) {
          const F32 v = L::load(x + i + k * L::size);
          const U32 product = rounds.lanes + rounds.rows[i / L::size + k];
          const F32 random = L::f32((I32)second_round(product, key));
          if (is_signed)
            found[k] = L::with_sign(code_of<6>(L::abs(v) * inverse, random), v);
          else
            found[k] = L::of_positive(code_of<7>(v * inverse, random), v);
        }
        L::store_bytes(found, codes + i);
      }
    }
    for (; i < length; ++i) {
      const float up = uniform_of(first + (Word)i, key);
      codes[i] = is_signed ? signed_code(x[i], inverse, up)
                           : unsigned_code(x[i], inverse, up);
    }
  }

  // A decade has 2^rank numbers, a power of two, so that it may be multiplied by anywhere
  // with the same result. `random`: of 0 … 65535; that over 65536 is exact, so the sum is
  // rounded once. It is below 2^rank + 1, and not below 0 in the last decade.
  template <int last>
  static JAXINF_INLINE I32 code_of(F32 y, F32 random) {
    const I32 rank = L::template rank<last>(y);
    const F32 steps = (y * L::lookup(L::template factors<last>, rank) -
                       L::lookup(L::tenths, rank)) * 1.1111112f;
    const I32 count = (I32{} + 1) << rank;
    return L::truncated(L::plus_share(steps, random)) + count - 1;
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
