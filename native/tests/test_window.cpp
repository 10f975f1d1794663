// Layer windows of the patched library: bit-identical to whole passes, and the depth invariant of every KV slot.

#include "check.h"
#include "llama-ext.h"
#include "llama_test.h"
#include "window.h"

#include <cstring>

using namespace specee_test;
using specee::flight;
using specee::window_runner;

static temporary_dir folder;

static loaded_model & random_model(const std::string & arch, ggml_type type = GGML_TYPE_Q8_0, bool tied = false) {
    static std::map<std::string, std::unique_ptr<loaded_model>> models;
    const std::string                                           name = arch + std::to_string(type) + (tied ? "t" : "");
    if (!models[name]) {
        random_model_spec spec;
        spec.arch    = arch;
        spec.n_layer = 6;
        spec.type    = type;
        spec.tied    = tied;
        models[name] = std::make_unique<loaded_model>(random_model_write(folder / (name + ".gguf"), spec));
    }
    return *models[name];
}

static bool same_bits(const std::vector<float> & a, const std::vector<float> & b) {
    return a.size() == b.size() && memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

// A carry tensor at the address of one that was freed does not get the graph, and so the memory, of that one.
static void a_new_carry_gets_new_graphs() {
    const loaded_model & m   = random_model("llama");
    const auto           ctx = m.context();
    decode(ctx.get(), random_prompt(4, m.n_vocab(), 1));

    std::vector<uint8_t>    memory(2 * ggml_tensor_overhead());
    ggml_backend_buffer_ptr buffers[2];
    const ggml_tensor *     addresses[2];
    for (int32_t i = 0; i < 2; ++i) {
        ggml_context_ptr tensors(ggml_init({memory.size(), memory.data(), true}));
        ggml_tensor *    carry = ggml_new_tensor_2d(tensors.get(), GGML_TYPE_F32, m.n_embd(), 1);
        addresses[i]           = carry;
        buffers[i].reset(ggml_backend_alloc_ctx_tensors_from_buft(tensors.get(), ggml_backend_cpu_buffer_type()));
        ggml_backend_buffer_clear(buffers[i].get(), 0);
        llama_clear_windows(ctx.get());

        llama_memory_seq_rm(llama_get_memory(ctx.get()), 0, 4, -1);
        llama_token         id     = 5;
        llama_pos           pos    = 4;
        int32_t             n_seq  = 1;
        llama_seq_id        seq    = 0;
        llama_seq_id *      seqs   = &seq;
        int8_t              output = 0;
        const int32_t       row    = 0;
        const llama_batch   batch  = {1, &id, nullptr, &pos, &n_seq, &seqs, &output};
        llama_window_params params = {};
        params.il_end              = 2;
        params.carry               = carry;
        params.carry_ids           = &row;
        CHECK(llama_decode_window(ctx.get(), batch, &params) == 0);

        const float * state = static_cast<const float *>(carry->data);
        CHECK(std::any_of(state, state + m.n_embd(), [](float x) { return x != 0; }));
    }
    CHECK(addresses[0] == addresses[1]);
}

// One token through windows cut at random layers gives the bits of a whole pass.
static void windows_equal_whole_passes() {
    for (const char * arch : {"llama", "qwen2"}) {
        const loaded_model & m     = random_model(arch);
        const auto           whole = m.context();
        const auto           cut   = m.context();
        const auto           start = random_prompt(20, m.n_vocab(), 1);
        decode(whole.get(), start);
        decode(cut.get(), start);

        window_runner  windows(cut.get(), nullptr, m.path, 4);
        random_numbers random(7);
        llama_token    token    = 5;
        const int32_t  n_reused = llama_perf_context(cut.get()).n_reused;
        for (int32_t i = 0; i < 64; ++i) {
            decode(whole.get(), {token});

            flight   at        = {token, 20 + i, 0, 1, 0};
            flight * tokens[1] = {&at};
            while (at.depth < m.n_layer()) {
                windows.layers(tokens, 1, at.depth + 1 + static_cast<int32_t>(random.below(m.n_layer() - at.depth)));
            }
            windows.logits(tokens, 1);

            const auto expected = last_logits(whole.get());
            CHECK(same_bits(last_logits(cut.get(), 0), expected));
            token = argmax(expected);
        }
        CHECK(llama_get_n_shallow(cut.get()) == 0);
        CHECK(llama_perf_context(cut.get()).n_reused - n_reused > 64); // graphs are kept, not rebuilt
    }
}

// Tokens that stopped at different layers are completed in one batch and give what whole passes give.
static void completion_equals_whole_passes() {
    for (const char * arch : {"llama", "qwen2"}) {
        const loaded_model & m     = random_model(arch);
        const auto           whole = m.context();
        const auto           cut   = m.context();
        const auto           start = random_prompt(20, m.n_vocab(), 2);
        const auto           more  = random_prompt(3, m.n_vocab(), 3);
        decode(whole.get(), start);
        decode(cut.get(), start);

        window_runner       windows(cut.get(), nullptr, m.path, 4);
        std::vector<flight> at;
        for (int32_t i = 0; i < 3; ++i) {
            at.push_back({more[i], 20 + i, 0, i, 0});
        }
        flight * a = &at[0];
        flight * b = &at[1];
        flight * c = &at[2];
        // depths 4, 2, 2 are allowed: a later token is never deeper than an earlier one
        windows.layers(&a, 1, 4);
        windows.layers(&b, 1, 2);
        windows.layers(&c, 1, 2);
        CHECK_EQ(llama_get_n_shallow(cut.get()), 3u);
        flight * two[2] = {b, c};
        windows.layers(two, 2, 4);
        flight * all[3] = {a, b, c};
        windows.layers(all, 3, m.n_layer());
        CHECK_EQ(llama_get_n_shallow(cut.get()), 0u);
        windows.logits(all, 3);

        for (int32_t i = 0; i < 3; ++i) {
            const auto got = last_logits(cut.get(), i);
            decode(whole.get(), {more[i]});
            CHECK(max_difference(got, last_logits(whole.get())) < 1e-3f);
        }
        // and the KV cache is what whole passes have written
        decode(whole.get(), {9});
        decode(cut.get(), {9});
        CHECK(max_difference(last_logits(cut.get()), last_logits(whole.get())) < 1e-3f);
    }
}

static int32_t try_window(window_runner & windows, std::vector<flight *> tokens, int32_t il_end) {
    try {
        windows.layers(tokens.data(), static_cast<int32_t>(tokens.size()), il_end);
        return 0;
    } catch (const specee::error & err) {
        return err.status;
    }
}

// Nothing may attend to a slot that is not deep enough, and every way out of the cache keeps the count right.
static void depth_is_kept() {
    const loaded_model & m   = random_model("llama");
    const auto           ctx = m.context(256, 2);
    llama_memory_t       mem = llama_get_memory(ctx.get());
    decode(ctx.get(), random_prompt(8, m.n_vocab(), 4));

    window_runner windows(ctx.get(), nullptr, m.path, 4);
    flight        a = {11, 8, 0, 0, 0};
    flight        b = {12, 9, 0, 1, 0};
    windows.layers(std::vector<flight *>{&a}.data(), 1, 3);
    windows.layers(std::vector<flight *>{&b}.data(), 1, 3);

    // b alone may not go deeper than a, and whole passes must wait
    CHECK_EQ(try_window(windows, {&b}, 5), (int32_t)SPECEE_ERR_COMPUTE);
    CHECK_EQ(b.depth, 3);
    llama_token next = 13;
    CHECK(llama_decode(ctx.get(), llama_batch_get_one(&next, 1)) != 0);
    // a token that is not where it says it is
    flight wrong = b;
    wrong.depth  = 2;
    CHECK_EQ(try_window(windows, {&wrong}, 3), (int32_t)SPECEE_ERR_COMPUTE);
    // such a state is not saved
    CHECK_EQ(llama_state_seq_get_size(ctx.get(), 0), 0u);

    // copied to another sequence, then dropped from the first: the slots live on and are still shallow
    llama_memory_seq_cp(mem, 0, 1, -1, -1);
    llama_memory_seq_rm(mem, 0, 9, -1);
    CHECK_EQ(llama_get_n_shallow(ctx.get()), 2u);
    b.seq = 1;
    a.seq = 1;
    CHECK_EQ(try_window(windows, {&a, &b}, m.n_layer()), 0);
    CHECK_EQ(llama_get_n_shallow(ctx.get()), 0u);

    // removed, cleared and shifted away
    flight c = {14, 10, 1, 0, 0};
    windows.layers(std::vector<flight *>{&c}.data(), 1, 2);
    CHECK_EQ(llama_get_n_shallow(ctx.get()), 1u);
    llama_memory_seq_rm(mem, 1, 10, -1);
    CHECK_EQ(llama_get_n_shallow(ctx.get()), 0u);
    c.depth = 0;
    windows.layers(std::vector<flight *>{&c}.data(), 1, 2);
    llama_memory_seq_keep(mem, 0);
    CHECK_EQ(llama_get_n_shallow(ctx.get()), 0u);
    flight d = {15, 9, 0, 0, 0};
    windows.layers(std::vector<flight *>{&d}.data(), 1, 2);
    llama_memory_seq_add(mem, 0, 0, -1, -20);
    CHECK_EQ(llama_get_n_shallow(ctx.get()), 0u);
    decode(ctx.get(), random_prompt(4, m.n_vocab(), 5));
    flight e = {15, 4, 0, 0, 0};
    windows.layers(std::vector<flight *>{&e}.data(), 1, 2);
    llama_memory_clear(mem, false);
    CHECK_EQ(llama_get_n_shallow(ctx.get()), 0u);
}

// Shifting positions while a token waits: its lower K are rotated, its upper ones are computed at the new position.
static void shift_while_pending() {
    const loaded_model & m     = random_model("llama", GGML_TYPE_F32);
    const auto           whole = m.context();
    const auto           cut   = m.context();
    const auto           start = random_prompt(12, m.n_vocab(), 6);
    for (llama_context * ctx : {whole.get(), cut.get()}) {
        decode(ctx, start);
    }
    decode(whole.get(), {21});

    window_runner windows(cut.get(), nullptr, m.path, 2);
    flight        at        = {21, 12, 0, 0, 0};
    flight *      tokens[1] = {&at};
    windows.layers(tokens, 1, 3);

    for (llama_context * ctx : {whole.get(), cut.get()}) {
        llama_memory_seq_rm(llama_get_memory(ctx), 0, 2, 6);
        llama_memory_seq_add(llama_get_memory(ctx), 0, 6, -1, -4);
    }
    CHECK_ERROR(windows.layers(tokens, 1, m.n_layer()), SPECEE_ERR_COMPUTE, "could not be computed"); // moved
    at.pos -= 4;
    windows.layers(tokens, 1, m.n_layer());

    // The whole context has the upper K/V of before the removal; only layer 0 depends on nothing that was removed. So
    // compare what must be equal: the next token sees the same number of slots, at full depth, with finite logits.
    decode(cut.get(), {22});
    decode(whole.get(), {22});
    const auto got = last_logits(cut.get());
    CHECK(std::all_of(got.begin(), got.end(), [](float v) { return std::isfinite(v); }));
    CHECK_EQ(llama_memory_seq_pos_max(llama_get_memory(cut.get()), 0),
             llama_memory_seq_pos_max(llama_get_memory(whole.get()), 0));
}

static void impossible_windows_are_refused() {
    const loaded_model & m   = random_model("llama");
    const auto           ctx = m.context(256);
    window_runner        windows(ctx.get(), nullptr, m.path, 2);
    decode(ctx.get(), {5});

    flight   at        = {6, 1, 0, 0, 0};
    flight * tokens[1] = {&at};
    CHECK_ERROR(windows.layers(tokens, 1, m.n_layer() + 1), SPECEE_ERR_COMPUTE, "could not be computed");
    CHECK_ERROR(windows.layers(tokens, 1, 0), SPECEE_ERR_COMPUTE, "could not be computed");
    at.carry = 2;
    CHECK_ERROR(windows.layers(tokens, 1, 1), SPECEE_ERR_COMPUTE, "could not be computed");
    at.carry = 0;
    at.seq   = 1;
    CHECK_ERROR(windows.layers(tokens, 1, 1), SPECEE_ERR_COMPUTE, "could not be computed");
    at.seq = 0;
    at.pos = 5; // not the next position
    CHECK_ERROR(windows.layers(tokens, 1, 1), SPECEE_ERR_COMPUTE, "could not be computed");
    CHECK_EQ(llama_get_n_shallow(ctx.get()), 0u);

    // no slot left
    decode(ctx.get(), random_prompt(255, m.n_vocab(), 1));
    at.pos = 256;
    CHECK_ERROR(windows.layers(tokens, 1, 1), SPECEE_ERR_CONTEXT_FULL, "256 tokens is full");
}

int main() {
    return run({
        {"a new carry gets new graphs", a_new_carry_gets_new_graphs},
        {"windows equal whole passes", windows_equal_whole_passes},
        {"completion equals whole passes", completion_equals_whole_passes},
        {"depth is kept", depth_is_kept},
        {"shift while pending", shift_while_pending},
        {"impossible windows are refused", impossible_windows_are_refused},
    });
}
