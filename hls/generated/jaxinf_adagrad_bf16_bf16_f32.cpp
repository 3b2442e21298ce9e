// jaxinf_adagrad_bf16_bf16_f32.
//
// Written by jaxinf from its table of card kernels; picture: shell.hpp.
#include "shell.hpp"
#include "adagrad.cpp"

JAXINF_CARD_KERNEL void jaxinf_adagrad_bf16_bf16_f32(
    const jaxinf::Wide* gradient,
    const jaxinf::Wide* params_in,
    jaxinf::Wide* params_out,
    const jaxinf::Wide* sum_of_squares_in,
    jaxinf::Wide* sum_of_squares_out,
    const jaxinf::Wide* rsqrt_estimates,
    jaxinf::Wide* out,
    jaxinf::Wide* status,
    jaxinf::Word num_elements,
    jaxinf::Word rounding_key,
    jaxinf::Word rounding_first,
    jaxinf::Word c0,
    jaxinf::Word c1,
    jaxinf::Word c2,
    jaxinf::Word c3) {
#pragma HLS INTERFACE m_axi port=gradient bundle=gradient offset=slave depth=128 num_read_outstanding=16 max_read_burst_length=64
#pragma HLS INTERFACE m_axi port=params_in bundle=params offset=slave depth=256 num_read_outstanding=16 max_read_burst_length=64
#pragma HLS INTERFACE m_axi port=params_out bundle=params offset=slave depth=256 num_write_outstanding=16 max_write_burst_length=64
#pragma HLS INTERFACE m_axi port=sum_of_squares_in bundle=sum_of_squares offset=slave depth=256 num_read_outstanding=16 max_read_burst_length=64
#pragma HLS INTERFACE m_axi port=sum_of_squares_out bundle=sum_of_squares offset=slave depth=256 num_write_outstanding=16 max_write_burst_length=64
#pragma HLS INTERFACE m_axi port=rsqrt_estimates bundle=status offset=slave depth=257 num_read_outstanding=16 max_read_burst_length=64
#pragma HLS INTERFACE m_axi port=out bundle=gradient offset=slave depth=128 num_write_outstanding=16 max_write_burst_length=64
#pragma HLS INTERFACE m_axi port=status bundle=status offset=slave depth=1 num_write_outstanding=16 max_write_burst_length=64
  using namespace jaxinf;
  Beats gradient_beats, params_beats, slots[1], new_params_beats, out_beats, new_slots[1];
  Wides gradient_words, params_words, sum_of_squares_words, estimates_words, new_params_words, new_sum_of_squares_words, out_words;
  Words read[2], written[2], finite, valid;
#pragma HLS DATAFLOW
  JAXINF_REGION;
  JAXINF_STAGE(load<Bf16>(gradient, num_elements, gradient_words));
  JAXINF_STAGE(widen<Bf16>(gradient_words, num_elements, gradient_beats));
  JAXINF_STAGE(no_positions(valid));
  JAXINF_STAGE(load_checked<F32>(params_in, num_elements, params_words, read[0]));
  JAXINF_STAGE(load_checked<F32>(sum_of_squares_in, num_elements, sum_of_squares_words, read[1]));
  JAXINF_STAGE(widen<F32>(params_words, num_elements, params_beats));
  JAXINF_STAGE(widen<F32>(sum_of_squares_words, num_elements, slots[0]));
  JAXINF_STAGE(load<Table>(rsqrt_estimates, table_words, estimates_words));
  JAXINF_STAGE(update<false, Body, 4>(estimates_words, gradient_beats, params_beats, slots, num_elements, new_params_beats, new_slots, out_beats, finite, c0, c1, c2, c3));
  JAXINF_STAGE(narrow<F32>(new_params_beats, num_elements, new_params_words));
  JAXINF_STAGE(narrow<F32>(new_slots[0], num_elements, new_sum_of_squares_words));
  JAXINF_STAGE(store_checked<F32>(params_out, num_elements, new_params_words, written[0]));
  JAXINF_STAGE(store_checked<F32>(sum_of_squares_out, num_elements, new_sum_of_squares_words, written[1]));
  JAXINF_STAGE(narrow<Bf16>(out_beats, num_elements, out_words));
  JAXINF_STAGE(store<Bf16>(out, num_elements, out_words));
  JAXINF_STAGE(report(finite, valid, read, written, status));
  JAXINF_RUN;
}
