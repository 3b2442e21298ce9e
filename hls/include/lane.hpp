// One element, and a card's arithmetic for bodies. `update` has several side by side.
//
// Masks are I32, all bits set for true, as in the host's lanes.
#pragma once

#include <cmath>

#include "fma.hpp"
#include "streams.hpp"

namespace jaxinf {

#define JAXINF_INLINE inline

template <class T>
struct Lane {
  T value;

  Lane() : value() {}
  Lane(T x) : value(x) {}
  template <class Other>
  explicit Lane(Lane<Other> x) : value(static_cast<T>(x.value)) {}

  using Mask = Lane<std::int32_t>;
  static Mask mask(bool x) { return Mask(x ? -1 : 0); }

  friend Lane operator+(Lane a, Lane b) { return a.value + b.value; }
  friend Lane operator-(Lane a, Lane b) { return a.value - b.value; }
  friend Lane operator*(Lane a, Lane b) { return a.value * b.value; }
  friend Lane operator/(Lane a, Lane b) { return a.value / b.value; }
  friend Lane operator-(Lane a) { return -a.value; }
  friend Lane operator&(Lane a, Lane b) { return a.value & b.value; }
  friend Lane operator|(Lane a, Lane b) { return a.value | b.value; }
  friend Lane operator~(Lane a) { return ~a.value; }
  friend Mask operator==(Lane a, Lane b) { return mask(a.value == b.value); }
  friend Mask operator!=(Lane a, Lane b) { return mask(a.value != b.value); }
  friend Mask operator<(Lane a, Lane b) { return mask(a.value < b.value); }
  friend Mask operator<=(Lane a, Lane b) { return mask(a.value <= b.value); }
  friend Mask operator>(Lane a, Lane b) { return mask(a.value > b.value); }
  friend Mask operator>=(Lane a, Lane b) { return mask(a.value >= b.value); }
};

// The operations of the bodies in jaxinf/native/generated, except `rsqrt`, which is in
// roots.hpp. The hosts' Lanes has them all.
struct CardLane {
  using F32 = Lane<float>;
  using I32 = Lane<std::int32_t>;
  using U32 = Lane<Word>;

  static F32 uniform(Word bits) { return float_of(bits); }
  static F32 constant(float x) { return x; }
  static I32 as_i32(F32 x) { return static_cast<std::int32_t>(bits_of(x.value)); }
  static F32 bits(F32 x) { return x; }

  static F32 fma(F32 a, F32 b, F32 c) {
#if defined(JAXINF_CPU_INSTRUCTIONS) && (defined(__FMA__) || defined(__aarch64__))
    return __builtin_fmaf(a.value, b.value, c.value);
#else
    return fused_multiply_add(a.value, b.value, c.value);
#endif
  }
  static F32 fms(F32 a, F32 b, F32 c) { return fma(a, b, -c); }
  static F32 fnma(F32 a, F32 b, F32 c) { return fma(-a, b, c); }
  static F32 sqrt(F32 x) { return std::sqrt(x.value); }
  static F32 reciprocal(F32 x) { return 1.0f / x.value; }

  static F32 select(I32 mask, F32 yes, F32 no) { return mask.value ? yes : no; }
  // NaN for NaN; zeros keep their sign, denormals become one.
  static F32 sign(F32 x) {
    const Word sign_bit = bits_of(x.value) & 0x80000000u;
    if (x.value != x.value) return x;
    return float_of(x.value == 0.0f ? sign_bit : sign_bit | 0x3f800000u);
  }
};

}  // namespace jaxinf
