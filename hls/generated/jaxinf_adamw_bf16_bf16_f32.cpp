// jaxinf_adamw_bf16_bf16_f32.
//
// Written by jaxinf from its table of card kernels; picture: shell.hpp.
#include "shell.hpp"
#include "adamw.cpp"

JAXINF_CARD_KERNEL void jaxinf_adamw_bf16_bf16_f32(
    const jaxinf::Wide* gradient,
    const jaxinf::Wide* params_in,
    jaxinf::Wide* params_out,
    const jaxinf::Wide* mu_in,
    jaxinf::Wide* mu_out,
    const jaxinf::Wide* nu_in,
    jaxinf::Wide* nu_out,
    jaxinf::Wide* out,
    jaxinf::Wide* status,
    jaxinf::Word num_elements,
    jaxinf::Word rounding_key,
    jaxinf::Word rounding_first,
    jaxinf::Word c0,
    jaxinf::Word c1,
    jaxinf::Word c2,
    jaxinf::Word c3,
    jaxinf::Word c4,
    jaxinf::Word c5,
    jaxinf::Word c6,
    jaxinf::Word c7,
    jaxinf::Word s0,
    jaxinf::Word s1) {
#pragma HLS INTERFACE m_axi port=gradient bundle=gradient offset=slave depth=128 num_read_outstanding=16 max_read_burst_length=64
#pragma HLS INTERFACE m_axi port=params_in bundle=params offset=slave depth=256 num_read_outstanding=16 max_read_burst_length=64
#pragma HLS INTERFACE m_axi port=params_out bundle=params offset=slave depth=256 num_write_outstanding=16 max_write_burst_length=64
#pragma HLS INTERFACE m_axi port=mu_in bundle=mu offset=slave depth=256 num_read_outstanding=16 max_read_burst_length=64
#pragma HLS INTERFACE m_axi port=mu_out bundle=mu offset=slave depth=256 num_write_outstanding=16 max_write_burst_length=64
#pragma HLS INTERFACE m_axi port=nu_in bundle=nu offset=slave depth=256 num_read_outstanding=16 max_read_burst_length=64
#pragma HLS INTERFACE m_axi port=nu_out bundle=nu offset=slave depth=256 num_write_outstanding=16 max_write_burst_length=64
#pragma HLS INTERFACE m_axi port=out bundle=gradient offset=slave depth=128 num_write_outstanding=16 max_write_burst_length=64
#pragma HLS INTERFACE m_axi port=status bundle=status offset=slave depth=1 num_write_outstanding=16 max_write_burst_length=64
  using namespace jaxinf;
  Beats gradient_beats, params_beats, slots[2], new_params_beats, out_beats, new_slots[2];
  Wides gradient_words, params_words, mu_words, nu_words, new_params_words, new_mu_words, new_nu_words, out_words;
  Words read[3], written[3], finite, valid;
#pragma HLS DATAFLOW
  JAXINF_REGION;
  JAXINF_STAGE(load<Bf16>(gradient, num_elements, gradient_words));
  JAXINF_STAGE(widen<Bf16>(gradient_words, num_elements, gradient_beats));
  JAXINF_STAGE(no_positions(valid));
  JAXINF_STAGE(load_checked<F32>(params_in, num_elements, params_words, read[0]));
  JAXINF_STAGE(load_checked<F32>(mu_in, num_elements, mu_words, read[1]));
  JAXINF_STAGE(load_checked<F32>(nu_in, num_elements, nu_words, read[2]));
  JAXINF_STAGE(widen<F32>(params_words, num_elements, params_beats));
  JAXINF_STAGE(widen<F32>(mu_words, num_elements, slots[0]));
  JAXINF_STAGE(widen<F32>(nu_words, num_elements, slots[1]));
  JAXINF_STAGE(update<false, Body, 8>(gradient_beats, params_beats, slots, num_elements, new_params_beats, new_slots, out_beats, finite, c0, c1, c2, c3, c4, c5, c6, c7, s0, s1));
  JAXINF_STAGE(narrow<F32>(new_params_beats, num_elements, new_params_words));
  JAXINF_STAGE(narrow<F32>(new_slots[0], num_elements, new_mu_words));
  JAXINF_STAGE(narrow<F32>(new_slots[1], num_elements, new_nu_words));
  JAXINF_STAGE(store_checked<F32>(params_out, num_elements, new_params_words, written[0]));
  JAXINF_STAGE(store_checked<F32>(mu_out, num_elements, new_mu_words, written[1]));
  JAXINF_STAGE(store_checked<F32>(nu_out, num_elements, new_nu_words, written[2]));
  JAXINF_STAGE(narrow<Bf16>(out_beats, num_elements, out_words));
  JAXINF_STAGE(store<Bf16>(out, num_elements, out_words));
  JAXINF_STAGE(report(finite, valid, read, written, status));
  JAXINF_RUN;
}
