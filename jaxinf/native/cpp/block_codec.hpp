// Codes of state, several elements at a time, bit for bit as defined by codecs.hpp.
//
//   largest magnitude ─► inverse ─► decade of each ─► factor ─► place + random
#pragma once

#include "codecs.hpp"
#include "code_lanes.hpp"
#include "crc32c.hpp"

namespace jaxinf {

// The counters of a block differ in their last 8 bits, so that all of the first round
// but a product is the same: (row + lane) * factor = row * factor + lane * factor.
struct Rounds {
  using L = CodeLanes;
  using U32 = L::U32;

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

// Blocks of int8 codes.
class BlockCodec {
  using L = CodeLanes;
  using F32 = L::F32;
  using I32 = L::I32;
  using U32 = L::U32;

 public:
  static void encode(const float* x, int length, Word first, Word key,
                     std::uint8_t* codes, float* scale, SideBySide& sums) {
    I32 above = {};  // as bits: the largest, and the one farthest below zero
    U32 below = {};
    int i = 0;
#pragma GCC unroll 4
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
      encode_all<true>(x, length, inverse, first, key, codes, sums);
    else
      encode_all<false>(x, length, inverse, first, key, codes, sums);
  }

  static void decode(const std::uint8_t* codes, float scale, int length, float* x) {
    const bool is_signed = scale < 0.0f;
    const float* const table =
        is_signed ? code_tables.of_signed : code_tables.of_unsigned;
    const float size = magnitude(scale);
    int i = is_signed ? decode_all<true>(codes, size, length, x)
                      : decode_all<false>(codes, size, length, x);
    for (; i < length; ++i) x[i] = table[codes[i]] * size;
  }

 private:
  template <bool is_signed>
  static void encode_all(const float* x, int length, float inverse, Word first,
                         Word key, std::uint8_t* codes, SideBySide& sums) {
    constexpr int at_once = L::vectors_at_once * L::size;
    int i = 0;
    if (first % code_block == 0) {
      const Rounds rounds(first, key);
      Three three;
      constexpr int bytes = 512 * at_once / code_block;
      if (length == code_block) three = sums.begin_part(512);
      const long num_steps = length / at_once;
      for (long step = 0; step < num_steps; ++step) {
        const float* const from = x + step * at_once;
        const Word* const rows = rounds.rows + step * L::vectors_at_once;
        I32 found[L::vectors_at_once];
#pragma GCC unroll 4
        for (int k = 0; k < L::vectors_at_once; ++k) {
          const F32 v = L::load(from + k * L::size);
          const U32 product = rounds.lanes + rows[k];
          const F32 random = L::f32((I32)second_round(product, key));
          found[k] = is_signed ? above_code<6>(L::abs(v) * inverse, random)
                               : above_code<7>(v * inverse, random);
        }
        L::template store_codes<is_signed>(found, from, codes + step * at_once);
        if (three.num_bytes) three.step<bytes>();
      }
      i = (int)num_steps * at_once;
      sums.end_part(three);
    }
    for (; i < length; ++i) {
      const float up = uniform_of(first + (Word)i, key);
      codes[i] = is_signed ? signed_code(x[i], inverse, up)
                           : unsigned_code(x[i], inverse, up);
    }
  }

  // Number j of the 2^e in a decade is (2^e + 9 (j + 1)) / (10 * 2^e) of its power of ten.
  // Numerator and denominator are exact, and the table has the nearest float, too. Returns
  // how many are done.
  template <bool is_signed>
  static int decode_all(const std::uint8_t* codes, float size, int length, float* x) {
    constexpr float nine = is_signed ? 36.0f : 9.0f;
    F32 divisors;
    std::memcpy(&divisors, code_divisors<is_signed, L::size>.of, sizeof divisors);
    int i = 0;
    for (; i + L::size <= length; i += L::size) {
      const I32 code = L::template load_codes<is_signed>(codes + i);
      const F32 f = L::f32(code);
      const F32 power = (F32)((I32)f & ~0x007fffff);  // 2^e, with the sign
      const I32 sign = is_signed ? (I32)f & INT32_MIN : I32{};
      const F32 ninth = (F32)(sign | (I32)(F32{} + nine));
      const F32 numerator = L::exact_fma(power, F32{} - 8.0f,
                                         L::exact_fma(f, F32{} + 9.0f, ninth));
      F32 share = numerator / L::lookup(divisors, (I32)((U32)f >> 23));
      if (!is_signed) share = (F32)((I32)share & (code != 0));
      const F32 result = share * size;
      std::memcpy(x + i, &result, sizeof result);
    }
    return i;
  }

  // Returns a code and 1. A decade has 2^rank numbers, a power of two, so that it may be
  // multiplied by anywhere with the same result. `random`: of 0 … 65535; that over 65536
  // is exact, so the sum is rounded once. It is below 2^rank + 1, and not below 0 in the
  // last decade.
  template <int last>
  static JAXINF_INLINE I32 above_code(F32 y, F32 random) {
    const I32 rank = L::template rank<last>(y);
    const F32 tenth = (F32)((rank << 23) + (I32)(F32{} + 0.1f));  // of 2^rank
    const F32 steps =
        (y * L::lookup(L::template factors<last>, rank) - tenth) * 1.1111112f;
    return L::truncated(L::plus_share(steps, random)) + ((I32{} + 1) << rank);
  }
};

// `start` is a multiple of the block; so are all lengths but a chunk's last. `first`:
// number of the chunk's first element, which with `key` decides the rounding. Parts of
// `sums` are taken beside.
inline void encode_blocks(const float* x, long start, long num, Word first, Word key,
                          std::uint8_t* codes, float* scales, SideBySide& sums) {
  for (long i = 0; i < num; i += code_block) {
    const int length = (int)(num - i < code_block ? num - i : code_block);
    BlockCodec::encode(x + i, length, first + (Word)(start + i), key, codes + start + i,
                       scales + (start + i) / code_block, sums);
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

// bfloat16, rounded up with the probability given by the discarded bits. A block with a
// number that is not finite is done again.
inline void encode_bf16(const Word* x, Word first, long num, Word key,
                        std::uint16_t* out) {
  using L = CodeLanes;
  using U32 = L::U32;
  constexpr int at_once = L::vectors_at_once * L::size;
  const auto one_by_one = [&](long begin, long end) {
    for (long i = begin; i < end; ++i)
      out[i] = stochastic_bf16(x[i], random_bits(first + (Word)i, key));
  };
  long start = 0;
  for (; first % code_block == 0 && start + code_block <= num; start += code_block) {
    const Rounds rounds(first + (Word)start, key);
    U32 largest = {};
    for (int i = 0; i < code_block; i += at_once) {
      const float* const from = (const float*)x + start + i;
      const Word* const rows = rounds.rows + i / L::size;
      U32 sums[L::vectors_at_once];
#pragma GCC unroll 4
      for (int k = 0; k < L::vectors_at_once; ++k) {
        const U32 bits = (U32)L::load(from + k * L::size);
        largest = L::max(largest, bits & 0x7fffffffu);
        sums[k] = bits + second_round(rounds.lanes + rows[k], key);
      }
      L::store_upper_halves(sums, out + start + i);
    }
    if (L::largest(largest) >= 0x7f800000u) one_by_one(start, start + code_block);
  }
  one_by_one(start, num);
}

}  // namespace jaxinf
