// bundle.h - NAME.specee, format 1: the manifest, the translators and the lens vocabulary, checked.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace specee {

// A layer number is a count of layers that have run: 1 .. n_layer - 1 for a probe.
struct probe_spec {
    int32_t     layer;
    std::string predictor_path; // UTF-8, inside the bundle's folder
    float       threshold_calibrated;
    float       threshold_exact; // p >= threshold exits; a threshold > 1 never does

    // The translator, s = t + U (V t) + b on the normed state t. Bits of IEEE half floats, row major.
    int32_t               rank;
    std::vector<uint16_t> v; // [rank, n_embd]
    std::vector<uint16_t> u; // [n_embd, rank]
    std::vector<uint16_t> b; // [n_embd]
};

struct bundle {
    std::string dir; // as given to load()
    std::string architecture;
    int32_t     n_layer;
    int32_t     n_embd;
    int32_t     n_vocab;

    int32_t k;           // candidates of a token
    int32_t max_pending; // exited tokens that may wait for completion

    std::vector<probe_spec> probes;   // at least one, layers ascending; the first is the lens layer
    std::vector<int32_t>    lens_ids; // ascending token ids, at least k

    // Throws error{SPECEE_ERR_BUNDLE, ...} naming the file and the field that is missing or wrong. The ONNX files are
    // checked to exist here; predictor reads them.
    static bundle load(const std::string & dir);
};

} // namespace specee
