// bundle_files.h - writes small bundles for tests: valid ones, and everything that one may want to break in them.
#pragma once

#include "check.h"
#include "onnx_file.h"

#include <nlohmann/json.hpp>

#include <cstdint>
#include <cstring>
#include <map>
#include <string>
#include <vector>

namespace specee_test {

struct tensor_file_entry {
    std::string          dtype;
    std::vector<int64_t> shape;
    std::string          data;
};

using tensor_file = std::map<std::string, tensor_file_entry>;

// The bytes of a safetensors file, tensors in order of their names.
inline std::string safetensors_bytes(const tensor_file & tensors) {
    nlohmann::json header = nlohmann::json::object();
    std::string    data;
    for (const auto & item : tensors) {
        const tensor_file_entry & t = item.second;
        header[item.first]          = {
            {"dtype", t.dtype}, {"shape", t.shape}, {"data_offsets", {data.size(), data.size() + t.data.size()}}};
        data += t.data;
    }
    const std::string text = header.dump();
    std::string       out;
    for (int i = 0; i < 8; ++i) {
        out += static_cast<char>(static_cast<uint64_t>(text.size()) >> (8 * i));
    }
    return out + text + data;
}

// A float as the bits of an IEEE half, truncated; good for normal numbers and zero.
inline uint16_t half_bits(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof(bits));
    const int32_t exponent = static_cast<int32_t>(bits >> 23 & 0xff) - 127 + 15;
    if (exponent <= 0) {
        return 0;
    }
    return static_cast<uint16_t>((bits >> 16 & 0x8000) | static_cast<uint32_t>(exponent) << 10 | (bits >> 13 & 0x3ff));
}

template <typename T>
std::string raw_bytes(const std::vector<T> & values) {
    return std::string(reinterpret_cast<const char *>(values.data()), values.size() * sizeof(T));
}

struct bundle_files {
    nlohmann::json                     manifest;
    tensor_file                        translators;
    tensor_file                        head;
    std::map<std::string, std::string> predictors; // bytes by file name

    // A bundle for a model of that shape. Translators are small and random, the lens knows every token, predictors are
    // random MLPs.
    bundle_files(const std::string & architecture, int32_t n_layer, int32_t n_embd, int32_t n_vocab,
                 const std::vector<int32_t> & layers, int32_t k = 4, int32_t rank = 8, float threshold = 0.5f) {
        manifest = {{"format", 1},
                    {"model",
                     {{"sha256", "0"},
                      {"name", "random"},
                      {"architecture", architecture},
                      {"n_layer", n_layer},
                      {"n_embd", n_embd},
                      {"n_vocab", n_vocab}}},
                    {"k", k},
                    {"max_pending", 3},
                    {"probes", nlohmann::json::array()}};
        for (const int32_t layer : layers) {
            const std::string number    = std::to_string(layer);
            const std::string predictor = "predictor_" + number + ".onnx";
            manifest["probes"].push_back({{"layer", layer},
                                          {"predictor", predictor},
                                          {"threshold_calibrated", threshold},
                                          {"threshold_exact", threshold}});
            predictors[predictor] = mlp_bytes(mlp(3 * k, 32, static_cast<uint64_t>(layer)));

            random_numbers random(static_cast<uint64_t>(layer));
            const auto     tensor = [&random](const std::vector<int64_t> & shape, float scale) {
                int64_t n = 1;
                for (const int64_t dim : shape) {
                    n *= dim;
                }
                std::vector<uint16_t> halves;
                for (int64_t i = 0; i < n; ++i) {
                    halves.push_back(half_bits(scale * random.normal()));
                }
                return tensor_file_entry{"F16", shape, raw_bytes(halves)};
            };
            translators["layer_" + number + ".v"] = tensor({rank, n_embd}, 0.05f);
            translators["layer_" + number + ".u"] = tensor({n_embd, rank}, 0.05f);
            translators["layer_" + number + ".b"] = tensor({n_embd}, 0.05f);
        }
        std::vector<int32_t> ids(static_cast<size_t>(n_vocab));
        for (int32_t i = 0; i < n_vocab; ++i) {
            ids[static_cast<size_t>(i)] = i;
        }
        set_lens(ids);
    }

    void set_lens(const std::vector<int32_t> & ids) {
        head["lens_ids"] = {"I32", {static_cast<int64_t>(ids.size())}, raw_bytes(ids)};
    }

    // Every predictor answers p, whatever the features are.
    void set_constant(float p) {
        for (auto & item : predictors) {
            item.second = constant_bytes(3 * manifest["k"].get<int64_t>(), p);
        }
    }

    // Writes dir and returns it.
    std::string write(const std::string & dir) const {
        std::filesystem::create_directories(std::filesystem::u8path(dir));
        write_file(dir + "/manifest.json", manifest.dump());
        write_file(dir + "/translators.safetensors", safetensors_bytes(translators));
        write_file(dir + "/head.safetensors", safetensors_bytes(head));
        for (const auto & item : predictors) {
            write_file(dir + "/" + item.first, item.second);
        }
        return dir;
    }
};

} // namespace specee_test
