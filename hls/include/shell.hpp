// The stages around an emitted body on a card, which a generated kernel connects.
//
//               ┌─────────── 512-bit ports, bursts ──────────┐
//   gradient ──►│load                                        │
//               └──► widen ────────────┐                     │
//     (top-k: values, indices ─► decompress)                 │
//                                      ▼                     │
//   params_in ─► load + CRC ─► widen ─► update ─► narrow ─► store + CRC ─► params_out
//   slot_in ──► load + CRC ─► decode ─► some  ─► encode ─► store + CRC ─► slot_out
//   [scales_in] load + CRC ──────┘     lanes      └──────► store + CRC ─► [scales_out]
//                                      │ └─────► narrow ─► store ───────► out
//   [estimates] load ──────────────────┘
//                                      └ finite, CRCs ───► report ──────► status
//
// Every box is a process of one dataflow region with II=1, every arrow a stream of 64
// bytes a cycle. A port has one reader and one writer, which proceed together: a state's
// two pointers, the gradient and the result, or positions and the status, which are short
// (jaxinf/kernels/card_source.py).
// A state is updated in place: a beat is written only after it has passed the update, so
// a kernel never reads its own results.
#pragma once

#include "convert.hpp"
#include "decompress.hpp"
#include "memory.hpp"
#include "state_codecs.hpp"
#include "streams.hpp"
#include "update.hpp"

// Bodies end with this macro, which the host's shell expands to its entry point.
#define JAXINF_HOST_KERNEL(Body)
