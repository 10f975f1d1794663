// predictor.h - features of the candidates' logits and P(the probe's favourite is what full depth says).
#pragma once

#include "bundle.h"
#include "onnx_runtime.h"

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

namespace specee {

class predictor {
  public:
    // The softmax of one token's candidates at the layer that was evaluated last. One per token, clear()ed when the
    // token begins.
    struct history {
        std::vector<float> softmax; // [k]; empty before the first evaluated layer

        bool empty() const { return softmax.empty(); }
        void clear() { softmax.clear(); } // keeps the memory
    };

    // Opens one ONNX session per probe. The runtime must outlive the predictor; the bundle need not. Throws
    // error{SPECEE_ERR_ONNX, ...}, or error{SPECEE_ERR_BUNDLE, ...} when a predictor does not take 3k features.
    predictor(const onnx_runtime & runtime, const bundle & from);

    int32_t n_feature() const { return 3 * k; }

    // Features of one token at one evaluated layer. logits: [k] in the order of the lens ranking; out: [3k], which is
    // the logits, their softmax, and its change since the previous evaluated layer (the softmax again at the first), as
    // in SpecEE, arXiv 2504.08850. prev becomes this layer's softmax.
    void features(const float * logits, history & prev, float * out) const;

    // x: [n, 3k] features of n tokens at probe i_probe; p: [n] in [0, 1].
    void evaluate(size_t i_probe, const float * x, int64_t n, float * p);

  private:
    int32_t                                    k;
    std::vector<std::unique_ptr<onnx_session>> sessions; // one per probe
};

} // namespace specee
