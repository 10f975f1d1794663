#include "session.h"

#include "error.h"
#include "llama.h"

#include <algorithm>
#include <chrono>
#include <cmath>

namespace specee {

namespace {

// Adds the seconds of its scope to a counter.
class stopwatch {
  public:
    explicit stopwatch(double & total_s) : total_s(total_s), start(clock::now()) {}
    ~stopwatch() { total_s += std::chrono::duration<double>(clock::now() - start).count(); }

    stopwatch(const stopwatch &)             = delete;
    stopwatch & operator=(const stopwatch &) = delete;

  private:
    using clock = std::chrono::steady_clock;

    double &                total_s;
    const clock::time_point start;
};

std::vector<float> pick_thresholds(const bundle & from, int32_t mode) {
    std::vector<float> thresholds;
    for (const probe_spec & probe : from.probes) {
        thresholds.push_back(mode == SPECEE_MODE_EXACT ? probe.threshold_exact : probe.threshold_calibrated);
    }
    return thresholds;
}

// The first of the highest logits. Eight running maxima let the compiler use its vector instructions; over a large
// vocabulary a plain loop costs percents of a token.
llama_token argmax(const float * logits, int32_t n_vocab) {
    float   top[8];
    int32_t i = 0;
    std::fill_n(top, 8, -INFINITY);
    for (; i + 8 <= n_vocab; i += 8) {
        for (int32_t j = 0; j < 8; ++j) {
            top[j] = logits[i + j] > top[j] ? logits[i + j] : top[j];
        }
    }
    float highest = *std::max_element(top, top + 8);
    for (; i < n_vocab; ++i) {
        highest = std::max(highest, logits[i]);
    }
    return static_cast<llama_token>(std::find(logits, logits + n_vocab, highest) - logits) % n_vocab;
}

void check_model(const bundle & from, const llama_model * model) {
    char arch[64] = "";
    llama_model_meta_val_str(model, "general.architecture", arch, sizeof(arch));

    const int32_t n_layer = llama_model_n_layer(model);
    const int32_t n_embd  = llama_model_n_embd(model);
    const int32_t n_vocab = llama_vocab_n_tokens(llama_model_get_vocab(model));
    if (from.architecture != arch || from.n_layer != n_layer || from.n_embd != n_embd || from.n_vocab != n_vocab) {
        const auto shape = [](const std::string & a, int32_t l, int32_t e, int32_t v) {
            return a + " with " + std::to_string(l) + " layers of " + std::to_string(e) + " and " + std::to_string(v) +
                   " tokens";
        };
        throw error(SPECEE_ERR_BUNDLE_MODEL,
                    from.dir + ": was fitted on another model (" +
                        shape(printable(from.architecture), from.n_layer, from.n_embd, from.n_vocab) +
                        "; this one is " + shape(printable(arch), n_layer, n_embd, n_vocab) +
                        "); fit one for this model");
    }
}

} // namespace

session::exits::exits(llama_context * ctx, const specee_session_params & params, const bundle & from) :
    probes(from.probes),
    thresholds(pick_thresholds(from, params.mode)),
    max_pending(params.max_pending > 0 ? params.max_pending : from.max_pending),
    runtime(params.onnxruntime_path),
    predict(runtime, from),
    windows(ctx, &from, params.model_path, max_pending + 1),
    draft(from.lens_ids, from.k),
    pending(max_pending + 1),
    features(predict.n_feature()) {
    if (params.mode == SPECEE_MODE_EXACT) {
        // From some number of rows on, some kernels round differently than for one row, which alone flips near ties.
        // Where no number of rows gives the bits of one, the differences are of the size of float rounding, and all may
        // wait.
        const int32_t n_row = windows.max_exact_rows(max_pending + 1);
        max_pending         = n_row > 1 ? std::min(max_pending, n_row - 1) : max_pending;
    }
    for (size_t i = 0; i < probes.size(); ++i) {
        probe_cost_s.push_back(windows.measure_probe(i, i == 0));
    }
}

session::session(llama_context * ctx, const specee_session_params & params) :
    ctx(ctx),
    n_layer(llama_model_n_layer(llama_get_model(ctx))),
    exact(params.mode == SPECEE_MODE_EXACT),
    histogram_(n_layer + 1) {
    if (params.mode < SPECEE_MODE_OFF || params.mode > SPECEE_MODE_CALIBRATED) {
        throw error(SPECEE_ERR_INVALID_ARGUMENT,
                    "mode " + std::to_string(params.mode) + " is not 0 (off), 1 (exact) or 2 (calibrated)");
    }
    if (params.max_pending < 0 || params.max_pending > 64) {
        throw error(SPECEE_ERR_INVALID_ARGUMENT,
                    "max_pending is " + std::to_string(params.max_pending) + "; it must be 0 (the bundle's) to 64");
    }
    if (!llama_get_memory(ctx)) {
        throw error(SPECEE_ERR_UNSUPPORTED, "the context has no KV cache; it cannot generate");
    }

    stats_.struct_size = sizeof(stats_);
    llama_memory_clear(llama_get_memory(ctx), false);

    if (params.mode == SPECEE_MODE_OFF) {
        return;
    }
    if (!params.bundle_dir || !params.onnxruntime_path || !params.model_path) {
        throw error(SPECEE_ERR_INVALID_ARGUMENT,
                    "exits need a bundle, the path of ONNX Runtime and the path of the model");
    }
    const std::string reason = why_no_windows(ctx);
    if (!reason.empty()) {
        throw error(SPECEE_ERR_UNSUPPORTED, reason);
    }
    const bundle from = bundle::load(params.bundle_dir);
    check_model(from, llama_get_model(ctx));
    with_exits = std::make_unique<exits>(ctx, params, from);
}

void session::stats_reset() {
    stats_             = {};
    stats_.struct_size = sizeof(stats_);
    std::fill(histogram_.begin(), histogram_.end(), 0);
}

void session::forget_after(int32_t n_keep) {
    if (with_exits) {
        with_exits->pending.forget_from(n_keep);
    }
    if (n_kv >= n_keep) {
        llama_memory_seq_rm(llama_get_memory(ctx), 0, n_keep, -1);
        n_kv = n_keep;
    }
}

void session::rewind(int32_t n_keep) {
    if (n_keep < 0 || n_keep > n_token()) {
        throw error(SPECEE_ERR_INVALID_ARGUMENT,
                    "cannot keep " + std::to_string(n_keep) + " of " + std::to_string(n_token()) + " tokens");
    }
    verified.clear();
    has_logits = false;
    text.resize(n_keep);
    forget_after(std::min(n_keep, n_kv));
}

void session::prompt(const llama_token * tokens, int32_t n) {
    const int32_t n_text  = n_token();
    const int32_t n_vocab = llama_vocab_n_tokens(llama_model_get_vocab(llama_get_model(ctx)));
    if (n < 1 || std::any_of(tokens, tokens + n, [&](llama_token t) { return t < 0 || t >= n_vocab; })) {
        throw error(SPECEE_ERR_INVALID_ARGUMENT,
                    "a prompt needs at least one token, each in 0.." + std::to_string(n_vocab - 1));
    }
    if (n_text + n > static_cast<int32_t>(llama_n_ctx(ctx))) {
        throw error(SPECEE_ERR_CONTEXT_FULL, "the prompt of " + std::to_string(n_text + n) +
                                                 " tokens does not fit the context of " +
                                                 std::to_string(llama_n_ctx(ctx)));
    }

    rewind(n_text); // what was verified ahead is not part of the text
    complete();

    const stopwatch watch(stats_.t_prompt_s);
    const int32_t   n_kv_before = n_kv;
    text.insert(text.end(), tokens, tokens + n);
    while (n_kv < n_token()) {
        const int32_t n_chunk = std::min<int32_t>(n_token() - n_kv, llama_n_batch(ctx));
        if (llama_decode(ctx, llama_batch_get_one(text.data() + n_kv, n_chunk)) != 0) {
            text.resize(n_text);
            forget_after(n_kv_before);
            throw error(SPECEE_ERR_COMPUTE, "the prompt could not be computed");
        }
        n_kv += n_chunk;
    }
    stats_.n_prompt += n;
    has_logits = true;
}

specee_event session::next(llama_sampler * sampler) {
    const stopwatch watch(stats_.t_total_s);

    if (verified.empty() && has_logits) {
        verified.push_back({sample(sampler, -1), n_layer, NAN});
        has_logits = false;
    } else if (verified.empty()) {
        if (n_kv + 1 != n_token()) {
            throw error(SPECEE_ERR_INVALID_ARGUMENT, "there is no token to go on from; give a prompt first");
        }
        if (n_token() > static_cast<int32_t>(llama_n_ctx(ctx))) {
            throw error(SPECEE_ERR_CONTEXT_FULL,
                        "the context of " + std::to_string(llama_n_ctx(ctx)) + " tokens is full");
        }
        const int32_t n_kv_before = n_kv;
        try {
            if (!with_exits) {
                step_full(sampler);
            } else if (exact) {
                step_exact(sampler);
            } else {
                step_calibrated(sampler);
            }
        } catch (...) {
            verified.clear();
            forget_after(n_kv_before); // the text stays, the next call tries again
            throw;
        }
    }

    const specee_event event = verified.front();
    verified.pop_front();
    text.push_back(event.token);

    stats_.n_token += 1;
    stats_.n_layer_sum += event.n_layer;
    stats_.n_exit += event.n_layer < n_layer;
    histogram_[event.n_layer] += 1;
    return event;
}

llama_token session::sample(llama_sampler * sampler, int32_t row) {
    const stopwatch watch(stats_.t_sampling_s);
    const float *   logits = llama_get_logits_ith(ctx, row);
    if (!logits) {
        throw error(SPECEE_ERR_INTERNAL, "the logits of the last pass are gone; was the context used by someone else?");
    }
    if (sampler) {
        return llama_sampler_sample(sampler, ctx, row);
    }
    return argmax(logits, llama_vocab_n_tokens(llama_model_get_vocab(llama_get_model(ctx))));
}

void session::step_full(llama_sampler * sampler) {
    {
        const stopwatch watch(stats_.t_layers_s);
        if (llama_decode(ctx, llama_batch_get_one(&text.back(), 1)) != 0) {
            throw error(SPECEE_ERR_COMPUTE, "the token could not be computed");
        }
        llama_synchronize(ctx);
    }
    n_kv += 1;
    stats_.n_pass += 1;
    verified.push_back({sample(sampler, -1), n_layer, NAN});
}

// An exit is final: the token is shown, and its upper layers are computed with those of later tokens.
void session::step_calibrated(llama_sampler * sampler) {
    exits & e      = *with_exits;
    flight  newest = {text.back(), n_kv, 0, e.pending.free_carry(), 0};

    const auto choice = run_to_exit(newest);
    n_kv += 1;
    if (choice) {
        e.pending.push({newest, choice->token, choice->p, newest.depth});
        verified.push_back({choice->token, newest.depth, choice->p});
        if (static_cast<int32_t>(e.pending.size()) > e.max_pending) {
            complete();
        }
        return;
    }

    run_layers(&newest, n_layer);
    stats_.n_completed += e.pending.size();
    e.pending.clear();
    run_head(&newest, false);
    verified.push_back({sample(sampler, 0), n_layer, NAN});
}

// An exit is provisional: the chain goes on with its token, until a token goes through all layers or the chain is long
// enough. Everyone's upper layers are then one batch, and the true logits of every position decide what is kept.
void session::step_exact(llama_sampler * sampler) {
    exits &             e     = *with_exits;
    const llama_vocab * vocab = llama_model_get_vocab(llama_get_model(ctx));

    llama_token id = text.back();
    while (true) {
        flight newest = {id, n_kv, 0, e.pending.free_carry(), 0};

        const auto choice = run_to_exit(newest);
        n_kv += 1;
        if (!choice) {
            run_layers(&newest, n_layer);
            run_head(&newest, true);
            verify(&newest, sampler);
            return;
        }

        e.pending.push({newest, choice->token, choice->p, newest.depth});

        const bool full =
            static_cast<int32_t>(e.pending.size()) > e.max_pending || n_kv >= static_cast<int32_t>(llama_n_ctx(ctx));
        if (full || llama_vocab_is_eog(vocab, choice->token)) {
            run_pending();
            run_head(nullptr, true);
            verify(nullptr, sampler);
            return;
        }
        id = choice->token;
    }
}

std::optional<session::exit_choice> session::run_to_exit(flight & newest) {
    exits & e = *with_exits;
    e.history.clear();

    for (size_t i = 0; i < e.probes.size(); ++i) {
        rows.clear();
        if (newest.depth > 0) {
            e.pending.at_depth(newest.depth, rows);
        }
        rows.push_back(&newest);

        const float * logits = nullptr;
        double        took_s = 0;
        {
            const stopwatch watch(took_s);
            const int32_t   n = rows.size();
            logits            = i == 0
                                    ? e.windows.layers_lens(rows.data(), n, i)
                                    : e.windows.layers_probe(rows.data(), n, i, e.draft.tokens().data(), e.draft.tokens().size());
        }
        const double probe_s = std::min(took_s, e.probe_cost_s[i]);
        const double row_s   = (took_s - probe_s) / rows.size();
        (i == 0 ? stats_.t_draft_s : stats_.t_probe_s) += probe_s;
        stats_.t_layers_s += row_s;
        stats_.t_completion_s += row_s * (rows.size() - 1);

        if (i == 0) {
            const stopwatch watch(stats_.t_draft_s);
            e.draft.propose(logits);
            logits = e.draft.logits().data();
        }
        if (const auto choice = evaluate(i, logits)) {
            return choice;
        }
    }
    return std::nullopt;
}

std::optional<session::exit_choice> session::evaluate(size_t i_probe, const float * logits) {
    const stopwatch watch(stats_.t_probe_s);
    exits &         e = *with_exits;

    float p = 0;
    e.predict.features(logits, e.history, e.features.data());
    e.predict.evaluate(i_probe, e.features.data(), 1, &p);
    stats_.n_evaluated += 1;

    if (!(p >= e.thresholds[i_probe])) {
        return std::nullopt;
    }
    const auto & candidates = e.draft.tokens();
    return exit_choice{candidates[std::max_element(logits, logits + candidates.size()) - logits], p};
}

void session::run_layers(flight * newest, int32_t il_end) {
    exits & e = *with_exits;
    rows.clear();
    e.pending.at_depth(newest ? newest->depth : e.pending.min_depth(), rows);
    if (newest) {
        rows.push_back(newest);
    }

    double took_s = 0;
    {
        const stopwatch watch(took_s);
        e.windows.layers(rows.data(), rows.size(), il_end);
    }
    const double row_s = took_s / rows.size();
    stats_.t_layers_s += newest ? row_s : 0;
    stats_.t_completion_s += row_s * (rows.size() - (newest ? 1 : 0));
}

void session::run_pending() {
    exits & e = *with_exits;
    while (e.pending.min_depth() < n_layer) {
        run_layers(nullptr, std::min(n_layer, e.pending.next_depth(e.pending.min_depth())));
    }
}

void session::run_head(flight * newest, bool with_pending) {
    const stopwatch watch(stats_.t_head_s);
    exits &         e = *with_exits;
    rows.clear();
    if (with_pending) {
        e.pending.at_depth(n_layer, rows);
    }
    if (newest) {
        rows.push_back(newest);
    }
    e.windows.logits(rows.data(), rows.size());
    stats_.n_pass += 1;
}

// Row i of the logits is pending token i's; the newest token, if there is one, comes last. The first token that the
// full model refutes removes what follows it.
void session::verify(const flight * newest, llama_sampler * sampler) {
    exits &      e         = *with_exits;
    const size_t n_pending = e.pending.size();
    stats_.n_completed += n_pending;

    for (size_t i = 0; i < n_pending; ++i) {
        const pending_token & exited = e.pending[i];
        const llama_token     token  = sample(sampler, static_cast<int32_t>(i));
        if (token == exited.guess) {
            verified.push_back({token, exited.n_layer, exited.p});
            continue;
        }
        verified.push_back({token, n_layer, NAN});
        stats_.n_refuted += 1;
        const llama_pos pos = exited.at.pos;
        e.pending.clear();
        forget_after(pos + 1);
        return;
    }
    e.pending.clear();
    if (newest) {
        verified.push_back({sample(sampler, static_cast<int32_t>(n_pending)), n_layer, NAN});
    }
}

void session::complete() {
    if (!with_exits || with_exits->pending.empty()) {
        return;
    }
    run_pending();
    stats_.n_completed += with_exits->pending.size();
    with_exits->pending.clear();
}

} // namespace specee
