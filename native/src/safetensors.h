// safetensors.h - reads the safetensors format (https://github.com/huggingface/safetensors): a length, a JSON header,
// the tensors' bytes. Nothing in the file is trusted.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace specee {

struct safetensor {
    std::string          dtype; // "F16", "I32", ... as the header names it
    std::vector<int64_t> shape; // row major; empty for a scalar
    std::vector<uint8_t> data;  // little endian
};

// Every tensor of the file, by name. Throws error{SPECEE_ERR_BUNDLE, ...}, naming the file and the fault.
std::map<std::string, safetensor> read_safetensors(const std::string & path);

} // namespace specee
