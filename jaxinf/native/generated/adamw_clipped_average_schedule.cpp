// adamw_clipped_average_schedule.
//
// Emitted by jaxinf from these equations (jax 0.10.2, optax 0.2.8):
//
//   %0: float32 = div gradient, scalar2:float32
//   %1: float32 = mul %0, #:float32
//   %2: float32 = select_n scalar1:bool, %1, gradient
//   %3: float32 = mul #:float32, %2
//   %4: float32 = mul #:float32, slot0:float32
//   %5: float32 = add %3, %4
//   %6: float32 = div %5, scalar3:float32
//   %7: float32 = square %2
//   %8: float32 = mul #:float32, %7
//   %9: float32 = mul #:float32, slot1:float32
//   %10: float32 = add %8, %9
//   %11: float32 = div %10, scalar4:float32
//   %12: float32 = add %11, #:float32
//   %13: float32 = sqrt %12
//   %14: float32 = add %13, #:float32
//   %15: float32 = div %6, %14
//   %16: float32 = mul #:float32, params
//   %17: float32 = add %15, %16
//   %18: float32 = mul scalar0:float32, %17
//   %19: float32 = add params, %18
//   %20: float32 = mul #:float32, %19
//   %21: float32 = mul #:float32, slot2:float32
//   %22: float32 = add %20, %21
//   update = %18
//   mu = %5
//   nu = %10
//   average = %22
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
  const I32 s1;
  const F32 s2;
  const F32 s3;
  const F32 s4;
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
      , s1(L::as_i32(L::uniform(scalars[1])))
      , s2(L::uniform(scalars[2]))
      , s3(L::uniform(scalars[3]))
      , s4(L::uniform(scalars[4]))
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
    const F32 t0 = gradient / s2;
    const F32 t1 = t0 * c0;
    const F32 t2 = L::select(s1, gradient, t1);
    const F32 t3 = mu * c1;
    const F32 new_mu = L::fma(t2, c2, t3);
    const F32 t5 = t2 * t2;
    const F32 t6 = t5 * c3;
    const F32 new_nu = L::fma(nu, c4, t6);
    const F32 t8 = new_nu / s4;
    const F32 t9 = t8 + c5;
    const F32 t10 = L::sqrt(t9);
    const F32 t11 = t10 + c6;
    const F32 t12 = s3 * t11;
    const F32 t13 = new_mu / t12;
    const F32 t14 = L::fma(params, c7, t13);
    const F32 t15 = s0 * t14;
    const F32 t16 = params + t15;
    const F32 t17 = average * c8;
    const F32 new_average = L::fma(t16, c9, t17);
    new_slots[0] = L::bits(new_mu);
    new_slots[1] = L::bits(new_nu);
    new_slots[2] = L::bits(new_average);
    update = t15;
  }
};

}  // namespace

JAXINF_HOST_KERNEL(Body)
