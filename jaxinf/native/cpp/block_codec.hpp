// Blocks of int8 codes, eight elements at a time, bit for bit as defined by codecs.hpp.
//
//   largest magnitude ─► inverse ─► decade of each ─► factor, count ─► place + random
//
// An element's decade is the number of powers of ten that it does not exceed. The factor
// and the count for each decade are in one register.
#pragma once

#include "codecs.hpp"
#include "lanes.hpp"

namespace jaxinf {

class BlockCodec {
  using L = Lanes;
  using F32 = L::F32;
  using I32 = L::I32;
  using U32 = L::U32;

 public:
  static void encode(const float* x, int length, Word first, Word key,
                     std::uint8_t* codes, float* scale) {
    I32 sizes = {}, below_zero = {};
    int i = 0;
    for (; i + L::size <= length; i += L::size) {
      const F32 v = L::load(x + i);
      sizes = L::max(sizes, L::as_i32(L::abs(v)));  // as bits, NaN is the largest
      below_zero |= v < 0.0f;
    }
    std::int32_t largest_bits = 0, is_signed = 0;
    for (int k = 0; k < L::size; ++k) {
      largest_bits = largest_bits < sizes[k] ? sizes[k] : largest_bits;
      is_signed |= below_zero[k];
    }
    for (int k = i; k < length; ++k) {
      const std::int32_t bits = (std::int32_t)(bits_of_float(x[k]) & 0x7fffffffu);
      largest_bits = largest_bits < bits ? bits : largest_bits;
      is_signed |= x[k] < 0.0f;
    }
    const bool is_bad = (Word)largest_bits > largest_coded_bits;
    if (is_bad || largest_bits < 0x00800000) {  // denormals are zero
      *scale = is_bad ? __builtin_nanf("") : 0.0f;
      std::memset(codes, 0, (size_t)length);
      return;
    }
    float largest;
    std::memcpy(&largest, &largest_bits, sizeof largest);
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
    for (; i + L::size <= length; i += L::size) {
      std::uint64_t eight;  // looked up one by one: a gather takes longer
      std::memcpy(&eight, codes + i, sizeof eight);
      const auto share = [&](int k) { return table[eight >> (8 * k) & 0xff]; };
      const F32 shares = {share(0), share(1), share(2), share(3),
                          share(4), share(5), share(6), share(7)};
      L::store(x + i, shares * size);
    }
    for (; i < length; ++i) x[i] = table[codes[i]] * size;
  }

 private:
  template <bool is_signed>
  static void encode_all(const float* x, int length, float inverse, Word first,
                         Word key, std::uint8_t* codes) {
    U32 counter = U32{0, 1, 2, 3, 4, 5, 6, 7} + first;
    int i = 0;
    for (; i + L::size <= length; i += L::size, counter += (Word)L::size) {
      const F32 v = L::load(x + i), up = uniform(counter, key);
      I32 code;
      if (is_signed) {
        code = L::max(code_of<64, 7>(L::abs(v) * inverse, up), I32{});
        code = L::select(v < 0.0f, -code, code) & 0xff;
      } else {
        code = L::max(code_of<128, 8>(v * inverse, up), I32{} + 1);
        code &= v > 0.0f;
      }
      store_bytes(code, codes + i);
    }
    for (; i < length; ++i) {
      const float up = uniform_of(first + (Word)i, key);
      codes[i] = is_signed ? signed_code(x[i], inverse, up)
                           : unsigned_code(x[i], inverse, up);
    }
  }

  static JAXINF_INLINE F32 uniform(U32 counter, Word key) {
    return L::f32((I32)random_bits(counter, key)) * (1.0f / 65536.0f);
  }

  template <int top, int decades>
  static JAXINF_INLINE I32 code_of(F32 y, F32 up) {
    constexpr float bounds[8] = {1e0f, 1e-1f, 1e-2f, 1e-3f, 1e-4f, 1e-5f, 1e-6f, 1e-7f};
    constexpr F32 factors = {1e0f, 1e1f, 1e2f, 1e3f, 1e4f, 1e5f, 1e6f, 1e7f};
    I32 decade = {};
#pragma GCC unroll 8
    for (int k = 1; k < decades; ++k) decade -= y <= bounds[k];
    const F32 factor = lookup(factors, decade);
    const I32 count = (I32{} + top) >> decade;
    const F32 steps = (y * factor - 0.1f) * 1.1111112f;
    const F32 place = steps * L::f32(count) + up;
    const I32 code = count - 1 + __builtin_convertvector(place, I32);
    return L::min(code, 2 * count - 1);
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
