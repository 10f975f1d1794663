// session.h - the decode loop: draft, windows until an exit, head, sample or verify, commit.
#pragma once

#include "bundle.h"
#include "draft.h"
#include "onnx_runtime.h"
#include "pending.h"
#include "predictor.h"
#include "specee.h"
#include "window.h"

#include <deque>
#include <memory>
#include <optional>
#include <vector>

namespace specee {

class session {
  public:
    session(llama_context * ctx, const specee_session_params & params);

    void         prompt(const llama_token * tokens, int32_t n);
    specee_event next(llama_sampler * sampler);
    void         rewind(int32_t n_keep);
    void         complete(); // pending tokens to full depth

    int32_t              n_token() const { return static_cast<int32_t>(text.size()); }
    const specee_stats & stats() const { return stats_; }
    void                 stats_reset();

    const std::vector<int64_t> & histogram() const { return histogram_; } // [n_layer + 1]

  private:
    // Everything that only a session with exits has.
    struct exits {
        exits(llama_context * ctx, const specee_session_params & params, const bundle & from);

        const std::vector<probe_spec> probes;
        std::vector<float>            thresholds; // [n_probe]
        int32_t                       max_pending;

        onnx_runtime       runtime;
        predictor          predict;
        window_runner      windows;
        lens_draft         draft;
        pending_list       pending;
        predictor::history history;

        std::vector<float>  features;     // [3k]
        std::vector<double> probe_cost_s; // [n_probe]
    };

    struct exit_choice {
        llama_token token;
        float       p;
    };

    llama_token sample(llama_sampler * sampler, int32_t row); // NULL: greedy

    // One pass of the newest token: each adds one or more events to verified.
    void step_full(llama_sampler * sampler);
    void step_calibrated(llama_sampler * sampler);
    void step_exact(llama_sampler * sampler);

    // Runs the newest token from probe to probe, pending tokens joining in, until a predictor is sure.
    std::optional<exit_choice> run_to_exit(flight & newest);

    std::optional<exit_choice> evaluate(size_t i_probe, const float * logits); // logits: [k]

    void run_layers(flight * newest, int32_t il_end); // NULL: the pending tokens alone
    void run_pending();                               // all of them, to full depth
    void run_head(flight * newest, bool with_pending);
    void verify(const flight * newest, llama_sampler * sampler);
    void forget_after(int32_t n_keep);                // KV slots from position n_keep on

    llama_context * ctx;
    const int32_t   n_layer;
    const bool      exact;

    std::unique_ptr<exits> with_exits; // null: full depth

    std::vector<llama_token> text;                // verified tokens; the last one emitted is not decoded yet
    int32_t                  n_kv       = 0;      // tokens that have a KV slot
    bool                     has_logits = false;  // the context holds the logits of the next token
    std::deque<specee_event> verified;            // not handed out yet
    std::vector<flight *>    rows;                // of the window under way

    specee_stats         stats_ = {};
    std::vector<int64_t> histogram_; // [n_layer + 1]
};

} // namespace specee
