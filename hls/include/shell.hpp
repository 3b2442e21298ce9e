// What a card has around an emitted body: its generated kernel wires these stages.
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
// two pointers, the gradient and the result, and what is short: positions and the status
// (jaxinf/kernels/card_source.py).
// A state is read and written at the same place: a beat is written only after it went
// through the update, so a kernel never reads what it wrote.
#pragma once

#include "convert.hpp"
#include "decompress.hpp"
#include "memory.hpp"
#include "state_codecs.hpp"
#include "streams.hpp"
#include "update.hpp"

// Bodies end with this; the host's shell makes its entry point of it.
#define JAXINF_HOST_KERNEL(Body)
