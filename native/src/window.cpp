#include "window.h"

#include "error.h"
#include "ggml-cpu.h"
#include "llama-ext.h"

#include <algorithm>
#include <chrono>
#include <cstring>

namespace specee {

std::string why_no_windows(const llama_context * ctx) {
    const llama_model * model = llama_get_model(ctx);
    if (!llama_model_has_windows(model) || llama_model_is_recurrent(model) || llama_model_is_hybrid(model)) {
        char arch[64] = "unknown";
        llama_model_meta_val_str(model, "general.architecture", arch, sizeof(arch));
        return std::string("the architecture ") + arch + " has no layer windows; supported: llama, qwen2";
    }
    if (llama_model_n_swa(model) > 0) {
        return "the model's sliding-window attention has no layer windows";
    }
    return "";
}

window_runner::window_runner(llama_context * ctx, const bundle * from, const std::string & model_path,
                             int32_t n_carry) :
    ctx(ctx),
    n_layer_(llama_model_n_layer(llama_get_model(ctx))),
    n_embd_(llama_model_n_embd(llama_get_model(ctx))) {
    const std::string reason = why_no_windows(ctx);
    if (!reason.empty()) {
        throw error(SPECEE_ERR_UNSUPPORTED, reason);
    }
    llama_clear_windows(ctx); // an earlier runner's graphs, whose tensors are gone

    const size_t n_tensors = 1 + (from ? 3 * from->probes.size() : 0);
    tensors.reset(ggml_init({n_tensors * ggml_tensor_overhead(), nullptr, true}));

    carry = ggml_new_tensor_2d(tensors.get(), GGML_TYPE_F32, n_embd_, n_carry);
    if (from) {
        for (const probe_spec & probe : from->probes) {
            translators.push_back({
                ggml_new_tensor_2d(tensors.get(), GGML_TYPE_F16, n_embd_, probe.rank),
                ggml_new_tensor_2d(tensors.get(), GGML_TYPE_F16, probe.rank, n_embd_),
                ggml_new_tensor_1d(tensors.get(), GGML_TYPE_F32, n_embd_),
                probe.layer,
            });
        }
    }

    buffer.reset(ggml_backend_alloc_ctx_tensors_from_buft(tensors.get(), ggml_backend_cpu_buffer_type()));
    if (!buffer) {
        throw error(SPECEE_ERR_NO_MEMORY, "no memory for the carried states and translators");
    }
    ggml_backend_buffer_clear(buffer.get(), 0);

    if (!from) {
        return;
    }

    for (size_t i = 0; i < translators.size(); ++i) {
        const probe_spec & probe = from->probes[i];
        ggml_backend_tensor_set(translators[i].v, probe.v.data(), 0, ggml_nbytes(translators[i].v));
        ggml_backend_tensor_set(translators[i].u, probe.u.data(), 0, ggml_nbytes(translators[i].u));
        std::vector<float> bias(n_embd_);
        ggml_fp16_to_fp32_row(reinterpret_cast<const ggml_fp16_t *>(probe.b.data()), bias.data(), n_embd_);
        ggml_backend_tensor_set(translators[i].b, bias.data(), 0, ggml_nbytes(translators[i].b));
    }

    k_    = from->k;
    head_ = std::make_unique<head>(llama_get_model(ctx), model_path);
    head_->copy_lens(from->lens_ids);
}

void window_runner::run(flight * const * tokens, int32_t n, int32_t il_begin, int32_t il_end, bool head,
                        const translator * probe, const int32_t * rows, int32_t n_rows) {
    ids.resize(n);
    pos.resize(n);
    n_seq.assign(n, 1);
    seq.resize(n);
    seq_ptr.resize(n);
    carry_ids.resize(n);
    output.assign(n, head);
    output[n - 1] = head || probe;
    for (int32_t i = 0; i < n; ++i) {
        ids[i]       = tokens[i]->id;
        pos[i]       = tokens[i]->pos;
        seq[i]       = tokens[i]->seq;
        seq_ptr[i]   = &seq[i];
        carry_ids[i] = tokens[i]->carry;
    }

    const llama_batch batch = {n, ids.data(), nullptr, pos.data(), n_seq.data(), seq_ptr.data(), output.data()};

    llama_window_params params = {};
    params.il_begin            = il_begin;
    params.il_end              = il_end;
    params.head                = head;
    params.carry               = carry;
    params.carry_ids           = carry_ids.data();
    if (probe) {
        params.probe_v = probe->v;
        params.probe_u = probe->u;
        params.probe_b = probe->b;
        params.probe_w = rows ? head_->rows() : head_->lens();
        params.rows    = rows;
        params.n_rows  = n_rows;
    }

    switch (llama_decode_window(ctx, batch, &params)) {
        case 0: break;
        case 1:
            throw error(SPECEE_ERR_CONTEXT_FULL,
                        "the context of " + std::to_string(llama_n_ctx(ctx)) + " tokens is full");
        case -2:
            throw error(SPECEE_ERR_NO_MEMORY, "no memory for the layers " + std::to_string(il_begin) + " to " +
                                                  std::to_string(il_end) + " of " + std::to_string(n) + " tokens");
        default:
            throw error(SPECEE_ERR_COMPUTE, "the layers " + std::to_string(il_begin) + " to " + std::to_string(il_end) +
                                                " could not be computed");
    }

    for (int32_t i = 0; i < n; ++i) {
        tokens[i]->depth = il_end;
    }
}

void window_runner::layers(flight * const * tokens, int32_t n, int32_t il_end) {
    run(tokens, n, tokens[0]->depth, il_end, false, nullptr, nullptr, 0);
}

const float * window_runner::layers_lens(flight * const * tokens, int32_t n, size_t i_probe) {
    const translator & probe = translators[i_probe];
    run(tokens, n, tokens[0]->depth, probe.layer, false, &probe, nullptr, head_->lens()->ne[1]);
    return llama_get_window_probe(ctx);
}

const float * window_runner::layers_probe(flight * const * tokens, int32_t n, size_t i_probe, const int32_t * rows,
                                          int32_t k) {
    const translator & probe = translators[i_probe];
    run(tokens, n, tokens[0]->depth, probe.layer, false, &probe, rows, k);
    return llama_get_window_probe(ctx);
}

void window_runner::logits(flight * const * tokens, int32_t n) {
    run(tokens, n, n_layer_, n_layer_, true, nullptr, nullptr, 0);
}

void window_runner::state(const flight & token, float * out) const {
    ggml_backend_tensor_get(carry, out, token.carry * carry->nb[1], carry->nb[1]);
}

int32_t window_runner::max_exact_rows(int32_t n_max) {
    const int32_t         n_vocab = llama_vocab_n_tokens(llama_model_get_vocab(llama_get_model(ctx)));
    const llama_memory_t  memory  = llama_get_memory(ctx);
    std::vector<flight>   flights(n_max);
    std::vector<flight *> tokens(n_max);
    std::vector<float>    alone;   // [n_max, n_vocab]

    const auto start = [&] {
        llama_memory_clear(memory, false);
        for (int32_t i = 0; i < n_max; ++i) {
            flights[i] = {static_cast<llama_token>(i * 97 % n_vocab), i, 0, i, 0};
            tokens[i]  = &flights[i];
        }
    };

    start();
    for (int32_t i = 0; i < n_max; ++i) {
        layers(&tokens[i], 1, n_layer_);
        logits(&tokens[i], 1);
        const float * row = llama_get_logits_ith(ctx, 0);
        alone.insert(alone.end(), row, row + n_vocab);
    }

    int32_t n = n_max;
    for (; n > 1; --n) {
        start();
        layers(tokens.data(), n, n_layer_);
        logits(tokens.data(), n);
        if (memcmp(llama_get_logits_ith(ctx, 0), alone.data(), sizeof(float) * n * n_vocab) == 0) {
            break;
        }
    }
    llama_memory_clear(memory, false);
    return n;
}

double window_runner::measure_probe(size_t i_probe, bool lens) {
    using clock = std::chrono::steady_clock;

    const translator &         probe = translators[i_probe];
    flight                     none  = {0, 0, 0, 0, probe.layer};
    flight *                   token = &none;
    const std::vector<int32_t> rows(k_, 0);

    double best = 1e9;
    for (int i = 0; i < 4; ++i) { // the first one builds the graph
        const auto start = clock::now();
        run(&token, 1, probe.layer, probe.layer, false, &probe, lens ? nullptr : rows.data(),
            lens ? head_->lens()->ne[1] : k_);
        best = std::min(best, std::chrono::duration<double>(clock::now() - start).count());
    }
    return best;
}

} // namespace specee
