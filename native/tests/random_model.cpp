#include "random_model.h"

#include "check.h"
#include "gguf.h"

#include <cmath>
#include <memory>
#include <stdexcept>
#include <vector>

namespace specee_test {

static uint64_t hash(const std::string & text) { // FNV-1a
    uint64_t h = 0xcbf29ce484222325ull;
    for (const char c : text) {
        h = (h ^ static_cast<unsigned char>(c)) * 0x100000001b3ull;
    }
    return h;
}

namespace {

struct gguf_deleter {
    void operator()(gguf_context * ctx) const { gguf_free(ctx); }
};

struct ggml_deleter {
    void operator()(ggml_context * ctx) const { ggml_free(ctx); }
};

class model_writer {
  public:
    explicit model_writer(const random_model_spec & spec) : spec(spec), out(gguf_init_empty()) {
        const int32_t n_tensor = 12 * spec.n_layer + 3;
        meta.reset(ggml_init({static_cast<size_t>(n_tensor) * ggml_tensor_overhead(), nullptr, /*no_alloc =*/true}));
    }

    void write(const std::string & path) {
        hyperparameters();
        tokenizer();
        weights();
        if (!gguf_write_to_file(out.get(), path.c_str(), /*only_meta =*/false)) {
            throw std::runtime_error("cannot write " + path);
        }
    }

  private:
    void hyperparameters() {
        const auto u32 = [this](const char * name, int32_t value) {
            gguf_set_val_u32(out.get(), (spec.arch + "." + name).c_str(), static_cast<uint32_t>(value));
        };
        gguf_set_val_str(out.get(), "general.architecture", spec.arch.c_str());
        gguf_set_val_str(out.get(), "general.name", "random");
        u32("vocab_size", spec.n_vocab);
        u32("context_length", spec.n_ctx_train);
        u32("embedding_length", spec.n_embd);
        u32("block_count", spec.n_layer);
        u32("feed_forward_length", spec.n_ff);
        u32("attention.head_count", spec.n_head);
        u32("attention.head_count_kv", spec.n_head_kv);
        gguf_set_val_f32(out.get(), (spec.arch + ".attention.layer_norm_rms_epsilon").c_str(), 1e-5f);
        gguf_set_val_f32(out.get(), (spec.arch + ".rope.freq_base").c_str(), 10000.0f);
    }

    // Three control tokens, the bytes, and words that nothing but their id tells apart.
    void tokenizer() {
        const int32_t            control = 3, byte = 6, normal = 1, unknown = 2; // as SentencePiece numbers them
        std::vector<std::string> texts = {"<unk>", "<s>", "</s>"};
        std::vector<int32_t>     types = {unknown, control, control};
        std::vector<float>       scores(static_cast<size_t>(spec.n_vocab), 0.0f);
        for (int32_t i = 0; i < 256; ++i) {
            char text[8];
            std::snprintf(text, sizeof(text), "<0x%02X>", static_cast<unsigned>(i));
            texts.push_back(text);
            types.push_back(byte);
        }
        for (int32_t i = 259; i < spec.n_vocab; ++i) {
            texts.push_back("\xe2\x96\x81w" + std::to_string(i)); // U+2581 is SentencePiece's space
            types.push_back(normal);
            scores[static_cast<size_t>(i)] = -static_cast<float>(i);
        }
        std::vector<const char *> pointers;
        for (const std::string & text : texts) {
            pointers.push_back(text.c_str());
        }
        gguf_set_val_str(out.get(), "tokenizer.ggml.model", "llama");
        gguf_set_arr_str(out.get(), "tokenizer.ggml.tokens", pointers.data(), pointers.size());
        gguf_set_arr_data(out.get(), "tokenizer.ggml.scores", GGUF_TYPE_FLOAT32, scores.data(), scores.size());
        gguf_set_arr_data(out.get(), "tokenizer.ggml.token_type", GGUF_TYPE_INT32, types.data(), types.size());
        gguf_set_val_u32(out.get(), "tokenizer.ggml.bos_token_id", 1);
        gguf_set_val_u32(out.get(), "tokenizer.ggml.eos_token_id", 2);
        gguf_set_val_u32(out.get(), "tokenizer.ggml.unknown_token_id", 0);
    }

    // The embedding is small and the layers together add a state of size 2, so that the text before a token, and not
    // the token itself, decides what follows; with a tied head every token would otherwise repeat itself. Queries and
    // keys are large, so that attention picks positions. Logits have a deviation of 2.
    void weights() {
        const int32_t n_kv  = spec.n_embd / spec.n_head * spec.n_head_kv;
        const float   in    = 0.03f;
        const float   embd  = 1.0f / std::sqrt(static_cast<float>(spec.n_embd));
        const float   ff    = 1.0f / std::sqrt(static_cast<float>(spec.n_ff));
        const float   layer = 1.0f / std::sqrt(static_cast<float>(2 * spec.n_layer)); // one layer's share of the state

        matrix("token_embd.weight", spec.n_embd, spec.n_vocab, in);
        if (spec.tied) {
            const float mean = 2.0f * embd / in;
            vector("output_norm.weight", spec.n_embd, 0.1f * mean, mean);
        } else {
            vector("output_norm.weight", spec.n_embd, 0.1f, 1.0f);
            matrix("output.weight", spec.n_embd, spec.n_vocab, 2.0f * embd);
        }
        for (int32_t il = 0; il < spec.n_layer; ++il) {
            const std::string blk = "blk." + std::to_string(il) + ".";
            vector(blk + "attn_norm.weight", spec.n_embd, 0.1f, 1.0f);
            matrix(blk + "attn_q.weight", spec.n_embd, spec.n_embd, 3.0f * embd);
            matrix(blk + "attn_k.weight", spec.n_embd, n_kv, 3.0f * embd);
            matrix(blk + "attn_v.weight", spec.n_embd, n_kv, embd);
            matrix(blk + "attn_output.weight", spec.n_embd, spec.n_embd, 2.5f * layer * embd);
            if (spec.arch == "qwen2") {
                vector(blk + "attn_q.bias", spec.n_embd, 0.5f, 0.0f);
                vector(blk + "attn_k.bias", n_kv, 0.5f, 0.0f);
                vector(blk + "attn_v.bias", n_kv, 0.1f, 0.0f);
            }
            vector(blk + "ffn_norm.weight", spec.n_embd, 0.1f, 1.0f);
            matrix(blk + "ffn_gate.weight", spec.n_embd, spec.n_ff, embd);
            matrix(blk + "ffn_up.weight", spec.n_embd, spec.n_ff, embd);
            matrix(blk + "ffn_down.weight", spec.n_ff, spec.n_embd, 2.5f * layer * ff);
        }
    }

    std::vector<float> numbers(const std::string & name, int64_t n, float scale, float mean) const {
        random_numbers     random(hash(name) ^ spec.seed * 0x9e3779b97f4a7c15ull);
        std::vector<float> values(static_cast<size_t>(n));
        const float        unit = static_cast<float>(scale / random_numbers::NORMAL_DEVIATION);
        for (float & value : values) {
            // exact in double, so that no compiler's fused multiply-add can change the result
            value = static_cast<float>(mean + static_cast<double>(unit) * random.normal_integer());
        }
        return values;
    }

    void vector(const std::string & name, int32_t n, float scale, float mean) {
        ggml_tensor * tensor = ggml_new_tensor_1d(meta.get(), GGML_TYPE_F32, n);
        add(name, tensor, numbers(name, n, scale, mean));
    }

    void matrix(const std::string & name, int32_t n_in, int32_t n_out, float scale) {
        ggml_tensor * tensor = ggml_new_tensor_2d(meta.get(), spec.type, n_in, n_out);
        add(name, tensor, numbers(name, static_cast<int64_t>(n_in) * n_out, scale, 0.0f));
    }

    void add(const std::string & name, ggml_tensor * tensor, const std::vector<float> & values) {
        data.emplace_back(ggml_nbytes(tensor));
        ggml_quantize_chunk(tensor->type, values.data(), data.back().data(), 0, ggml_nrows(tensor), tensor->ne[0],
                            nullptr);
        ggml_set_name(tensor, name.c_str());
        tensor->data = data.back().data();
        gguf_add_tensor(out.get(), tensor);
    }

    random_model_spec                           spec;
    std::unique_ptr<gguf_context, gguf_deleter> out;
    std::unique_ptr<ggml_context, ggml_deleter> meta;
    std::vector<std::vector<uint8_t>>           data; // of the tensors, until they are written
};

} // namespace

static void check_spec(const random_model_spec & spec) {
    const auto need = [](bool ok, const char * what) {
        if (!ok) {
            throw std::runtime_error(std::string("random_model_spec: ") + what);
        }
    };
    const int64_t block = ggml_blck_size(spec.type);
    need(spec.arch == "llama" || spec.arch == "qwen2", "arch must be llama or qwen2");
    need(spec.n_layer > 0 && spec.n_embd > 0 && spec.n_head > 0 && spec.n_head_kv > 0 && spec.n_ff > 0,
         "sizes must be positive");
    need(spec.n_vocab >= 259, "n_vocab must hold the control tokens and the bytes, 259");
    need(spec.n_embd % spec.n_head == 0 && spec.n_embd / spec.n_head % 2 == 0,
         "n_embd must be n_head times an even head size");
    need(spec.n_head % spec.n_head_kv == 0, "n_head must be a multiple of n_head_kv");
    need(spec.n_embd % block == 0 && spec.n_ff % block == 0, "n_embd and n_ff must be multiples of the type's block");
}

std::string random_model_write(const std::string & path, const random_model_spec & spec) {
    check_spec(spec);
    model_writer(spec).write(path);
    return path;
}

} // namespace specee_test
