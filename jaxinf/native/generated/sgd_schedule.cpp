// sgd_schedule.
//
// Emitted by jaxinf from these equations (jax 0.10.2, optax 0.2.8):
//
//   %0: float32 = mul scalar0:float32, gradient
//   update = %0
//
// # stands for a literal: c0, c1, ... below, in order of use.
#include "shell.hpp"

namespace {

template <class L>
struct Body {
  using F32 = typename L::F32;
  using I32 = typename L::I32;
  using U32 = typename L::U32;
  static constexpr int num_slots = 0, num_arrays = 0;
  static constexpr bool has_update = true;
  static constexpr bool writes[] = {false};
  const F32 s0;

  Body([[maybe_unused]] const L& lanes,
       [[maybe_unused]] const jaxinf::Word* constants,
       [[maybe_unused]] const jaxinf::Word* scalars)
      : s0(L::uniform(scalars[0])) {}

  JAXINF_INLINE void operator()([[maybe_unused]] const L& lanes,
                                [[maybe_unused]] F32 gradient,
                                [[maybe_unused]] F32 params,
                                [[maybe_unused]] const F32* slots,
                                [[maybe_unused]] const F32* arrays,
                                [[maybe_unused]] F32& update,
                                [[maybe_unused]] F32* new_slots) const {
    const F32 t0 = s0 * gradient;
    update = t0;
  }
};

}  // namespace

JAXINF_HOST_KERNEL(Body)
