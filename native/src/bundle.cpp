#include "bundle.h"

#include "error.h"
#include "file.h"
#include "safetensors.h"

#include <nlohmann/json.hpp>

#include <cmath>
#include <cstring>
#include <filesystem>
#include <limits>

namespace fs = std::filesystem;

namespace specee {

using nlohmann::json;

static const uint64_t MAX_MANIFEST_BYTES = 4ull << 20;
static const int32_t  FORMAT             = 1;
static const int32_t  MAX_INT            = std::numeric_limits<int32_t>::max();

// One object of the manifest, with typed and checked access; every failure names the file and the field.
class manifest_object {
  public:
    manifest_object(const json & value, std::string file, std::string prefix) :
        value(value),
        file(std::move(file)),
        prefix(std::move(prefix)) {
        if (!value.is_object()) {
            fail("", "must be an object");
        }
    }

    const json & field(const std::string & name) const {
        const auto it = value.find(name);
        if (it == value.end()) {
            fail(name, "is missing");
        }
        return *it;
    }

    int32_t integer(const std::string & name, int32_t min, int32_t max) const {
        const json & number = field(name);
        // negative integers are signed, all others unsigned; both comparisons are needed
        const bool fits = number.is_number_integer() &&
                          (number.is_number_unsigned() ? number.get<uint64_t>() <= static_cast<uint64_t>(max)
                                                       : number.get<int64_t>() <= max) &&
                          number.get<int64_t>() >= min;
        if (!fits) {
            fail(name, "must be an integer in " + std::to_string(min) + " .. " + std::to_string(max));
        }
        return number.get<int32_t>();
    }

    float threshold(const std::string & name) const {
        const json & number = field(name);
        const float  out    = number.is_number() ? number.get<float>() : -1.0f;
        if (!std::isfinite(out) || out < 0.0f) {
            fail(name, "must be a finite number, at least 0");
        }
        return out;
    }

    std::string text(const std::string & name) const {
        const json & string = field(name);
        if (!string.is_string() || string.get_ref<const std::string &>().empty()) {
            fail(name, "must be a text that is not empty");
        }
        return string.get<std::string>();
    }

    [[noreturn]] void fail(const std::string & name, const std::string & what) const {
        throw error(SPECEE_ERR_BUNDLE,
                    file + ": " + prefix + (prefix.empty() || name.empty() ? "" : ".") + name + " " + what);
    }

  private:
    const json & value;
    std::string  file;
    std::string  prefix;
};

static std::string join(const std::string & dir, const std::string & name) {
    return (fs::u8path(dir) / fs::u8path(name)).u8string();
}

// A file name without any folder, so that a manifest cannot point outside its bundle.
static bool is_plain_name(const std::string & name) {
    for (const char c : name) {
        const bool known = (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '_' ||
                           c == '-' || c == '.';
        if (!known) {
            return false;
        }
    }
    return name.front() != '.';
}

static std::string shape_text(const std::vector<int64_t> & shape) {
    std::string out = "[";
    for (size_t i = 0; i < shape.size(); ++i) {
        out += (i ? ", " : "") + std::to_string(shape[i]);
    }
    return out + "]";
}

// A tensor of the safetensors file, checked for its type and shape. A dimension of -1 may have any size.
static const safetensor & find_tensor(const std::map<std::string, safetensor> & tensors, const std::string & file,
                                      const std::string & name, const std::string & dtype,
                                      const std::vector<int64_t> & shape) {
    const auto it = tensors.find(name);
    if (it == tensors.end()) {
        throw error(SPECEE_ERR_BUNDLE, file + ": tensor " + name + " is missing");
    }
    const safetensor & tensor = it->second;
    bool               fits   = tensor.dtype == dtype && tensor.shape.size() == shape.size();
    for (size_t i = 0; fits && i < shape.size(); ++i) {
        fits = shape[i] < 0 || tensor.shape[i] == shape[i];
    }
    if (!fits) {
        throw error(SPECEE_ERR_BUNDLE, file + ": tensor " + name + " must be " + dtype + " " + shape_text(shape) +
                                           " (-1: any), is " + tensor.dtype + " " + shape_text(tensor.shape));
    }
    return tensor;
}

static std::vector<uint16_t> halves(const safetensor & tensor, const std::string & file, const std::string & name) {
    std::vector<uint16_t> out(tensor.data.size() / sizeof(uint16_t));
    if (!out.empty()) {
        std::memcpy(out.data(), tensor.data.data(), tensor.data.size());
    }
    for (const uint16_t bits : out) {
        if ((bits & 0x7c00) == 0x7c00) { // infinity or not a number
            throw error(SPECEE_ERR_BUNDLE, file + ": tensor " + name + " holds a value that is not finite");
        }
    }
    return out;
}

static void read_manifest(bundle & out) {
    const std::string          file  = join(out.dir, "manifest.json");
    const std::vector<uint8_t> bytes = read_file(file, MAX_MANIFEST_BYTES, SPECEE_ERR_BUNDLE);
    const json                 root  = json::parse(bytes.begin(), bytes.end(), nullptr, false);
    if (root.is_discarded()) {
        throw error(SPECEE_ERR_BUNDLE, file + ": not valid JSON");
    }
    const manifest_object manifest(root, file, "");
    if (manifest.field("format") != FORMAT) {
        manifest.fail("format", "must be " + std::to_string(FORMAT) + ": fit the bundle again with this version");
    }
    const manifest_object model(manifest.field("model"), file, "model");
    out.architecture = model.text("architecture");
    out.n_layer      = model.integer("n_layer", 2, MAX_INT);
    out.n_embd       = model.integer("n_embd", 1, MAX_INT);
    out.n_vocab      = model.integer("n_vocab", 1, MAX_INT);
    out.k            = manifest.integer("k", 1, 16);
    out.max_pending  = manifest.integer("max_pending", 1, 64);

    const json & probes = manifest.field("probes");
    if (!probes.is_array() || probes.empty()) {
        manifest.fail("probes", "must be an array of at least one probe");
    }
    for (size_t i = 0; i < probes.size(); ++i) {
        const manifest_object probe(probes[i], file, "probes[" + std::to_string(i) + "]");
        probe_spec            spec = {};
        spec.layer                 = probe.integer("layer", 1, out.n_layer - 1);
        spec.threshold_calibrated  = probe.threshold("threshold_calibrated");
        spec.threshold_exact       = probe.threshold("threshold_exact");
        if (i > 0 && spec.layer <= out.probes.back().layer) {
            probe.fail("layer", "must be larger than the one before");
        }
        const std::string predictor = probe.text("predictor");
        if (!is_plain_name(predictor)) {
            probe.fail("predictor", "must be a plain file name, is " + printable(predictor));
        }
        spec.predictor_path = join(out.dir, predictor);
        std::error_code ec;
        if (!fs::is_regular_file(fs::u8path(spec.predictor_path), ec)) {
            probe.fail("predictor", "names " + printable(predictor) + ", which is missing");
        }
        out.probes.push_back(std::move(spec));
    }
}

static void read_translators(bundle & out) {
    const std::string file    = join(out.dir, "translators.safetensors");
    const auto        tensors = read_safetensors(file);
    for (probe_spec & probe : out.probes) {
        const std::string  prefix = "layer_" + std::to_string(probe.layer);
        const safetensor & v      = find_tensor(tensors, file, prefix + ".v", "F16", {-1, out.n_embd});
        const int64_t      rank   = v.shape[0];
        if (rank < 1 || rank > out.n_embd) {
            throw error(SPECEE_ERR_BUNDLE, file + ": tensor " + prefix + ".v has rank " + std::to_string(rank) +
                                               ", must be in 1 .. " + std::to_string(out.n_embd));
        }
        probe.rank = static_cast<int32_t>(rank);
        probe.v    = halves(v, file, prefix + ".v");
        probe.u    = halves(find_tensor(tensors, file, prefix + ".u", "F16", {out.n_embd, rank}), file, prefix + ".u");
        probe.b    = halves(find_tensor(tensors, file, prefix + ".b", "F16", {out.n_embd}), file, prefix + ".b");
    }
}

static void read_lens(bundle & out) {
    const std::string  file    = join(out.dir, "head.safetensors");
    const auto         tensors = read_safetensors(file);
    const safetensor & ids     = find_tensor(tensors, file, "lens_ids", "I32", {-1});
    out.lens_ids.resize(ids.data.size() / sizeof(int32_t));
    if (out.lens_ids.size() < static_cast<size_t>(out.k)) {
        throw error(SPECEE_ERR_BUNDLE, file + ": lens_ids holds " + std::to_string(out.lens_ids.size()) +
                                           " ids, fewer than the k = " + std::to_string(out.k) + " candidates");
    }
    std::memcpy(out.lens_ids.data(), ids.data.data(), ids.data.size());
    int32_t previous = -1;
    for (const int32_t id : out.lens_ids) {
        if (id <= previous || id >= out.n_vocab) {
            throw error(SPECEE_ERR_BUNDLE, file + ": lens_ids must ascend within 0 .. " +
                                               std::to_string(out.n_vocab - 1) + ", but " + std::to_string(id) +
                                               " follows " + std::to_string(previous));
        }
        previous = id;
    }
}

bundle bundle::load(const std::string & dir) {
    bundle out = {};
    out.dir    = dir;
    std::error_code ec;
    if (!fs::is_directory(fs::u8path(dir), ec)) {
        throw error(SPECEE_ERR_BUNDLE, dir + ": no such bundle folder");
    }
    read_manifest(out);
    read_translators(out);
    read_lens(out);
    return out;
}

} // namespace specee
