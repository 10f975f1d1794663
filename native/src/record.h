// record.h - generates at full depth, several sequences at once, and writes the hidden states of chosen layers to a
// file.
#pragma once

#include "specee.h"

namespace specee {

int64_t record(llama_context * ctx, const specee_record_params & params); // rows appended

} // namespace specee
