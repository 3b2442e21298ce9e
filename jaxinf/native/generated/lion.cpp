// lion.
//
// Emitted by jaxinf from these equations (jax 0.10.2, optax 0.2.8):
//
//   %0: float32 = mul #:float32, gradient
//   %1: float32 = mul #:float32, slot0:float32
//   %2: float32 = add %0, %1
//   %3: float32 = sign %2
//   %4: float32 = mul #:float32, params
//   %5: float32 = add %3, %4
//   %6: float32 = mul #:float32, %5
//   %7: float32 = mul #:float32, gradient
//   %8: float32 = mul #:float32, slot0:float32
//   %9: float32 = add %7, %8
//   update = %6
//   mu = %9
//
// # stands for a literal: c0, c1, ... below, in order of use.
#include "shell.hpp"

namespace {

template <class L>
struct Body {
  using F32 = typename L::F32;
  using I32 = typename L::I32;
  using U32 = typename L::U32;
  static constexpr int num_slots = 1, num_arrays = 0;
  static constexpr bool has_update = true;
  static constexpr bool writes[] = {true, false};
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
    const F32 t0 = mu * c0;
    const F32 new_mu = L::fma(gradient, c1, t0);
    const F32 t2 = mu * c2;
    const F32 t3 = L::fma(gradient, c3, t2);
    const F32 t4 = L::sign(t3);
    const F32 t5 = L::fma(params, c4, t4);
    const F32 t6 = t5 * c5;
    new_slots[0] = L::bits(new_mu);
    update = t6;
  }
};

}  // namespace

JAXINF_HOST_KERNEL(Body)
