// rmsprop_centered.
//
// Emitted by jaxinf from these equations (jax 0.10.2, optax 0.2.8):
//
//   %0: float32 = square gradient
//   %1: float32 = mul #:float32, %0
//   %2: float32 = mul #:float32, slot1:float32
//   %3: float32 = add %1, %2
//   %4: float32 = mul #:float32, gradient
//   %5: float32 = mul #:float32, slot0:float32
//   %6: float32 = add %4, %5
//   %7: float32 = mul %6, %6
//   %8: float32 = sub %3, %7
//   %9: float32 = add %8, #:float32
//   %10: float32 = rsqrt %9
//   %11: float32 = mul %10, gradient
//   %12: float32 = mul #:float32, %11
//   update = %12
//   mu = %6
//   nu = %3
//
// # stands for a literal: c0, c1, ... below, in order of use.
#include "shell.hpp"

namespace {

template <class L>
struct Body {
  using F32 = typename L::F32;
  using I32 = typename L::I32;
  using U32 = typename L::U32;
  static constexpr int num_slots = 2, num_arrays = 0;
  static constexpr bool has_update = true;
  static constexpr bool writes[] = {true, true, false};
  const F32 c0;
  const F32 c1;
  const F32 c2;
  const F32 c3;
  const F32 c4;
  const F32 c5;

  Body([[maybe_unused]] const L& lanes,
       [[maybe_unused]] const jaxinf::Word* constants,
       [[maybe_unused]] const jaxinf::Word* scalars)
      : c0(L::uniform(constants[0]))
      , c1(L::uniform(constants[1]))
      , c2(L::uniform(constants[2]))
      , c3(L::uniform(constants[3]))
      , c4(L::uniform(constants[4]))
      , c5(L::uniform(constants[5])) {}

  JAXINF_INLINE void operator()([[maybe_unused]] const L& lanes,
                                [[maybe_unused]] F32 gradient,
                                [[maybe_unused]] F32 params,
                                [[maybe_unused]] const F32* slots,
                                [[maybe_unused]] const F32* arrays,
                                [[maybe_unused]] F32& update,
                                [[maybe_unused]] F32* new_slots) const {
    const F32 mu = slots[0];
    const F32 nu = slots[1];
    const F32 t0 = mu * c0;
    const F32 new_mu = L::fma(gradient, c1, t0);
    const F32 t2 = gradient * gradient;
    const F32 t3 = nu * c2;
    const F32 new_nu = L::fma(t2, c3, t3);
    const F32 t5 = L::fnma(new_mu, new_mu, new_nu);
    const F32 t6 = t5 + c4;
    const F32 t7 = lanes.rsqrt(t6);
    const F32 t8 = t7 * gradient;
    const F32 t9 = t8 * c5;
    new_slots[0] = L::bits(new_mu);
    new_slots[1] = L::bits(new_nu);
    update = t9;
  }
};

}  // namespace

JAXINF_HOST_KERNEL(Body)
