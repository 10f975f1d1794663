#include "pending.h"

#include "error.h"

#include <algorithm>

namespace specee {

int32_t pending_list::free_carry() const {
    for (int32_t carry = 0; carry < n_carry; ++carry) {
        if (std::none_of(tokens.begin(), tokens.end(), [&](const pending_token & t) { return t.at.carry == carry; })) {
            return carry;
        }
    }
    throw error(SPECEE_ERR_INTERNAL, "no free row for a carried state");
}

void pending_list::forget_from(llama_pos pos) {
    while (!tokens.empty() && tokens.back().at.pos >= pos) {
        tokens.pop_back();
    }
}

void pending_list::at_depth(int32_t depth, std::vector<flight *> & out) {
    for (pending_token & token : tokens) {
        if (token.at.depth == depth) {
            out.push_back(&token.at);
        }
    }
}

int32_t pending_list::next_depth(int32_t depth) const {
    int32_t next = INT32_MAX;
    for (const pending_token & token : tokens) {
        if (token.at.depth > depth) {
            next = std::min(next, token.at.depth);
        }
    }
    return next;
}

} // namespace specee
