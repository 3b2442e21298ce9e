// a * b + c of float32, rounded once, to nearest even; denormals are zero.
//
// It computes in integers, because the vendor's mathematics does not promise bits: DSP
// blocks of two multipliers, two shifters, an adder. NaN results are the canonical NaN.
#pragma once

#include "streams.hpp"

namespace jaxinf {

// Shifts `x` right, and sets its lowest bit if a 1 was shifted out.
inline std::uint64_t shifted_sticky(std::uint64_t x, int by) {
  if (by >= 64) return x != 0;
  const std::uint64_t kept = x >> by;
  return kept | ((kept << by) != x);
}

inline float fused_multiply_add(float a, float b, float c) {
  const Word bits_a = bits_of(a), bits_b = bits_of(b), bits_c = bits_of(c);
  const int ea = bits_a >> 23 & 255, eb = bits_b >> 23 & 255, ec = bits_c >> 23 & 255;
  const Word sign_p = (bits_a ^ bits_b) & 0x80000000u, sign_c = bits_c & 0x80000000u;
  const bool zero_p = ea == 0 || eb == 0, zero_c = ec == 0;

  if (ea == 255 || eb == 255 || ec == 255) {
    const bool nan = (bits_a & 0x7fffffffu) > 0x7f800000u ||
                     (bits_b & 0x7fffffffu) > 0x7f800000u ||
                     (bits_c & 0x7fffffffu) > 0x7f800000u;
    const bool infinite_p = ea == 255 || eb == 255;
    const bool undefined =
        infinite_p && (zero_p || (ec == 255 && sign_p != sign_c));
    if (nan || undefined) return float_of(0x7fc00000u);
    return float_of((infinite_p ? sign_p : sign_c) | 0x7f800000u);
  }
  if (zero_p && zero_c) return float_of(sign_p & sign_c);
  if (zero_p) return c;

  // Both terms with their highest bit at 61 or 62, and the exponents of their lowest.
  const std::uint64_t ma = (bits_a & 0x7fffffu) | 0x800000u;
  const std::uint64_t mb = (bits_b & 0x7fffffu) | 0x800000u;
  const std::uint64_t mc = zero_c ? 0u : (bits_c & 0x7fffffu) | 0x800000u;
  std::uint64_t product = ma * mb << 15, addend = mc << 38;
  const int exponent_p = ea + eb - 315, exponent_c = ec - 188;
  const bool product_leads = zero_c || exponent_p >= exponent_c;
  const int apart = product_leads ? exponent_p - exponent_c : exponent_c - exponent_p;
  int exponent = product_leads ? exponent_p : exponent_c;
  if (product_leads)
    addend = shifted_sticky(addend, apart);
  else
    product = shifted_sticky(product, apart);

  const bool product_larger = product >= addend;
  const std::uint64_t sum = sign_p == sign_c ? product + addend
                            : product_larger ? product - addend
                                             : addend - product;
  if (sum == 0) return 0.0f;
  const Word sign = product_larger ? sign_p : sign_c;

  const Word upper = static_cast<Word>(sum >> 32), lower = static_cast<Word>(sum);
  const int zeros = upper ? __builtin_clz(upper) : 32 + __builtin_clz(lower);
  const std::uint64_t normal = sum << zeros;
  exponent += 63 + 127 - zeros;
  Word significand = static_cast<Word>(normal >> 40);
  const std::uint64_t rest = normal & ((std::uint64_t(1) << 40) - 1);
  const std::uint64_t half = std::uint64_t(1) << 39;
  significand += rest > half || (rest == half && (significand & 1u));
  exponent += significand >> 24;  // rounded up to the next power of two
  if (exponent >= 255) return float_of(sign | 0x7f800000u);
  if (exponent <= 0) return float_of(sign);
  return float_of(sign | Word(exponent) << 23 | (significand & 0x7fffffu));
}

}  // namespace jaxinf
