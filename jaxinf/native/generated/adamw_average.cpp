// adamw_average.
//
// Emitted by jaxinf from these equations (jax 0.10.2, optax 0.2.8):
//
//   %0: float32 = mul #:float32, gradient
//   %1: float32 = mul #:float32, slot0:float32
//   %2: float32 = add %0, %1
//   %3: float32 = div %2, scalar0:float32
//   %4: float32 = square gradient
//   %5: float32 = mul #:float32, %4
//   %6: float32 = mul #:float32, slot1:float32
//   %7: float32 = add %5, %6
//   %8: float32 = div %7, scalar1:float32
//   %9: float32 = add %8, #:float32
//   %10: float32 = sqrt %9
//   %11: float32 = add %10, #:float32
//   %12: float32 = div %3, %11
//   %13: float32 = mul #:float32, params
//   %14: float32 = add %12, %13
//   %15: float32 = mul #:float32, %14
//   %16: float32 = add params, %15
//   %17: float32 = mul #:float32, %16
//   %18: float32 = mul #:float32, slot2:float32
//   %19: float32 = add %17, %18
//   update = %15
//   mu = %2
//   nu = %7
//   average = %19
//
// # stands for a literal: c0, c1, ... below, in order of use.
#include "shell.hpp"

namespace {

template <class L>
struct Body {
  using F32 = typename L::F32;
  using I32 = typename L::I32;
  using U32 = typename L::U32;
  static constexpr int num_slots = 3, num_arrays = 0;
  static constexpr bool has_update = true;
  static constexpr bool writes[] = {true, true, true, false};
  const F32 s0;
  const F32 s1;
  const F32 c0;
  const F32 c1;
  const F32 c2;
  const F32 c3;
  const F32 c4;
  const F32 c5;
  const F32 c6;
  const F32 c7;
  const F32 c8;
  const F32 c9;

  Body([[maybe_unused]] const L& lanes,
       [[maybe_unused]] const jaxinf::Word* constants,
       [[maybe_unused]] const jaxinf::Word* scalars)
      : s0(L::uniform(scalars[0]))
      , s1(L::uniform(scalars[1]))
      , c0(L::uniform(constants[0]))
      , c1(L::uniform(constants[1]))
      , c2(L::uniform(constants[2]))
      , c3(L::uniform(constants[3]))
      , c4(L::uniform(constants[4]))
      , c5(L::uniform(constants[5]))
      , c6(L::uniform(constants[6]))
      , c7(L::uniform(constants[7]))
      , c8(L::uniform(constants[8]))
      , c9(L::uniform(constants[9])) {}

  JAXINF_INLINE void operator()([[maybe_unused]] const L& lanes,
                                [[maybe_unused]] F32 gradient,
                                [[maybe_unused]] F32 params,
                                [[maybe_unused]] const F32* slots,
                                [[maybe_unused]] const F32* arrays,
                                [[maybe_unused]] F32& update,
                                [[maybe_unused]] F32* new_slots) const {
    const F32 mu = slots[0];
    const F32 nu = slots[1];
    const F32 average = slots[2];
    const F32 t0 = mu * c0;
    const F32 new_mu = L::fma(gradient, c1, t0);
    const F32 t2 = gradient * gradient;
    const F32 t3 = nu * c2;
    const F32 new_nu = L::fma(t2, c3, t3);
    const F32 t5 = new_nu / s1;
    const F32 t6 = t5 + c4;
    const F32 t7 = L::sqrt(t6);
    const F32 t8 = t7 + c5;
    const F32 t9 = s0 * t8;
    const F32 t10 = new_mu / t9;
    const F32 t11 = L::fma(params, c6, t10);
    const F32 t12 = t11 * c7;
    const F32 t13 = params + t12;
    const F32 t14 = average * c8;
    const F32 new_average = L::fma(t13, c9, t14);
    new_slots[0] = L::bits(new_mu);
    new_slots[1] = L::bits(new_nu);
    new_slots[2] = L::bits(new_average);
    update = t12;
  }
};

}  // namespace

JAXINF_HOST_KERNEL(Body)
