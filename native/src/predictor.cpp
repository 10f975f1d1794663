#include "predictor.h"

#include "error.h"

#include <algorithm>
#include <cmath>

namespace specee {

predictor::predictor(const onnx_runtime & runtime, const bundle & from) : k(from.k) {
    for (const probe_spec & probe : from.probes) {
        auto session = std::make_unique<onnx_session>(runtime, probe.predictor_path);
        if (session->n_in() != n_feature()) {
            throw error(SPECEE_ERR_BUNDLE, probe.predictor_path + ": takes " + std::to_string(session->n_in()) +
                                               " features, but the bundle's k = " + std::to_string(k) + " makes " +
                                               std::to_string(n_feature()));
        }
        sessions.push_back(std::move(session));
    }
}

void predictor::features(const float * logits, history & prev, float * out) const {
    float * const softmax = out + k;
    float * const change  = out + 2 * k;

    const float max = *std::max_element(logits, logits + k); // keeps exp() from overflowing
    float       sum = 0.0f;
    for (int32_t i = 0; i < k; ++i) {
        out[i]     = logits[i];
        softmax[i] = std::exp(logits[i] - max);
        sum += softmax[i];
    }
    const bool first = prev.empty();
    prev.softmax.resize(static_cast<size_t>(k));
    for (int32_t i = 0; i < k; ++i) {
        softmax[i] /= sum;
        change[i]       = first ? softmax[i] : softmax[i] - prev.softmax[i];
        prev.softmax[i] = softmax[i];
    }
}

void predictor::evaluate(size_t i_probe, const float * x, int64_t n, float * p) {
    sessions[i_probe]->run(x, n, p);
}

} // namespace specee
