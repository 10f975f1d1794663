#include "file.h"

#include "error.h"

#include <filesystem>
#include <fstream>

namespace fs = std::filesystem;

namespace specee {

std::vector<uint8_t> read_file(const std::string & path, uint64_t max_bytes, specee_status status) {
    const fs::path        native = fs::u8path(path);
    std::error_code       ec;
    const fs::file_status what = fs::status(native, ec);
    if (what.type() == fs::file_type::not_found) {
        throw error(status, path + ": no such file");
    }
    if (what.type() != fs::file_type::regular) {
        throw error(status, path + ": not a regular file" + (ec ? " (" + ec.message() + ")" : ""));
    }
    const uintmax_t n_bytes = fs::file_size(native, ec);
    if (ec) {
        throw error(status, path + ": " + ec.message());
    }
    if (n_bytes > max_bytes) {
        throw error(status, path + ": " + std::to_string(n_bytes) + " bytes, more than the " +
                                std::to_string(max_bytes) + " that are allowed");
    }

    std::ifstream in(native, std::ios::binary);
    if (!in) {
        throw error(status, path + ": cannot be opened");
    }
    std::vector<uint8_t> bytes(static_cast<size_t>(n_bytes));
    in.read(reinterpret_cast<char *>(bytes.data()), static_cast<std::streamsize>(bytes.size()));
    if (static_cast<size_t>(in.gcount()) != bytes.size()) {
        throw error(status, path + ": only " + std::to_string(in.gcount()) + " of " + std::to_string(n_bytes) +
                                " bytes could be read");
    }
    return bytes;
}

} // namespace specee
