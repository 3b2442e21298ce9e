// The update: runs an emitted body, one beat a cycle, and reports to the host.
#pragma once

#include "roots.hpp"
#include "streams.hpp"

namespace jaxinf {

// Updates one beat. Lanes without an element become zeros. Returns whether the gradient
// is finite in all others. `out`: the update, or the new params.
template <bool out_is_update, class Body, class AnyRoots, Word lanes>
bool update_beat(const Body& body, const AnyRoots& roots, Word num_valid,
                 const BeatOf<lanes>& gradient, const BeatOf<lanes>& params,
                 const BeatOf<lanes>* slots, BeatOf<lanes>& new_params,
                 BeatOf<lanes>* new_slots, BeatOf<lanes>& out) {
  using F32 = CardLane::F32;
  constexpr int num_slots = Body::num_slots;
  bool finite = true;
update_lanes:
  for (Word lane = 0; lane < lanes; ++lane) {
#pragma HLS UNROLL
    F32 old_values[num_slots + 1], new_values[num_slots + 1], update;
    for (int k = 0; k < num_slots; ++k) old_values[k] = slots[k].lane[lane];
    const F32 old(params.lane[lane]);
    body(roots.lane(lane), gradient.lane[lane], old, old_values, nullptr, update,
         new_values);
    const bool is_valid = lane < num_valid;
    const float master = is_valid ? (old + update).value : 0.0f;
    const float result = is_valid ? update.value : 0.0f;
    finite &= !is_valid || is_finite(gradient.lane[lane]);
    new_params.lane[lane] = master;
    out.lane[lane] = out_is_update ? result : master;
    for (int k = 0; k < num_slots; ++k)
      new_slots[k].lane[lane] = is_valid ? new_values[k].value : 0.0f;
  }
  return finite;
}

// Updates all beats. `roots`: `Roots` or `NoRoots`. `arguments`: the body's constants,
// then its scalars.
template <bool out_is_update, template <class> class Kernel, int num_constants,
          class AnyRoots, Word lanes, int num_streams, class... Arguments>
void update_all(const AnyRoots& roots, BeatsOf<lanes>& gradient, BeatsOf<lanes>& params,
                BeatsOf<lanes> (&slots)[num_streams], Word num_elements, BeatsOf<lanes>& new_params,
                BeatsOf<lanes> (&new_slots)[num_streams], BeatsOf<lanes>& out, Words& finite,
                Arguments... arguments) {
#pragma HLS INLINE
  using Body = Kernel<typename AnyRoots::Lanes>;
  static_assert(num_streams == Body::num_slots, "a stream for each slot");
  const Word words[] = {arguments..., 0};
  const Body body(roots.lane(0), words, words + num_constants);
  bool all_finite = true;
update_beats:
  for (Word i = 0; i < num_beats<lanes>(num_elements); ++i) {
#pragma HLS PIPELINE II=1
    const BeatOf<lanes> gradient_beat = gradient.read(), params_beat = params.read();
    BeatOf<lanes> slot_beats[num_streams], new_slot_beats[num_streams];
    BeatOf<lanes> new_params_beat, out_beat;
    for (int k = 0; k < num_streams; ++k) slot_beats[k] = slots[k].read();
    all_finite &= update_beat<out_is_update>(
        body, roots, num_elements - i * lanes, gradient_beat, params_beat,
        slot_beats, new_params_beat, new_slot_beats, out_beat);
    for (int k = 0; k < num_streams; ++k) new_slots[k].write(new_slot_beats[k]);
    new_params.write(new_params_beat);
    out.write(out_beat);
  }
  finite.write(all_finite);
}

// The stage of a body, of a body with reciprocal square roots, of one without state.
template <bool out_is_update, template <class> class Kernel, int num_constants,
          Word lanes, int num_streams, class... Arguments>
void update(BeatsOf<lanes>& gradient, BeatsOf<lanes>& params, BeatsOf<lanes> (&slots)[num_streams],
            Word num_elements, BeatsOf<lanes>& new_params, BeatsOf<lanes> (&new_slots)[num_streams],
            BeatsOf<lanes>& out, Words& finite, Arguments... arguments) {
  update_all<out_is_update, Kernel, num_constants>(
      NoRoots(), gradient, params, slots, num_elements, new_params, new_slots, out,
      finite, arguments...);
}

template <bool out_is_update, template <class> class Kernel, int num_constants,
          Word lanes, int num_streams, class... Arguments>
void update(Wides& estimates, BeatsOf<lanes>& gradient, BeatsOf<lanes>& params,
            BeatsOf<lanes> (&slots)[num_streams], Word num_elements, BeatsOf<lanes>& new_params,
            BeatsOf<lanes> (&new_slots)[num_streams], BeatsOf<lanes>& out, Words& finite,
            Arguments... arguments) {
  const Roots<lanes> roots(estimates);
  update_all<out_is_update, Kernel, num_constants>(
      roots, gradient, params, slots, num_elements, new_params, new_slots, out, finite,
      arguments...);
}

template <bool out_is_update, template <class> class Kernel, int num_constants,
          Word lanes, class... Arguments>
void update(BeatsOf<lanes>& gradient, BeatsOf<lanes>& params, Word num_elements, BeatsOf<lanes>& new_params,
            BeatsOf<lanes>& out, Words& finite, Arguments... arguments) {
  const Word words[] = {arguments..., 0};
  const NoRoots roots{};
  const Kernel<CardLane> body(CardLane(), words, words + num_constants);
  bool all_finite = true;
stateless_beats:
  for (Word i = 0; i < num_beats<lanes>(num_elements); ++i) {
#pragma HLS PIPELINE II=1
    const BeatOf<lanes> gradient_beat = gradient.read(), params_beat = params.read();
    BeatOf<lanes> new_params_beat, out_beat;
    all_finite &= update_beat<out_is_update>(
        body, roots, num_elements - i * lanes, gradient_beat, params_beat,
        static_cast<const BeatOf<lanes>*>(nullptr), new_params_beat,
        static_cast<BeatOf<lanes>*>(nullptr), out_beat);
    new_params.write(new_params_beat);
    out.write(out_beat);
  }
  finite.write(all_finite);
}

// ---- the status block; jaxinf/kernels/card_kernels.py describes its words

template <int num_extents>
void report(Words& finite, Words& valid, Words (&read)[num_extents],
            Words (&written)[num_extents], Wide* status) {
  static_assert(2 * num_extents + 2 <= 16, "the checksums fill the block");
  Wide wide = zero_wide();
  wide.word[0] = finite.read();
report_checksums:
  for (int i = 0; i < num_extents; ++i) {
#pragma HLS UNROLL
    wide.word[1 + i] = read[i].read();
    wide.word[1 + num_extents + i] = written[i].read();
  }
  wide.word[15] = !valid.read();
  status[0] = wide;
}

// For a dense gradient, which has no positions.
inline void no_positions(Words& valid) { valid.write(1); }

}  // namespace jaxinf
