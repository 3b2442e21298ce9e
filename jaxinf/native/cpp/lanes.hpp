// The arithmetic of bodies for eight elements side by side.
//
// A body is a template over such a struct; another target has a struct with the same
// names. `rsqrt` is called on an object, since a card's has a table. Masks are I32 lanes,
// all bits set for true. Registers of 512 bits would not be faster, as memory is the
// limit, and their estimate of 1/sqrt(x) has other bits.
#pragma once

#include "processor.hpp"

namespace jaxinf {

struct Lanes {
  static constexpr int size = lane_count;
  using F32 = F32s;
  using I32 = I32s;
  using U32 = U32s;

  // ---- moving

  static JAXINF_INLINE F32 load(const float* from) {
    F32 x;
    std::memcpy(&x, from, sizeof x);
    return x;
  }
  static JAXINF_INLINE void store(float* to, F32 x) { std::memcpy(to, &x, sizeof x); }
  static JAXINF_INLINE F32 uniform(Word bits) { return (F32)(U32{} + bits); }
  static JAXINF_INLINE I32 as_i32(F32 x) { return (I32)x; }
  static JAXINF_INLINE U32 as_u32(F32 x) { return (U32)x; }
  template <class V>
  static JAXINF_INLINE F32 bits(V x) {
    return (F32)x;
  }
  static JAXINF_INLINE F32 constant(float x) { return F32{} + x; }

  // ---- arithmetic beyond operators

  static JAXINF_INLINE F32 fma(F32 a, F32 b, F32 c) { return fused(a, b, c); }
  // a * b - c and c - a * b, each rounded once.
  static JAXINF_INLINE F32 fms(F32 a, F32 b, F32 c) { return fma(a, b, -c); }
  static JAXINF_INLINE F32 fnma(F32 a, F32 b, F32 c) { return fma(-a, b, c); }

  static JAXINF_INLINE F32 sqrt(F32 x) { return square_root(x); }
  static JAXINF_INLINE F32 reciprocal(F32 x) { return constant(1.0f) / x; }

  static JAXINF_INLINE F32 rsqrt(F32 x) {
    return refined_rsqrt<Lanes>(x, estimated_rsqrt(x), refines_twice);
  }

  static JAXINF_INLINE F32 abs(F32 x) { return (F32)((I32)x & 0x7fffffff); }
  static JAXINF_INLINE I32 abs(I32 x) { return select(x < 0, -x, x); }
  static JAXINF_INLINE U32 abs(U32 x) { return x; }
  // NaN for NaN; zeros keep their sign, denormals become one.
  static JAXINF_INLINE F32 sign(F32 x) {
    const I32 sign_bit = (I32)x & INT32_MIN;
    const F32 one = (F32)(sign_bit | (I32)constant(1.0f));
    return select(x == 0.0f, (F32)sign_bit, select(x == x, one, x));
  }
  static JAXINF_INLINE I32 sign(I32 x) { return (x < 0) | ((x > 0) & 1); }
  static JAXINF_INLINE U32 sign(U32 x) { return (U32)(x != 0u) & 1u; }

  // A NaN operand gives NaN; +0 is larger than -0.
  static JAXINF_INLINE F32 max(F32 a, F32 b) {
    const F32 same = select(a == b, (F32)((I32)a & (I32)b), a + b);
    return select(a > b, a, select(a < b, b, same));
  }
  static JAXINF_INLINE F32 min(F32 a, F32 b) {
    const F32 same = select(a == b, (F32)((I32)a | (I32)b), a + b);
    return select(a < b, a, select(a > b, b, same));
  }
  static JAXINF_INLINE I32 max(I32 a, I32 b) { return select(a > b, a, b); }
  static JAXINF_INLINE I32 min(I32 a, I32 b) { return select(a < b, a, b); }
  static JAXINF_INLINE U32 max(U32 a, U32 b) { return select((I32)(a > b), a, b); }
  static JAXINF_INLINE U32 min(U32 a, U32 b) { return select((I32)(a < b), a, b); }
  template <class V>
  static JAXINF_INLINE V clamp(V low, V x, V high) {
    return min(max(x, low), high);
  }

  // ---- choosing

  template <class V>
  static JAXINF_INLINE V select(I32 mask, V yes, V no) {
    return mask ? yes : no;
  }
  static JAXINF_INLINE I32 is_finite(F32 x) {
    return ((I32)x & 0x7f800000) != 0x7f800000;
  }

  // ---- converting

  static JAXINF_INLINE F32 f32(I32 x) { return __builtin_convertvector(x, F32); }
  static JAXINF_INLINE F32 f32(U32 x) { return __builtin_convertvector(x, F32); }
  static JAXINF_INLINE F32 f32_of_mask(I32 x) { return (F32)(x & (I32)constant(1.0f)); }
  // Rounds towards zero and saturates; NaN becomes 0.
  static JAXINF_INLINE I32 i32(F32 x) {
    return lanewise<I32>([](float v) -> std::int32_t {
      if (v != v) return 0;
      if (v >= 2147483648.0f) return INT32_MAX;
      return v <= -2147483648.0f ? INT32_MIN : (std::int32_t)v;
    }, x);
  }
  static JAXINF_INLINE U32 u32(F32 x) {
    return lanewise<U32>([](float v) -> std::uint32_t {
      if (!(v > 0.0f)) return 0;
      return v >= 4294967296.0f ? UINT32_MAX : (std::uint32_t)v;
    }, x);
  }
  static JAXINF_INLINE F32 round_bf16(F32 x) {
    const U32 word = (U32)x;
    const U32 rounded = (word + 0x7fffu + ((word >> 16) & 1u)) & 0xffff0000u;
    return select(x == x, (F32)rounded, (F32)((word | 0x400000u) & 0xffff0000u));
  }
  static JAXINF_INLINE F32 round_f16(F32 x) { return rounded_to_half(x); }

  // ---- rounding and transcendental functions: in double, for errors of half a unit
  //
  // C's functions by the compiler's names: <cmath> takes a tenth of a compilation.

#define JAXINF_ROUNDING(name, function)                                          \
  static JAXINF_INLINE F32 name(F32 x) {                                         \
    return lanewise<F32>([](float v) { return function(v); }, x);                \
  }
  JAXINF_ROUNDING(floor, __builtin_floorf)
  JAXINF_ROUNDING(ceil, __builtin_ceilf)
  JAXINF_ROUNDING(round_even, __builtin_rintf)
  JAXINF_ROUNDING(round_away, __builtin_roundf)
#undef JAXINF_ROUNDING
#define JAXINF_FUNCTION(name, function)                                          \
  static JAXINF_INLINE F32 name(F32 x) {                                         \
    return lanewise<F32>([](double v) { return (float)(function); }, x);         \
  }
  JAXINF_FUNCTION(cbrt, __builtin_cbrt(v))
  JAXINF_FUNCTION(cos, __builtin_cos(v))
  JAXINF_FUNCTION(exp, __builtin_exp(v))
  JAXINF_FUNCTION(exp2, __builtin_exp2(v))
  JAXINF_FUNCTION(expm1, __builtin_expm1(v))
  JAXINF_FUNCTION(log, __builtin_log(v))
  JAXINF_FUNCTION(log1p, __builtin_log1p(v))
  JAXINF_FUNCTION(logistic, 1.0 / (1.0 + __builtin_exp(-v)))
  JAXINF_FUNCTION(sin, __builtin_sin(v))
  JAXINF_FUNCTION(tanh, __builtin_tanh(v))
#undef JAXINF_FUNCTION
  template <class V>
  static JAXINF_INLINE F32 pow(F32 x, V y) {
    return lanewise<F32>([](double v, double w) {
      return (float)__builtin_pow(v, w);
    }, x, y);
  }
  static JAXINF_INLINE F32 nextafter(F32 x, F32 y) {
    return lanewise<F32>([](float v, float w) {
      return __builtin_nextafterf(v, w);
    }, x, y);
  }

  // ---- integer division and remainder; by zero, as in XLA, -1 and the dividend

  static JAXINF_INLINE F32 rem(F32 x, F32 y) {
    return lanewise<F32>([](float v, float w) {
      return __builtin_fmodf(v, w);
    }, x, y);
  }
  static JAXINF_INLINE I32 div(I32 x, I32 y) {
    return lanewise<I32>([](std::int64_t v, std::int64_t w) {
      return (std::int32_t)(w ? v / w : -1);
    }, x, y);
  }
  static JAXINF_INLINE I32 rem(I32 x, I32 y) {
    return lanewise<I32>([](std::int64_t v, std::int64_t w) {
      return (std::int32_t)(w ? v % w : v);
    }, x, y);
  }
  static JAXINF_INLINE U32 div(U32 x, U32 y) {
    return lanewise<U32>([](Word v, Word w) { return w ? v / w : UINT32_MAX; }, x, y);
  }
  static JAXINF_INLINE U32 rem(U32 x, U32 y) {
    return lanewise<U32>([](Word v, Word w) { return w ? v % w : v; }, x, y);
  }
};

}  // namespace jaxinf
