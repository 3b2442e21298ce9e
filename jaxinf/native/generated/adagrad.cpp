// adagrad.
//
// Emitted by jaxinf from these equations (jax 0.10.2, optax 0.2.8):
//
//   %0: float32 = mul gradient, gradient
//   %1: float32 = add %0, slot0:float32
//   %2: bool = gt %1, #:float32
//   %3: float32 = add %1, #:float32
//   %4: float32 = rsqrt %3
//   %5: float32 = select_n %2, #:float32, %4
//   %6: float32 = mul %5, gradient
//   %7: float32 = mul #:float32, %6
//   update = %7
//   sum_of_squares = %1
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

  Body([[maybe_unused]] const L& lanes,
       [[maybe_unused]] const jaxinf::Word* constants,
       [[maybe_unused]] const jaxinf::Word* scalars)
      : c0(L::uniform(constants[0]))
      , c1(L::uniform(constants[1]))
      , c2(L::uniform(constants[2]))
      , c3(L::uniform(constants[3])) {}

  JAXINF_INLINE void operator()([[maybe_unused]] const L& lanes,
                                [[maybe_unused]] F32 gradient,
                                [[maybe_unused]] F32 params,
                                [[maybe_unused]] const F32* slots,
                                [[maybe_unused]] const F32* arrays,
                                [[maybe_unused]] F32& update,
                                [[maybe_unused]] F32* new_slots) const {
    const F32 sum_of_squares = slots[0];
    const F32 new_sum_of_squares = L::fma(gradient, gradient, sum_of_squares);
    const I32 t1 = (I32)(new_sum_of_squares > c0);
    const F32 t2 = new_sum_of_squares + c1;
    const F32 t3 = lanes.rsqrt(t2);
    const F32 t4 = L::select(t1, t3, c2);
    const F32 t5 = t4 * gradient;
    const F32 t6 = t5 * c3;
    new_slots[0] = L::bits(new_sum_of_squares);
    update = t6;
  }
};

}  // namespace

JAXINF_HOST_KERNEL(Body)
