// file.h - whole files, by UTF-8 path, on every platform.
#pragma once

#include "specee.h"

#include <cstdint>
#include <string>
#include <vector>

namespace specee {

// The bytes of the file. Throws error{status, ...} naming the path and the reason when it is missing, is no regular
// file, is larger than max_bytes or cannot be read whole.
std::vector<uint8_t> read_file(const std::string & path, uint64_t max_bytes, specee_status status);

} // namespace specee
