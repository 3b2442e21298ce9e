// jaxinf_sgd_momentum_f32_update_f32_topk.
//
// Written by jaxinf from its table of card kernels; picture: shell.hpp.
#include "shell.hpp"
#include "sgd_momentum.cpp"

JAXINF_CARD_KERNEL void jaxinf_sgd_momentum_f32_update_f32_topk(
    const jaxinf::Wide* gradient,
    const jaxinf::Wide* indices,
    const jaxinf::Wide* params_in,
    jaxinf::Wide* params_out,
    const jaxinf::Wide* trace_in,
    jaxinf::Wide* trace_out,
    jaxinf::Wide* out,
    jaxinf::Wide* status,
    jaxinf::Word num_elements,
    jaxinf::Word num_selected,
    jaxinf::Word rounding_key,
    jaxinf::Word rounding_first,
    jaxinf::Word c0,
    jaxinf::Word c1) {
#pragma HLS INTERFACE m_axi port=gradient bundle=gradient offset=slave depth=256 num_read_outstanding=16 max_read_burst_length=64
#pragma HLS INTERFACE m_axi port=indices bundle=status offset=slave depth=256 num_read_outstanding=16 max_read_burst_length=64
#pragma HLS INTERFACE m_axi port=params_in bundle=params offset=slave depth=256 num_read_outstanding=16 max_read_burst_length=64
#pragma HLS INTERFACE m_axi port=params_out bundle=params offset=slave depth=256 num_write_outstanding=16 max_write_burst_length=64
#pragma HLS INTERFACE m_axi port=trace_in bundle=trace offset=slave depth=256 num_read_outstanding=16 max_read_burst_length=64
#pragma HLS INTERFACE m_axi port=trace_out bundle=trace offset=slave depth=256 num_write_outstanding=16 max_write_burst_length=64
#pragma HLS INTERFACE m_axi port=out bundle=gradient offset=slave depth=256 num_write_outstanding=16 max_write_burst_length=64
#pragma HLS INTERFACE m_axi port=status bundle=status offset=slave depth=1 num_write_outstanding=16 max_write_burst_length=64
  using namespace jaxinf;
  Beats gradient_beats, params_beats, slots[1], new_params_beats, out_beats, new_slots[1];
  Wides gradient_words, indices_words, params_words, trace_words, new_params_words, new_trace_words, out_words;
  Words read[2], written[2], finite, valid;
#pragma HLS DATAFLOW
  JAXINF_REGION;
  JAXINF_STAGE(load<F32>(gradient, num_selected, gradient_words));
  JAXINF_STAGE(load<Indices>(indices, num_selected, indices_words));
  JAXINF_STAGE(decompress<F32>(gradient_words, indices_words, num_elements, num_selected, gradient_beats, valid));
  JAXINF_STAGE(load_checked<F32>(params_in, num_elements, params_words, read[0]));
  JAXINF_STAGE(load_checked<F32>(trace_in, num_elements, trace_words, read[1]));
  JAXINF_STAGE(widen<F32>(params_words, num_elements, params_beats));
  JAXINF_STAGE(widen<F32>(trace_words, num_elements, slots[0]));
  JAXINF_STAGE(update<true, Body, 2>(gradient_beats, params_beats, slots, num_elements, new_params_beats, new_slots, out_beats, finite, c0, c1));
  JAXINF_STAGE(narrow<F32>(new_params_beats, num_elements, new_params_words));
  JAXINF_STAGE(narrow<F32>(new_slots[0], num_elements, new_trace_words));
  JAXINF_STAGE(store_checked<F32>(params_out, num_elements, new_params_words, written[0]));
  JAXINF_STAGE(store_checked<F32>(trace_out, num_elements, new_trace_words, written[1]));
  JAXINF_STAGE(narrow<F32>(out_beats, num_elements, out_words));
  JAXINF_STAGE(store<F32>(out, num_elements, out_words));
  JAXINF_STAGE(report(finite, valid, read, written, status));
  JAXINF_RUN;
}
