// pending.h - tokens that left early and wait for their upper layers.
#pragma once

#include "window.h"

#include <cstdint>
#include <vector>

namespace specee {

struct pending_token {
    flight      at;
    llama_token guess;   // the token that the exit chose to follow
    float       p;       // the predictor's probability
    int32_t     n_layer; // the exit layer
};

// In order of position, each with a row of the carry tensor of its own.
class pending_list {
  public:
    explicit pending_list(int32_t n_carry) : n_carry(n_carry) { tokens.reserve(n_carry); }

    bool   empty() const { return tokens.empty(); }
    size_t size() const { return tokens.size(); }

    pending_token & operator[](size_t i) { return tokens[i]; }

    int32_t free_carry() const; // a row that no pending token holds

    void push(const pending_token & token) { tokens.push_back(token); }
    void forget_from(llama_pos pos); // tokens at pos and after
    void clear() { forget_from(0); }

    // The tokens of this depth, in order of position, appended to out.
    void at_depth(int32_t depth, std::vector<flight *> & out);

    int32_t min_depth() const { return next_depth(-1); } // INT32_MAX when empty
    int32_t next_depth(int32_t depth) const;             // the smallest depth above it, INT32_MAX when there is none

  private:
    std::vector<pending_token> tokens;
    const int32_t              n_carry;
};

} // namespace specee
