// sgd_momentum.
//
// Emitted by jaxinf from these equations (jax 0.10.2, optax 0.2.8):
//
//   %0: float32 = mul #:float32, slot0:float32
//   %1: float32 = add gradient, %0
//   %2: float32 = mul #:float32, %1
//   update = %2
//   trace = %1
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

  Body([[maybe_unused]] const L& lanes,
       [[maybe_unused]] const jaxinf::Word* constants,
       [[maybe_unused]] const jaxinf::Word* scalars)
      : c0(L::uniform(constants[0]))
      , c1(L::uniform(constants[1])) {}

  JAXINF_INLINE void operator()([[maybe_unused]] const L& lanes,
                                [[maybe_unused]] F32 gradient,
                                [[maybe_unused]] F32 params,
                                [[maybe_unused]] const F32* slots,
                                [[maybe_unused]] const F32* arrays,
                                [[maybe_unused]] F32& update,
                                [[maybe_unused]] F32* new_slots) const {
    const F32 trace = slots[0];
    const F32 new_trace = L::fma(trace, c0, gradient);
    const F32 t1 = new_trace * c1;
    new_slots[0] = L::bits(new_trace);
    update = t1;
  }
};

}  // namespace

JAXINF_HOST_KERNEL(Body)
