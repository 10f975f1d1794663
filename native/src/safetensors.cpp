#include "safetensors.h"

#include "error.h"
#include "file.h"

#include <nlohmann/json.hpp>

#include <algorithm>
#include <limits>

namespace specee {

using nlohmann::json;

static const uint64_t MAX_FILE_BYTES   = 1ull << 30;
static const uint64_t MAX_HEADER_BYTES = 1ull << 20;

static uint64_t dtype_size(const std::string & dtype) {
    static const std::map<std::string, uint64_t> sizes = {
        {"BOOL", 1}, {"U8", 1},  {"I8", 1},  {"U16", 2}, {"I16", 2}, {"F16", 2}, {"BF16", 2},
        {"U32", 4},  {"I32", 4}, {"F32", 4}, {"U64", 8}, {"I64", 8}, {"F64", 8},
    };
    const auto it = sizes.find(dtype);
    return it == sizes.end() ? 0 : it->second;
}

// The bytes of a tensor of that shape; refuses an overflow.
static bool tensor_bytes(const std::vector<int64_t> & shape, uint64_t element, uint64_t & n_bytes) {
    n_bytes = element;
    for (const int64_t dim : shape) {
        const uint64_t n = static_cast<uint64_t>(dim);
        if (n != 0 && n_bytes > std::numeric_limits<uint64_t>::max() / n) {
            return false;
        }
        n_bytes *= n;
    }
    return true;
}

// An array of non-negative integers, or an error.
static std::vector<int64_t> read_integers(const json & entry, const char * field, const std::string & where) {
    const auto it = entry.find(field);
    if (it == entry.end() || !it->is_array()) {
        throw error(SPECEE_ERR_BUNDLE, where + ": " + field + " must be an array");
    }
    std::vector<int64_t> out;
    for (const json & value : *it) {
        if (!value.is_number_unsigned() || value.get<uint64_t>() > std::numeric_limits<int64_t>::max()) {
            throw error(SPECEE_ERR_BUNDLE, where + ": " + field + " must hold non-negative integers");
        }
        out.push_back(value.get<int64_t>());
    }
    return out;
}

static json read_header(const std::vector<uint8_t> & bytes, const std::string & path, uint64_t & n_header) {
    if (bytes.size() < 8) {
        throw error(SPECEE_ERR_BUNDLE, path + ": too short for a safetensors file");
    }
    n_header = 0;
    for (int i = 7; i >= 0; --i) {
        n_header = n_header << 8 | bytes[i];
    }
    if (n_header > MAX_HEADER_BYTES || n_header > bytes.size() - 8) {
        throw error(SPECEE_ERR_BUNDLE,
                    path + ": the header's length, " + std::to_string(n_header) + ", exceeds the file or 1 MiB");
    }
    const auto begin  = bytes.begin() + 8;
    json       header = json::parse(begin, begin + static_cast<std::ptrdiff_t>(n_header), nullptr, false);
    if (!header.is_object()) {
        throw error(SPECEE_ERR_BUNDLE, path + ": the header is not a JSON object");
    }
    return header;
}

std::map<std::string, safetensor> read_safetensors(const std::string & path) {
    const std::vector<uint8_t> bytes    = read_file(path, MAX_FILE_BYTES, SPECEE_ERR_BUNDLE);
    uint64_t                   n_header = 0;
    const json                 header   = read_header(bytes, path, n_header);
    const uint64_t             n_data   = bytes.size() - 8 - n_header;

    std::map<std::string, safetensor>          tensors;
    std::vector<std::pair<uint64_t, uint64_t>> ranges;
    for (const auto & item : header.items()) {
        if (item.key() == "__metadata__") {
            continue;
        }
        const std::string where = path + ": tensor " + printable(item.key());
        const json &      entry = item.value();
        if (!entry.is_object() || !entry.contains("dtype") || !entry["dtype"].is_string()) {
            throw error(SPECEE_ERR_BUNDLE, where + ": dtype must be a string");
        }
        safetensor tensor;
        tensor.dtype           = entry["dtype"].get<std::string>();
        const uint64_t element = dtype_size(tensor.dtype);
        if (element == 0) {
            throw error(SPECEE_ERR_BUNDLE, where + ": unknown dtype " + printable(tensor.dtype));
        }
        tensor.shape = read_integers(entry, "shape", where);

        const std::vector<int64_t> offsets = read_integers(entry, "data_offsets", where);
        if (offsets.size() != 2 || offsets[0] > offsets[1] || static_cast<uint64_t>(offsets[1]) > n_data) {
            throw error(SPECEE_ERR_BUNDLE, where + ": data_offsets lie outside the file");
        }
        const uint64_t begin = static_cast<uint64_t>(offsets[0]);
        const uint64_t end   = static_cast<uint64_t>(offsets[1]);

        uint64_t n_bytes = 0;
        if (!tensor_bytes(tensor.shape, element, n_bytes) || n_bytes != end - begin) {
            throw error(SPECEE_ERR_BUNDLE, where + ": its shape does not match the bytes between its data_offsets");
        }
        const uint8_t * data = bytes.data() + 8 + n_header;
        tensor.data.assign(data + begin, data + end);
        ranges.emplace_back(begin, end);
        tensors.emplace(item.key(), std::move(tensor));
    }

    // the format knows neither holes nor overlaps, so either one means a damaged file
    std::sort(ranges.begin(), ranges.end());
    uint64_t position = 0;
    for (const auto & range : ranges) {
        if (range.first != position) {
            throw error(SPECEE_ERR_BUNDLE, path + ": tensors overlap or leave a hole at byte " +
                                               std::to_string(std::min(range.first, position)));
        }
        position = range.second;
    }
    if (position != n_data) {
        throw error(SPECEE_ERR_BUNDLE, path + ": " + std::to_string(n_data - position) + " bytes belong to no tensor");
    }
    return tensors;
}

} // namespace specee
