#include "record.h"

#include "error.h"
#include "llama-cpp.h"
#include "window.h"

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <limits>
#include <memory>
#include <vector>

namespace specee {

namespace {

struct sequence {
    flight            at;       // the newest token
    llama_sampler_ptr sampler;
    int32_t           n_left;   // tokens still to record
    int32_t           prompt_id;
};

// The highest and the second highest logit.
struct top_two {
    int32_t token  = 0;
    float   first  = -std::numeric_limits<float>::infinity();
    float   second = -std::numeric_limits<float>::infinity();

    top_two(const float * logits, int32_t n_vocab) {
        for (int32_t i = 0; i < n_vocab; ++i) {
            if (logits[i] > first) {
                second = first;
                first  = logits[i];
                token  = i;
            } else if (logits[i] > second) {
                second = logits[i];
            }
        }
    }
};

class row_file {
  public:
    explicit row_file(const char * path) : path(path), file(fopen(path, "ab"), fclose) {
        if (!file) {
            throw error(SPECEE_ERR_IO, this->path + ": cannot be opened for writing");
        }
    }

    void write(const std::vector<uint8_t> & row) {
        if (fwrite(row.data(), 1, row.size(), file.get()) != row.size()) {
            fail();
        }
    }

    void flush() {
        if (fflush(file.get()) != 0) {
            fail();
        }
    }

  private:
    [[noreturn]] void fail() { throw error(SPECEE_ERR_IO, path + ": cannot be written; is the disk full?"); }

    std::string                            path;
    std::unique_ptr<FILE, int (*)(FILE *)> file;
};

void check(const llama_context * ctx, const specee_record_params & params) {
    const int32_t n_layer = llama_model_n_layer(llama_get_model(ctx));
    const auto    refuse  = [](const std::string & message) { throw error(SPECEE_ERR_INVALID_ARGUMENT, message); };
    if (!params.layers || params.n_layers < 1 || !params.tokens || !params.n_tokens || !params.path) {
        refuse("recording needs layers, prompts and a path");
    }
    for (int32_t i = 0; i < params.n_layers; ++i) {
        if (params.layers[i] < 1 || params.layers[i] > n_layer || (i > 0 && params.layers[i] <= params.layers[i - 1])) {
            refuse("layers to record must ascend within 1.." + std::to_string(n_layer));
        }
    }
    if (params.n_seq < 1 || params.n_seq > static_cast<int32_t>(llama_n_seq_max(ctx))) {
        refuse("the context holds 1.." + std::to_string(llama_n_seq_max(ctx)) + " sequences, not " +
               std::to_string(params.n_seq));
    }
    if (params.n_predict < 1) {
        refuse("n_predict must be at least 1");
    }
    const int32_t n_vocab = llama_vocab_n_tokens(llama_model_get_vocab(llama_get_model(ctx)));
    int64_t       n_kv    = 0;
    int64_t       i_token = 0;
    for (int32_t s = 0; s < params.n_seq; ++s) {
        if (params.n_tokens[s] < 1) {
            refuse("prompt " + std::to_string(params.prompt_id + s) + " is empty");
        }
        for (int32_t i = 0; i < params.n_tokens[s]; ++i, ++i_token) {
            if (params.tokens[i_token] < 0 || params.tokens[i_token] >= n_vocab) {
                refuse("prompt " + std::to_string(params.prompt_id + s) + " has a token outside of the vocabulary");
            }
        }
        n_kv += params.n_tokens[s] + params.n_predict;
    }
    if (n_kv > llama_n_ctx(ctx)) {
        throw error(SPECEE_ERR_CONTEXT_FULL, "the prompts and their answers take " + std::to_string(n_kv) +
                                                 " tokens; the context has " + std::to_string(llama_n_ctx(ctx)));
    }
}

llama_sampler_ptr make_sampler(const specee_record_params & params, int32_t i_seq) {
    if (params.temperature <= 0) {
        return llama_sampler_ptr(llama_sampler_init_greedy());
    }
    llama_sampler_ptr chain(llama_sampler_chain_init(llama_sampler_chain_default_params()));
    llama_sampler_chain_add(chain.get(), llama_sampler_init_temp(params.temperature));
    llama_sampler_chain_add(chain.get(), llama_sampler_init_dist(params.seed + params.prompt_id + i_seq));
    return chain;
}

// Prefills one prompt and returns its logits' first token.
llama_token prefill(llama_context * ctx, const int32_t * tokens, int32_t n, llama_seq_id seq, llama_sampler * sampler) {
    const int32_t n_chunk_max = llama_n_batch(ctx);
    llama_batch   batch       = llama_batch_init(std::min(n, n_chunk_max), 0, 1);
    const std::unique_ptr<llama_batch, void (*)(llama_batch *)> guard(&batch,
                                                                      [](llama_batch * b) { llama_batch_free(*b); });

    for (int32_t done = 0; done < n; done += batch.n_tokens) {
        batch.n_tokens = std::min(n - done, n_chunk_max);
        for (int32_t i = 0; i < batch.n_tokens; ++i) {
            batch.token[i]     = tokens[done + i];
            batch.pos[i]       = done + i;
            batch.n_seq_id[i]  = 1;
            batch.seq_id[i][0] = seq;
            batch.logits[i]    = done + i == n - 1;
        }
        if (llama_decode(ctx, batch) != 0) {
            throw error(SPECEE_ERR_COMPUTE, "a prompt could not be computed");
        }
    }
    return llama_sampler_sample(sampler, ctx, -1);
}

} // namespace

int64_t record(llama_context * ctx, const specee_record_params & params) {
    check(ctx, params);
    window_runner windows(ctx, nullptr, "", params.n_seq);
    row_file      file(params.path);

    const llama_vocab * vocab   = llama_model_get_vocab(llama_get_model(ctx));
    const int32_t       n_embd  = windows.n_embd();
    const int32_t       n_layer = windows.n_layer();

    llama_memory_clear(llama_get_memory(ctx), false);

    std::vector<sequence> sequences;
    const int32_t *       tokens = params.tokens;
    for (int32_t s = 0; s < params.n_seq; ++s) {
        llama_sampler_ptr sampler = make_sampler(params, s);
        const llama_token first   = prefill(ctx, tokens, params.n_tokens[s], s, sampler.get());
        const flight      at      = {first, params.n_tokens[s], s, s, 0};
        tokens += params.n_tokens[s];
        sequences.push_back(
            {at, std::move(sampler), llama_vocab_is_eog(vocab, first) ? 0 : params.n_predict, params.prompt_id + s});
    }

    const size_t                      head_size = 4 * sizeof(int32_t) + 2 * sizeof(float);
    std::vector<std::vector<uint8_t>> lines(
        params.n_seq, std::vector<uint8_t>(head_size + sizeof(ggml_fp16_t) * n_embd * params.n_layers));
    std::vector<float>    state(n_embd);
    std::vector<flight *> rows;
    int64_t               n_rows = 0;

    while (true) {
        rows.clear();
        for (sequence & seq : sequences) {
            if (seq.n_left > 0) {
                seq.at.depth = 0;
                rows.push_back(&seq.at);
            }
        }
        if (rows.empty()) {
            break;
        }

        for (int32_t l = 0; l < params.n_layers; ++l) {
            windows.layers(rows.data(), rows.size(), params.layers[l]);
            for (const flight * row : rows) {
                windows.state(*row, state.data());
                ggml_fp32_to_fp16_row(state.data(),
                                      reinterpret_cast<ggml_fp16_t *>(lines[row->seq].data() + head_size) + l * n_embd,
                                      n_embd);
            }
        }
        if (rows[0]->depth < n_layer) {
            windows.layers(rows.data(), rows.size(), n_layer);
        }
        windows.logits(rows.data(), rows.size());

        for (size_t i = 0; i < rows.size(); ++i) {
            sequence &    seq = sequences[rows[i]->seq];
            const top_two top(llama_get_logits_ith(ctx, i), llama_vocab_n_tokens(vocab));
            const int32_t ids[4]    = {seq.prompt_id, seq.at.pos, seq.at.id, top.token};
            const float   logits[2] = {top.first, top.second};
            memcpy(lines[seq.at.seq].data(), ids, sizeof(ids));
            memcpy(lines[seq.at.seq].data() + sizeof(ids), logits, sizeof(logits));
            file.write(lines[seq.at.seq]);
            n_rows += 1;

            seq.at.id = llama_sampler_sample(seq.sampler.get(), ctx, i);
            seq.at.pos += 1;
            seq.n_left = llama_vocab_is_eog(vocab, seq.at.id) ? 0 : seq.n_left - 1;
        }
    }
    file.flush();
    llama_memory_clear(llama_get_memory(ctx), false);
    return n_rows;
}

} // namespace specee
