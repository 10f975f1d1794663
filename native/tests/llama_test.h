// llama_test.h - models and contexts of the patched library for tests, and plain decoding to compare with.
#pragma once

#include "check.h"
#include "llama-cpp.h"
#include "llama.h"
#include "random_model.h"

#include <algorithm>
#include <string>
#include <vector>

namespace specee_test {

// A model file with its contexts; llama.cpp's log is kept quiet.
class loaded_model {
  public:
    explicit loaded_model(const std::string & path) : path(path) {
        llama_log_set([](ggml_log_level, const char *, void *) {}, nullptr);
        llama_backend_init();
        llama_model_params params = llama_model_default_params();
        params.n_gpu_layers       = 0;
        model.reset(llama_model_load_from_file(path.c_str(), params));
        if (!model) {
            throw std::runtime_error("cannot load " + path);
        }
    }

    llama_context_ptr context(int32_t n_ctx = 512, int32_t n_seq = 1, int32_t n_ubatch = 128) const {
        llama_context_params params = llama_context_default_params();
        params.n_ctx                = n_ctx;
        params.n_batch              = n_ubatch;
        params.n_ubatch             = n_ubatch;
        params.n_seq_max            = n_seq;
        params.kv_unified           = true;
        params.n_threads            = 1; // tiny models, many of them at once
        params.n_threads_batch      = 1;
        llama_context_ptr ctx(llama_init_from_model(model.get(), params));
        if (!ctx) {
            throw std::runtime_error("cannot make a context for " + path);
        }
        return ctx;
    }

    int32_t n_layer() const { return llama_model_n_layer(model.get()); }
    int32_t n_embd() const { return llama_model_n_embd(model.get()); }
    int32_t n_vocab() const { return llama_vocab_n_tokens(llama_model_get_vocab(model.get())); }

    const std::string path;
    llama_model_ptr   model;
};

inline std::vector<llama_token> random_prompt(int32_t n, int32_t n_vocab, uint64_t seed) {
    random_numbers           random(seed);
    std::vector<llama_token> tokens;
    for (int32_t i = 0; i < n; ++i) {
        tokens.push_back(static_cast<llama_token>(3 + random.below(n_vocab - 3)));
    }
    return tokens;
}

// Appends tokens to sequence 0, in chunks of n_batch; the logits of the last one are ready afterwards.
inline void decode(llama_context * ctx, std::vector<llama_token> tokens) {
    for (size_t done = 0; done < tokens.size();) {
        const int32_t n = static_cast<int32_t>(std::min<size_t>(tokens.size() - done, llama_n_batch(ctx)));
        if (llama_decode(ctx, llama_batch_get_one(tokens.data() + done, n)) != 0) {
            throw std::runtime_error("llama_decode failed");
        }
        done += n;
    }
}

inline std::vector<float> last_logits(llama_context * ctx, int32_t row = -1) {
    const float * logits = llama_get_logits_ith(ctx, row);
    if (!logits) {
        throw std::runtime_error("no logits");
    }
    return std::vector<float>(logits, logits + llama_vocab_n_tokens(llama_model_get_vocab(llama_get_model(ctx))));
}

inline llama_token argmax(const std::vector<float> & logits) {
    return static_cast<llama_token>(std::max_element(logits.begin(), logits.end()) - logits.begin());
}

inline float max_difference(const std::vector<float> & a, const std::vector<float> & b) {
    float worst = 0;
    for (size_t i = 0; i < a.size(); ++i) {
        worst = std::max(worst, std::fabs(a[i] - b[i]));
    }
    return worst;
}

// Greedy text of full depth, one token a pass.
inline std::vector<llama_token> generate(llama_context * ctx, const std::vector<llama_token> & prompt, int32_t n) {
    decode(ctx, prompt);
    std::vector<llama_token> text;
    for (int32_t i = 0; i < n; ++i) {
        text.push_back(argmax(last_logits(ctx)));
        if (i + 1 < n) {
            decode(ctx, {text.back()});
        }
    }
    return text;
}

} // namespace specee_test
