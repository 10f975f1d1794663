// draft.h - the lens draft: candidates are the favourites of the translated state at one early layer.
#pragma once

#include <cstdint>
#include <vector>

namespace specee {

class lens_draft {
  public:
    lens_draft(const std::vector<int32_t> & ids, int32_t k) : ids(ids), tokens_(k), logits_(k), order(ids.size()) {}

    // Takes the k highest of the lens vocabulary's logits [n_lens]; equal ones in order of token id.
    void propose(const float * lens_logits);

    const std::vector<int32_t> & tokens() const { return tokens_; }  // [k] best first
    const std::vector<float> &   logits() const { return logits_; }  // [k]

  private:
    const std::vector<int32_t> ids;     // [n_lens]
    std::vector<int32_t>       tokens_; // [k]
    std::vector<float>         logits_; // [k]
    std::vector<int32_t>       order;   // [n_lens] scratch
};

} // namespace specee
