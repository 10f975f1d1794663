// The decode loop on random models: exact is full depth token for token, calibrated leaves a cache of full depth.

#include "bundle_files.h"
#include "check.h"
#include "llama-ext.h"
#include "llama_test.h"
#include "specee.h"

#include <memory>

using namespace specee_test;

static temporary_dir folder;

// Prompts in batches round K and V differently than tokens one by one; a wrong slot changes the logits by more than 1.
static const float noise = 0.1f;

// Tokens that wait in calibrated mode: few enough that the bits of a row do not depend on the size of its batch.
static const int32_t n_pending = 2;

struct session_deleter {
    void operator()(specee_session * session) { specee_session_free(session); }
};

using session_ptr = std::unique_ptr<specee_session, session_deleter>;

static session_ptr open_session(llama_context * ctx, const loaded_model & m, specee_mode mode,
                                const std::string & bundle, int32_t max_pending = n_pending) {
    const std::string     onnxruntime = need_env("SPECEE_TEST_ONNXRUNTIME");
    specee_session_params params      = {};
    params.struct_size                = sizeof(params);
    params.mode                       = mode;
    params.max_pending                = max_pending;
    params.bundle_dir                 = bundle.c_str();
    params.onnxruntime_path           = onnxruntime.c_str();
    params.model_path                 = m.path.c_str();
    specee_session * session          = nullptr;
    if (specee_session_init(ctx, &params, &session) != SPECEE_OK) {
        throw std::runtime_error(specee_last_error());
    }
    return session_ptr(session);
}

static std::vector<llama_token> generate(specee_session * session, const std::vector<llama_token> & prompt, int32_t n,
                                         llama_sampler * sampler = nullptr) {
    CHECK(specee_session_prompt(session, prompt.data(), static_cast<int32_t>(prompt.size())) == SPECEE_OK);
    std::vector<llama_token> text;
    for (int32_t i = 0; i < n; ++i) {
        specee_event event = {};
        if (specee_session_next(session, sampler, &event) != SPECEE_OK) {
            throw std::runtime_error(specee_last_error());
        }
        text.push_back(event.token);
    }
    return text;
}

static specee_stats stats_of(const specee_session * session) {
    specee_stats stats = {};
    stats.struct_size  = sizeof(stats);
    CHECK(specee_session_stats(session, &stats) == SPECEE_OK);
    return stats;
}

static std::string write_model(const std::string & name, const random_model_spec & spec) {
    return random_model_write(folder / name, spec);
}

static std::string write_bundle(const std::string & name, const loaded_model & m, const std::string & arch,
                                const std::vector<int32_t> & layers, float p = 0) {
    bundle_files files(arch, m.n_layer(), m.n_embd(), m.n_vocab(), layers);
    if (p > 0) {
        files.set_constant(p);
    }
    return files.write(folder / name);
}

// Random predictors, so that exits happen anywhere and are mostly wrong: verification has everything to do.
static void exact_equals_full_depth() {
    struct test_case {
        const char * arch;
        int32_t      n_layer;
        int32_t      n_prompt;
        int32_t      n_token;
        bool         tied;
        ggml_type    type;
    };

    const std::vector<test_case> cases = {
        {"llama", 30, 40, 96, true, GGML_TYPE_Q8_0},    // the embedding's rows in place
        {"llama", 40, 40, 96, false, GGML_TYPE_Q4_0},   // a repacked head: its rows come from the file
        {"qwen2", 12, 1500, 64, false, GGML_TYPE_Q8_0}, // a prompt of many ubatches
        {"llama", 30, 1500, 64, false, GGML_TYPE_Q4_1},
    };
    for (size_t i = 0; i < cases.size(); ++i) {
        const test_case & c = cases[i];
        random_model_spec spec;
        spec.arch    = c.arch;
        spec.n_layer = c.n_layer;
        spec.tied    = c.tied;
        spec.type    = c.type;
        const loaded_model m(write_model("exact" + std::to_string(i) + ".gguf", spec));
        const int32_t      l = c.n_layer;
        const std::string  bundle =
            write_bundle("exact" + std::to_string(i) + ".specee", m, c.arch, {l / 2, l * 2 / 3, l - 3, l - 1});

        const auto prompt = random_prompt(c.n_prompt, m.n_vocab(), i);
        const auto plain  = m.context(2048);
        const auto expect = specee_test::generate(plain.get(), prompt, c.n_token);
        const auto ctx    = m.context(2048);
        for (const int32_t max_pending : {1, 2, 7}) { // 7: the session finds out how many rows keep their bits
            const session_ptr session = open_session(ctx.get(), m, SPECEE_MODE_EXACT, bundle, max_pending);
            const auto        text    = generate(session.get(), prompt, c.n_token);
            const size_t      n_same  = std::mismatch(text.begin(), text.end(), expect.begin()).first - text.begin();
            CHECK_EQ(n_same, expect.size());
            const specee_stats stats = stats_of(session.get());
            CHECK(stats.n_refuted > 0);
            CHECK(stats.n_evaluated > 0);
            CHECK_EQ(stats.n_token, (int64_t)c.n_token);
        }
    }
}

// A model whose upper layers do nothing is decided after the first one: every exit is right and confirmed.
static void confirmed_exits_are_counted() {
    random_model_spec spec;
    spec.type    = GGML_TYPE_Q8_0;
    spec.n_layer = 8;
    const loaded_model m(write_model("confirmed.gguf", spec));
    bundle_files       files("llama", m.n_layer(), m.n_embd(), m.n_vocab(), {7});
    files.set_constant(0.9f);
    for (auto & item : files.translators) { // the raw lens
        std::fill(item.second.data.begin(), item.second.data.end(), '\0');
    }
    const std::string bundle = files.write(folder / "confirmed.specee");

    const auto        prompt  = random_prompt(10, m.n_vocab(), 3);
    const auto        plain   = m.context();
    const auto        expect  = specee_test::generate(plain.get(), prompt, 128);
    const auto        ctx     = m.context();
    const session_ptr session = open_session(ctx.get(), m, SPECEE_MODE_EXACT, bundle);
    CHECK(generate(session.get(), prompt, 128) == expect);

    const specee_stats stats = stats_of(session.get());
    CHECK(stats.n_exit > 0);    // the last layer changes little
    CHECK(stats.n_refuted > 0); // but something
    CHECK(stats.n_pass < 127);  // several tokens a pass
    std::vector<int64_t> histogram(m.n_layer() + 1);
    CHECK(specee_session_histogram(session.get(), histogram.data(), m.n_layer() + 1) == SPECEE_OK);
    CHECK_EQ(histogram[7], stats.n_exit);
    CHECK_EQ(histogram[7] + histogram[8], 128);
    CHECK_EQ(stats.n_layer_sum, histogram[7] * 7 + histogram[8] * 8);
}

// An exit of calibrated mode is final, yet the cache holds what full depth writes for the same text.
static void calibrated_completes_the_cache() {
    random_model_spec spec;
    spec.type    = GGML_TYPE_Q8_0;
    spec.n_layer = 10;
    const loaded_model m(write_model("calibrated.gguf", spec));
    const std::string  bundle = write_bundle("calibrated.specee", m, "llama", {4, 6, 8});
    const auto         prompt = random_prompt(30, m.n_vocab(), 4);

    const auto        ctx     = m.context();
    const session_ptr session = open_session(ctx.get(), m, SPECEE_MODE_CALIBRATED, bundle);
    const auto        text    = generate(session.get(), prompt, 80);
    CHECK(stats_of(session.get()).n_exit > 0);
    CHECK(stats_of(session.get()).n_exit < 80);
    CHECK(specee_session_complete(session.get()) == SPECEE_OK);
    CHECK_EQ(llama_get_n_shallow(ctx.get()), 0u);

    const auto plain = m.context();
    decode(plain.get(), prompt);
    for (size_t i = 0; i + 1 < text.size(); ++i) {
        decode(plain.get(), {text[i]});
    }
    const std::vector<llama_token> probe = {42};
    CHECK(specee_session_prompt(session.get(), probe.data(), 1) == SPECEE_OK);
    decode(plain.get(), {text.back(), 42});
    CHECK_EQ(max_difference(last_logits(ctx.get()), last_logits(plain.get())), 0.0f);
}

// The same seed gives the same text as full depth, whatever the sampler keeps in its state.
static void exact_samples_like_full_depth() {
    random_model_spec spec;
    spec.type    = GGML_TYPE_Q8_0;
    spec.n_layer = 10;
    const loaded_model m(write_model("sampling.gguf", spec));
    const std::string  bundle = write_bundle("sampling.specee", m, "llama", {5, 9});
    const auto         prompt = random_prompt(20, m.n_vocab(), 5);

    const auto chain = [&] {
        llama_sampler_ptr sampler(llama_sampler_chain_init(llama_sampler_chain_default_params()));
        llama_sampler_chain_add(sampler.get(), llama_sampler_init_penalties(m.n_vocab(), 32, 1.2f, 0.1f, 0.1f));
        llama_sampler_chain_add(sampler.get(), llama_sampler_init_top_k(40));
        llama_sampler_chain_add(sampler.get(), llama_sampler_init_top_p(0.95f, 1));
        llama_sampler_chain_add(sampler.get(), llama_sampler_init_temp(0.8f));
        llama_sampler_chain_add(sampler.get(), llama_sampler_init_dist(1234));
        return sampler;
    };

    std::vector<std::vector<llama_token>> texts;
    for (const specee_mode mode : {SPECEE_MODE_OFF, SPECEE_MODE_EXACT}) {
        const auto        ctx     = m.context();
        const session_ptr session = open_session(ctx.get(), m, mode, bundle);
        texts.push_back(generate(session.get(), prompt, 100, chain().get()));
    }
    CHECK(texts[0] == texts[1]);
}

// Rewinding to any point, in any mode, continues as if the dropped part had never been.
static void rewind_forgets() {
    random_model_spec spec;
    spec.type    = GGML_TYPE_Q8_0;
    spec.n_layer = 8;
    const loaded_model m(write_model("rewind.gguf", spec));
    const std::string  bundle = write_bundle("rewind.specee", m, "llama", {4, 6});
    random_numbers     random(9);

    for (const specee_mode mode : {SPECEE_MODE_OFF, SPECEE_MODE_EXACT, SPECEE_MODE_CALIBRATED}) {
        const auto               ctx     = m.context();
        const session_ptr        session = open_session(ctx.get(), m, mode, bundle);
        std::vector<llama_token> text;
        for (int32_t round = 0; round < 20; ++round) {
            const auto prompt = random_prompt(1 + static_cast<int32_t>(random.below(9)), m.n_vocab(), round);
            const auto answer = generate(session.get(), prompt, static_cast<int32_t>(random.below(12)));
            text.insert(text.end(), prompt.begin(), prompt.end());
            text.insert(text.end(), answer.begin(), answer.end());
            CHECK_EQ(specee_session_n_token(session.get()), (int32_t)text.size());

            text.resize(random.below(text.size() + 1));
            CHECK(specee_session_rewind(session.get(), static_cast<int32_t>(text.size())) == SPECEE_OK);
        }
        text.push_back(17);
        CHECK(specee_session_prompt(session.get(), &text.back(), 1) == SPECEE_OK);
        const auto plain = m.context();
        decode(plain.get(), text);
        CHECK_NEAR(max_difference(last_logits(ctx.get()), last_logits(plain.get())), 0.0f, noise);
        CHECK_EQ(llama_get_n_shallow(ctx.get()), 0u);
    }
}

static void the_context_ends() {
    random_model_spec spec;
    spec.type    = GGML_TYPE_Q8_0;
    spec.n_layer = 6;
    const loaded_model m(write_model("end.gguf", spec));
    const std::string  bundle = write_bundle("end.specee", m, "llama", {3, 5}, 0.99f);
    const auto         prompt = random_prompt(200, m.n_vocab(), 5);
    const auto         plain  = m.context(256);
    const auto         expect = specee_test::generate(plain.get(), prompt, 57);

    for (const specee_mode mode : {SPECEE_MODE_OFF, SPECEE_MODE_EXACT, SPECEE_MODE_CALIBRATED}) {
        const auto        ctx     = m.context(256);
        const session_ptr session = open_session(ctx.get(), m, mode, bundle);
        const auto        text    = generate(session.get(), prompt, 57); // the last one has no slot
        CHECK(mode == SPECEE_MODE_CALIBRATED || text == expect);
        specee_event event = {};
        CHECK_EQ(specee_session_next(session.get(), nullptr, &event), SPECEE_ERR_CONTEXT_FULL);
        CHECK(std::string(specee_last_error()).find("256") != std::string::npos);
        CHECK_EQ(specee_session_prompt(session.get(), prompt.data(), 1), SPECEE_ERR_CONTEXT_FULL);
        CHECK_EQ(specee_session_n_token(session.get()), 257);
        CHECK(specee_session_rewind(session.get(), 100) == SPECEE_OK);
        CHECK(specee_session_prompt(session.get(), prompt.data(), 50) == SPECEE_OK);
        CHECK(specee_session_next(session.get(), nullptr, &event) == SPECEE_OK);
    }
}

// Resident memory of this process in bytes, 0 where /proc does not tell.
static int64_t resident_bytes() {
    std::ifstream statm("/proc/self/statm");
    int64_t       pages = 0, resident = 0;
    statm >> pages >> resident;
    return resident * 4096;
}

// What 2,000 tokens need is there after the first 2,000: graphs, buffers and histories do not pile up.
static void memory_does_not_grow() {
    random_model_spec spec;
    spec.type    = GGML_TYPE_Q8_0;
    spec.n_layer = 6;
#ifdef __SANITIZE_ADDRESS__
    const int32_t n_token = 50; // the sanitizer keeps freed memory; only see that nothing is wrong with it
#else
    const int32_t n_token = 2000;
#endif
    const loaded_model m(write_model("memory.gguf", spec));
    const std::string  bundle = write_bundle("memory.specee", m, "llama", {3, 5});
    const auto         prompt = random_prompt(10, m.n_vocab(), 6);

    for (const specee_mode mode : {SPECEE_MODE_EXACT, SPECEE_MODE_CALIBRATED}) {
        const auto        ctx     = m.context(2304);
        const session_ptr session = open_session(ctx.get(), m, mode, bundle);
        generate(session.get(), prompt, n_token);
        const int64_t before = resident_bytes();
        CHECK(specee_session_rewind(session.get(), 0) == SPECEE_OK);
        generate(session.get(), prompt, n_token);
        CHECK(n_token < 2000 || resident_bytes() - before < 1 << 20);
    }
}

static void bad_input_is_refused() {
    random_model_spec spec;
    spec.type    = GGML_TYPE_Q8_0;
    spec.n_layer = 6;
    const loaded_model    m(write_model("bad.gguf", spec));
    const auto            ctx         = m.context(64);
    const std::string     bundle      = write_bundle("bad.specee", m, "llama", {3});
    const std::string     onnxruntime = need_env("SPECEE_TEST_ONNXRUNTIME");
    const std::string     other       = bundle_files("llama", 6, 96, m.n_vocab(), {3}).write(folder / "other.specee");
    specee_session *      session     = nullptr;
    specee_session_params params      = {};
    params.struct_size                = sizeof(params);
    params.mode                       = SPECEE_MODE_EXACT;
    params.bundle_dir                 = bundle.c_str();
    params.onnxruntime_path           = onnxruntime.c_str();
    params.model_path                 = m.path.c_str();

    const auto refused = [&](specee_session_params p, specee_status status, const std::string & text) {
        const specee_status got = specee_session_init(ctx.get(), &p, &session);
        CHECK_EQ((int)got, (int)status);
        CHECK(std::string(specee_last_error()).find(text) != std::string::npos);
        CHECK(std::string(specee_last_error()).find('\n') == std::string::npos);
    };

    specee_session_params p = params;
    p.mode                  = 7;
    refused(p, SPECEE_ERR_INVALID_ARGUMENT, "mode 7");
    p             = params;
    p.max_pending = -1;
    refused(p, SPECEE_ERR_INVALID_ARGUMENT, "max_pending");
    p            = params;
    p.bundle_dir = other.c_str();
    refused(p, SPECEE_ERR_BUNDLE_MODEL, "another model");
    p            = params;
    p.bundle_dir = "/nowhere/at.all";
    refused(p, SPECEE_ERR_BUNDLE, "/nowhere/at.all");
    p                  = params;
    p.onnxruntime_path = "/nowhere/libonnxruntime.so";
    refused(p, SPECEE_ERR_ONNX, "/nowhere/libonnxruntime.so");
    p            = params;
    p.bundle_dir = nullptr;
    refused(p, SPECEE_ERR_INVALID_ARGUMENT, "bundle");
    CHECK_EQ(specee_session_init(nullptr, &params, &session), SPECEE_ERR_INVALID_ARGUMENT);

    CHECK(specee_session_init(ctx.get(), &params, &session) == SPECEE_OK);
    const session_ptr owner(session);
    specee_event      event = {};
    CHECK_EQ(specee_session_next(session, nullptr, &event), SPECEE_ERR_INVALID_ARGUMENT);
    const int32_t tokens[2] = {5, 1 << 20};
    CHECK_EQ(specee_session_prompt(session, tokens, 2), SPECEE_ERR_INVALID_ARGUMENT);
    CHECK_EQ(specee_session_prompt(session, tokens, 0), SPECEE_ERR_INVALID_ARGUMENT);
    CHECK_EQ(specee_session_rewind(session, 1), SPECEE_ERR_INVALID_ARGUMENT);
    CHECK(specee_session_prompt(session, tokens, 1) == SPECEE_OK);
    CHECK(specee_session_next(session, nullptr, &event) == SPECEE_OK);
    CHECK_EQ(std::string(specee_last_error()).size(), 0u);
}

int main() {
    return run({
        {"exact equals full depth", exact_equals_full_depth},
        {"confirmed exits are counted", confirmed_exits_are_counted},
        {"calibrated completes the cache", calibrated_completes_the_cache},
        {"exact samples like full depth", exact_samples_like_full_depth},
        {"rewind forgets", rewind_forgets},
        {"the context ends", the_context_ends},
        {"memory does not grow", memory_does_not_grow},
        {"bad input is refused", bad_input_is_refused},
    });
}
