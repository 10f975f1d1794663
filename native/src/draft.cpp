#include "draft.h"

#include <algorithm>
#include <numeric>

namespace specee {

void lens_draft::propose(const float * lens_logits) {
    std::iota(order.begin(), order.end(), 0);
    std::partial_sort(order.begin(), order.begin() + tokens_.size(), order.end(), [&](int32_t a, int32_t b) {
        return lens_logits[a] != lens_logits[b] ? lens_logits[a] > lens_logits[b] : a < b;
    });
    for (size_t i = 0; i < tokens_.size(); ++i) {
        tokens_[i] = ids[order[i]];
        logits_[i] = lens_logits[order[i]];
    }
}

} // namespace specee
