// Codecs for state in fewer bits, between a drive and a kernel.
//
//     drive ─ codes, scales ─► decode ─► float ─► body ─► float ─► encode ─► drive
//
// docs/format.md, "Codecs", defines the numbers; jaxinf/layout/codecs.py has the same
// in NumPy, bit for bit. Nothing here uses contraction, library calls or global state.
#pragma once

#include <cstdint>
#include <cstring>

namespace jaxinf {

constexpr int code_block = 256;

// The values of codes, relative to their block's scale.
struct CodeTables {
  float of_unsigned[256];
  float of_signed[256];

  constexpr CodeTables() : of_unsigned(), of_signed() {
    const double powers[8] = {1e0, 1e-1, 1e-2, 1e-3, 1e-4, 1e-5, 1e-6, 1e-7};
    for (int level = 0; level < 8; ++level) {
      const int count = 1 << (7 - level);
      for (int j = 0; j < count; ++j)
        of_unsigned[count + j] =
            static_cast<float>((0.1 + 0.9 * (j + 1) / count) * powers[level]);
    }
    for (int level = 0; level < 7; ++level) {
      const int count = 1 << (6 - level);
      for (int j = 0; j < count; ++j) {
        const double value = (0.1 + 0.9 * (j + 1) / count) * powers[level];
        of_signed[count + j] = static_cast<float>(value);
        of_signed[256 - count - j] = -static_cast<float>(value);
      }
    }
  }
};

constexpr CodeTables code_tables{};

inline float magnitude(float x) { return x < 0.0f ? -x : x; }

// Returns 16 random bits of a counter: two rounds of a multiply-xorshift hash. `Counter`
// is a uint32, or several side by side. The second round begins after a product.
constexpr std::uint32_t first_factor = 0x7feb352du;

template <class Counter>
inline Counter second_round(Counter x, std::uint32_t key) {
  x ^= x >> 15;
  x += key;
  x *= 0x846ca68bu;
  x ^= x >> 16;
  return x & 0xffffu;
}

template <class Counter>
inline Counter random_bits(Counter counter, std::uint32_t key) {
  Counter x = counter ^ key;
  x ^= x >> 16;
  return second_round(x * first_factor, key);
}

// Returns the code of y in [0, 1]: `top` numbers in the first decade, half as many in the
// next. `up` in [0, 1) is the threshold between two numbers for taking the upper one.
template <int top, int decades>
inline std::int32_t code_of(float y, float up) {
  constexpr float bounds[8] = {1e0f, 1e-1f, 1e-2f, 1e-3f, 1e-4f, 1e-5f, 1e-6f, 1e-7f};
  constexpr float factors[8] = {1e0f, 1e1f, 1e2f, 1e3f, 1e4f, 1e5f, 1e6f, 1e7f};
  float factor = 1.0f;
  std::int32_t count = top;
#pragma GCC unroll 8
  for (int decade = 1; decade < decades; ++decade) {
    const bool below = y <= bounds[decade];
    factor = below ? factors[decade] : factor;
    count = below ? (top >> decade) : count;
  }
  const float steps = (y * factor - 0.1f) * 1.1111112f;
  const float place = steps * static_cast<float>(count) + up;
  // Below its first number a decade continues with the last number of the next one.
  const std::int32_t code = count - 1 + static_cast<std::int32_t>(place);
  const std::int32_t last = 2 * count - 1;
  return code > last ? last : code;
}

inline float uniform_of(std::uint32_t counter, std::uint32_t key) {
  return static_cast<float>(static_cast<std::int32_t>(random_bits(counter, key))) *
         (1.0f / 65536.0f);
}

// Blocks with a larger magnitude have no codes, since the inverse would be denormal.
constexpr std::uint32_t largest_coded_bits = 0x7e800000u;  // 2^126

// Return the code of a number in a block with negative numbers, and in one without.
// `inverse`: of the block's largest magnitude. `up`: as for `code_of`.
inline std::uint8_t signed_code(float x, float inverse, float up) {
  std::int32_t code = code_of<64, 7>(magnitude(x) * inverse, up);
  code = code < 0 ? 0 : code;
  return static_cast<std::uint8_t>(x < 0.0f ? -code : code);
}

inline std::uint8_t unsigned_code(float x, float inverse, float up) {
  std::int32_t code = code_of<128, 8>(x * inverse, up);
  code = code < 1 ? 1 : code;  // only zero becomes zero
  return static_cast<std::uint8_t>(x > 0.0f ? code : 0);
}

inline float decode_code(std::uint8_t code, float scale) {
  const float share =
      scale < 0.0f ? code_tables.of_signed[code] : code_tables.of_unsigned[code];
  return share * magnitude(scale);
}

// ---- bfloat16

// To nearest, ties to even.
inline std::uint16_t narrow_bf16(std::uint32_t bits) {
  const std::uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  const std::uint32_t quiet = (bits >> 16) | 0x40u;
  const bool is_nan = (bits & 0x7fffffffu) > 0x7f800000u;
  return static_cast<std::uint16_t>(is_nan ? quiet : rounded);
}

// Rounds up with the probability given by the discarded bits.
inline std::uint16_t stochastic_bf16(std::uint32_t bits, std::uint32_t random) {
  const bool is_special = (bits & 0x7f800000u) == 0x7f800000u;
  const std::uint32_t quiet = (bits >> 16) | ((bits & 0x7fffffu) ? 0x40u : 0u);
  return static_cast<std::uint16_t>(is_special ? quiet : (bits + random) >> 16);
}

// Splits a float's bits into the nearest bfloat16, ties away from zero, and the exact
// difference in [-0x8000, 0x7fff]. A NaN keeps only its upper half, and stays a NaN.
inline void encode_split(const std::uint32_t* x, long num, std::uint16_t* rounded,
                         std::uint16_t* remainders) {
  for (long i = 0; i < num; ++i) {
    const std::uint32_t bits = x[i];
    const bool is_nan = (bits & 0x7fffffffu) > 0x7f800000u;
    const std::uint32_t quiet = (bits >> 16) | 0x40u;
    rounded[i] = static_cast<std::uint16_t>(is_nan ? quiet : (bits + 0x8000u) >> 16);
    remainders[i] = static_cast<std::uint16_t>(is_nan ? 0 : bits);
  }
}

inline void decode_split(const std::uint16_t* rounded, const std::uint16_t* remainders,
                         long num, std::uint32_t* x) {
  for (long i = 0; i < num; ++i) {
    const std::int32_t remainder = static_cast<std::int16_t>(remainders[i]);
    const std::uint32_t high = rounded[i];
    x[i] = (high << 16) + static_cast<std::uint32_t>(remainder);
  }
}

}  // namespace jaxinf
