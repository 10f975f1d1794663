// The random models of the other tests: they load, repeat exactly, depend on what they should, and do not degenerate.
#include "random_model.h"

#include "check.h"
#include "llama.h"

#include <algorithm>
#include <memory>
#include <set>
#include <stdexcept>

using namespace specee_test;

struct loaded {
    std::unique_ptr<llama_model, void (*)(llama_model *)>     model;
    std::unique_ptr<llama_context, void (*)(llama_context *)> ctx;

    explicit loaded(const std::string & path) : model(nullptr, llama_model_free), ctx(nullptr, llama_free) {
        model.reset(llama_model_load_from_file(path.c_str(), llama_model_default_params()));
        if (!model) {
            throw std::runtime_error("llama.cpp does not load " + path);
        }
        llama_context_params params = llama_context_default_params();
        params.n_ctx                = 256;
        params.n_threads            = 2;
        params.n_threads_batch      = 2;
        ctx.reset(llama_init_from_model(model.get(), params));
        if (!ctx) {
            throw std::runtime_error("llama.cpp makes no context for " + path);
        }
    }

    // Logits of the last token. [n_vocab]
    std::vector<float> decode(std::vector<llama_token> tokens) {
        if (llama_decode(ctx.get(), llama_batch_get_one(tokens.data(), static_cast<int32_t>(tokens.size()))) != 0) {
            throw std::runtime_error("llama_decode failed");
        }
        const float * logits = llama_get_logits_ith(ctx.get(), -1);
        return std::vector<float>(logits, logits + llama_vocab_n_tokens(llama_model_get_vocab(model.get())));
    }

    std::vector<llama_token> greedy(const std::vector<llama_token> & prompt, int n) {
        std::vector<llama_token> out;
        std::vector<float>       logits = decode(prompt);
        for (int i = 0; i < n; ++i) {
            out.push_back(static_cast<llama_token>(std::max_element(logits.begin(), logits.end()) - logits.begin()));
            logits = decode({out.back()});
        }
        return out;
    }
};

static const std::vector<llama_token> PROMPT = {1, 300, 301, 302, 17, 411};

static void test_not_degenerate(const random_model_spec & spec) {
    temporary_dir                  dir;
    loaded                         m(random_model_write(dir / "m.gguf", spec));
    const std::vector<llama_token> text   = m.greedy(PROMPT, 64);
    const std::vector<float>       logits = m.decode({5});
    const std::set<llama_token>    distinct(text.begin(), text.end());
    CHECK_EQ(logits.size(), static_cast<size_t>(spec.n_vocab));
    CHECK_EQ(llama_model_n_layer(m.model.get()), spec.n_layer);
    if (distinct.size() < 10) {
        std::fprintf(stderr, "%s, tied %d, type %s: only %zu distinct tokens\n", spec.arch.c_str(), spec.tied,
                     ggml_type_name(spec.type), distinct.size());
    }
    CHECK(distinct.size() >= 10);

    float sum = 0.0f, square = 0.0f;
    for (const float l : logits) {
        sum += l;
        square += l * l;
    }
    const float n         = static_cast<float>(logits.size());
    const float deviation = std::sqrt(square / n - sum / n * (sum / n));
    CHECK(deviation > 0.3f && deviation < 30.0f);
}

static void test_variants() {
    for (const char * arch : {"llama", "qwen2"}) {
        for (const bool tied : {false, true}) {
            for (const ggml_type type :
                 {GGML_TYPE_F32, GGML_TYPE_F16, GGML_TYPE_Q4_0, GGML_TYPE_Q4_1, GGML_TYPE_Q8_0}) {
                random_model_spec spec;
                spec.arch = arch;
                spec.tied = tied;
                spec.type = type;
                test_not_degenerate(spec);
            }
        }
    }
}

static void test_deep_and_k_quants() {
    for (const int32_t n_layer : {1, 30, 40}) {
        random_model_spec spec;
        spec.n_layer = n_layer;
        spec.type    = GGML_TYPE_Q8_0;
        test_not_degenerate(spec);
    }
    random_model_spec spec;
    spec.n_embd = 256;
    spec.n_head = 8;
    spec.n_ff   = 512;
    spec.type   = GGML_TYPE_Q4_K;
    test_not_degenerate(spec);
}

static void test_same_file_again() {
    temporary_dir     dir;
    random_model_spec spec;
    spec.type = GGML_TYPE_Q4_0;
    random_model_write(dir / "a.gguf", spec);
    random_model_write(dir / "b.gguf", spec);
    const std::string a = read_text(dir / "a.gguf");
    CHECK(a == read_text(dir / "b.gguf"));
    CHECK(a.size() > 100000);
    spec.seed = 2;
    random_model_write(dir / "b.gguf", spec);
    CHECK(a != read_text(dir / "b.gguf"));
}

static uint64_t bytes_hash(const std::string & bytes) { // FNV-1a
    uint64_t h = 0xcbf29ce484222325ull;
    for (const char c : bytes) {
        h = (h ^ static_cast<unsigned char>(c)) * 0x100000001b3ull;
    }
    return h;
}

// The file is the same on every machine, so that a failure seen on one can be looked for on another.
static void test_same_file_everywhere() {
    temporary_dir     dir;
    random_model_spec spec;
    spec.n_layer = 2;
    CHECK_EQ(bytes_hash(read_text(random_model_write(dir / "m.gguf", spec))), 9737115762579344740ull);
}

// Logits repeat exactly in a new context, and the whole text before a token matters to them.
static void test_context_matters() {
    temporary_dir            dir;
    const std::string        path = random_model_write(dir / "m.gguf", {});
    const std::vector<float> a    = loaded(path).decode(PROMPT);
    CHECK(a == loaded(path).decode(PROMPT));
    std::vector<llama_token> other = PROMPT;
    other[1]                       = 310;
    const std::vector<float> b     = loaded(path).decode(other);
    float                    most  = 0.0f;
    for (size_t i = 0; i < a.size(); ++i) {
        most = std::max(most, std::fabs(a[i] - b[i]));
    }
    CHECK(most > 0.1f);
}

static void test_tokenizer() {
    temporary_dir       dir;
    const loaded        m(random_model_write(dir / "m.gguf", {}));
    const llama_vocab * vocab = llama_model_get_vocab(m.model.get());
    llama_token         tokens[16];
    const int32_t       n = llama_tokenize(vocab, "A w300", 6, tokens, 16, /*add_special =*/true, false);
    char                text[64];
    const int32_t n_text = llama_detokenize(vocab, tokens, n, text, sizeof(text), /*remove_special =*/true, false);
    CHECK(n > 1 && tokens[0] == llama_vocab_bos(vocab));
    CHECK(n_text > 0 && std::string(text, static_cast<size_t>(n_text)).find("A") != std::string::npos);
    CHECK(llama_vocab_is_eog(vocab, 2));
}

static void test_impossible_specs() {
    temporary_dir dir;
    const auto    refuses = [&](void (*change)(random_model_spec &)) {
        random_model_spec spec;
        change(spec);
        try {
            random_model_write(dir / "m.gguf", spec);
        } catch (const std::runtime_error &) {
            return true;
        }
        return false;
    };
    CHECK(refuses([](random_model_spec & s) { s.arch = "gpt2"; }));
    CHECK(refuses([](random_model_spec & s) { s.n_vocab = 100; }));
    CHECK(refuses([](random_model_spec & s) { s.n_head = 3; }));
    CHECK(refuses([](random_model_spec & s) { s.n_head_kv = 3; }));
    CHECK(refuses([](random_model_spec & s) { s.type = GGML_TYPE_Q4_K; })); // blocks of 256
    CHECK(!refuses([](random_model_spec &) {}));
}

int main() {
    llama_log_set([](ggml_log_level, const char *, void *) {}, nullptr);
    return run({{"variants", test_variants},
                {"deep and K-quants", test_deep_and_k_quants},
                {"same file again", test_same_file_again},
                {"same file everywhere", test_same_file_everywhere},
                {"context matters", test_context_matters},
                {"tokenizer", test_tokenizer},
                {"impossible specs", test_impossible_specs}});
}
