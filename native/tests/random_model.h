// random_model.h - tiny GGUF models with random weights, the same on every platform.
//
// Each tensor is seeded by its own name, so a model with more layers shares the lower ones with a smaller model.
#pragma once

#include "ggml.h"

#include <cstdint>
#include <string>

namespace specee_test {

struct random_model_spec {
    std::string arch        = "llama"; // or "qwen2": biases on Q, K and V
    int32_t     n_layer     = 8;
    int32_t     n_embd      = 128; // a multiple of the type's block: 32, or 256 for K-quants
    int32_t     n_head      = 4;   // head size n_embd / n_head
    int32_t     n_head_kv   = 2;
    int32_t     n_ff        = 256;
    int32_t     n_vocab     = 512; // at least 259: three control tokens and the bytes
    int32_t     n_ctx_train = 4096;
    uint64_t    seed        = 1;
    bool        tied        = false;         // the embedding is also the head
    ggml_type   type        = GGML_TYPE_F32; // of the matrices; norms and biases stay F32
};

// Writes the GGUF and returns path. Throws std::runtime_error when the spec is impossible or the file cannot be
// written.
std::string random_model_write(const std::string & path, const random_model_spec & spec);

} // namespace specee_test
