// window.h - runs layer windows of the patched libllama: the carried states, the translators and the probes.
#pragma once

#include "bundle.h"
#include "ggml-cpp.h"
#include "head.h"
#include "llama.h"

#include <cstdint>
#include <string>
#include <vector>

namespace specee {

// A token on its way through the layers.
struct flight {
    llama_token  id;
    llama_pos    pos;
    llama_seq_id seq;
    int32_t      carry; // its row of the carry tensor
    int32_t      depth; // layers that have run
};

class window_runner {
  public:
    // n_carry: tokens that can be under way at once. from: the bundle, or nullptr for windows without probes. Throws
    // error{SPECEE_ERR_UNSUPPORTED, ...} when the model has no windows, and what head throws.
    window_runner(llama_context * ctx, const bundle * from, const std::string & model_path, int32_t n_carry);

    int32_t n_layer() const { return n_layer_; }
    int32_t n_embd() const { return n_embd_; }

    // Runs all tokens, in order of position, from their common depth to il_end and notes that down.
    void layers(flight * const * tokens, int32_t n, int32_t il_end);

    // The same, and probes the last token at the end, which is the layer of probe i_probe.
    // lens: logits of the lens vocabulary [n_lens]; probe: logits of the given rows of the head [k].
    // The result is valid until the next window.
    const float * layers_lens(flight * const * tokens, int32_t n, size_t i_probe);
    const float * layers_probe(flight * const * tokens, int32_t n, size_t i_probe, const int32_t * rows, int32_t k);

    // LM head of tokens of full depth; row i of the context's logits is token i's.
    void logits(flight * const * tokens, int32_t n);

    // Hidden state of a token, before any norm. out: [n_embd]
    void state(const flight & token, float * out) const;

    // The most tokens, up to n_max, that give the same logits bit by bit in one batch as one by one. Clears the memory.
    int32_t max_exact_rows(int32_t n_max);

    // Seconds that one lens (lens = true) or probe takes, measured without layers.
    double measure_probe(size_t i_probe, bool lens);

  private:
    struct translator {
        ggml_tensor * v; // [n_embd, rank]
        ggml_tensor * u; // [rank, n_embd]
        ggml_tensor * b; // [n_embd]
        int32_t       layer;
    };

    void run(flight * const * tokens, int32_t n, int32_t il_begin, int32_t il_end, bool head, const translator * probe,
             const int32_t * rows, int32_t n_rows);

    llama_context * ctx;
    int32_t         n_layer_;
    int32_t         n_embd_;
    int32_t         k_ = 0;

    std::unique_ptr<head>   head_;
    ggml_context_ptr        tensors;
    ggml_backend_buffer_ptr buffer;
    ggml_tensor *           carry = nullptr; // [n_embd, n_carry]
    std::vector<translator> translators; // one per probe

    // the batch, reused
    std::vector<llama_token>    ids;
    std::vector<llama_pos>      pos;
    std::vector<int32_t>        n_seq;
    std::vector<llama_seq_id>   seq;
    std::vector<llama_seq_id *> seq_ptr;
    std::vector<int8_t>         output;
    std::vector<int32_t>        carry_ids;
};

// "" when the model behind ctx can run in layer windows, else why not.
std::string why_no_windows(const llama_context * ctx);

} // namespace specee
