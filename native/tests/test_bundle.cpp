// Bundles and safetensors: what is valid loads with its values, everything else is refused with its reason.
#include "bundle.h"

#include "bundle_files.h"
#include "check.h"
#include "safetensors.h"

using namespace specee_test;
using specee::bundle;
using specee::read_safetensors;

static bundle_files sound() {
    return bundle_files("llama", 8, 32, 64, {3, 5, 7});
}

static void test_load() {
    temporary_dir dir;
    bundle_files  files                                 = sound();
    files.manifest["probes"][1]["threshold_exact"]      = 0.75;
    files.manifest["probes"][1]["threshold_calibrated"] = 1.5;
    files.manifest["calibration"] = {{"unknown", "to us"}}; // fields that are not needed are no fault
    const bundle b                = bundle::load(files.write(dir / "b.specee"));

    CHECK(b.architecture == "llama");
    CHECK_EQ(b.n_layer, 8);
    CHECK_EQ(b.n_embd, 32);
    CHECK_EQ(b.n_vocab, 64);
    CHECK_EQ(b.k, 4);
    CHECK_EQ(b.max_pending, 3);
    CHECK_EQ(b.lens_ids.size(), 64u);
    CHECK_EQ(b.lens_ids[63], 63);
    CHECK_EQ(b.probes.size(), 3u);
    CHECK_EQ(b.probes[1].layer, 5);
    CHECK_EQ(b.probes[1].rank, 8);
    CHECK_EQ(b.probes[1].threshold_exact, 0.75f);
    CHECK_EQ(b.probes[1].threshold_calibrated, 1.5f);
    CHECK(std::filesystem::is_regular_file(std::filesystem::u8path(b.probes[1].predictor_path)));
    CHECK(raw_bytes(b.probes[1].v) == files.translators["layer_5.v"].data);
    CHECK(raw_bytes(b.probes[1].u) == files.translators["layer_5.u"].data);
    CHECK(raw_bytes(b.probes[1].b) == files.translators["layer_5.b"].data);
}

static void test_path_with_letters() {
    temporary_dir dir;
    const bundle  b = bundle::load(sound().write(dir / "m\xc3\xb6"
                                                        "dell \xe6\xa8\xa1.specee"));
    CHECK_EQ(b.probes.size(), 3u);
}

// Loads a bundle after one change to it.
template <typename F>
static bundle load_changed(F && change) {
    temporary_dir dir;
    bundle_files  files = sound();
    change(files);
    return bundle::load(files.write(dir / "b.specee"));
}

static void test_manifest_failures() {
    const auto with = [](const char * pointer, const nlohmann::json & value) {
        return load_changed([&](bundle_files & f) { f.manifest[nlohmann::json::json_pointer(pointer)] = value; });
    };
    const auto without = [](const char * pointer, const char * field) {
        return load_changed([&](bundle_files & f) { f.manifest[nlohmann::json::json_pointer(pointer)].erase(field); });
    };
    CHECK_ERROR(bundle::load("/no/such.specee"), SPECEE_ERR_BUNDLE, "/no/such.specee: no such bundle folder");
    CHECK_ERROR(without("", "format"), SPECEE_ERR_BUNDLE, "manifest.json: format is missing");
    CHECK_ERROR(with("/format", 2), SPECEE_ERR_BUNDLE, "format must be 1");
    CHECK_ERROR(with("/format", "1"), SPECEE_ERR_BUNDLE, "format must be 1");
    CHECK_ERROR(without("", "model"), SPECEE_ERR_BUNDLE, "model is missing");
    CHECK_ERROR(with("/model", 3), SPECEE_ERR_BUNDLE, "model must be an object");
    CHECK_ERROR(without("/model", "architecture"), SPECEE_ERR_BUNDLE, "model.architecture is missing");
    CHECK_ERROR(with("/model/architecture", ""), SPECEE_ERR_BUNDLE, "model.architecture must be a text");
    CHECK_ERROR(with("/model/architecture", 1), SPECEE_ERR_BUNDLE, "model.architecture must be a text");
    CHECK_ERROR(with("/model/n_layer", 1), SPECEE_ERR_BUNDLE, "model.n_layer must be an integer in 2 ..");
    CHECK_ERROR(with("/model/n_layer", 8.5), SPECEE_ERR_BUNDLE, "model.n_layer must be an integer");
    CHECK_ERROR(with("/model/n_embd", 0), SPECEE_ERR_BUNDLE, "model.n_embd must be");
    CHECK_ERROR(with("/model/n_embd", 1ull << 40), SPECEE_ERR_BUNDLE, "model.n_embd must be");
    CHECK_ERROR(with("/model/n_embd", 1ull << 63), SPECEE_ERR_BUNDLE, "model.n_embd must be");
    CHECK_ERROR(with("/model/n_vocab", -1), SPECEE_ERR_BUNDLE, "model.n_vocab must be");
    CHECK_ERROR(with("/model/n_vocab", -(1ll << 40)), SPECEE_ERR_BUNDLE, "model.n_vocab must be");
    CHECK_ERROR(with("/k", 0), SPECEE_ERR_BUNDLE, "k must be an integer in 1 .. 16");
    CHECK_ERROR(with("/k", 17), SPECEE_ERR_BUNDLE, "k must be an integer in 1 .. 16");
    CHECK_ERROR(with("/max_pending", 0), SPECEE_ERR_BUNDLE, "max_pending must be an integer in 1 ..");
    CHECK_ERROR(with("/probes", nlohmann::json::array()), SPECEE_ERR_BUNDLE, "probes must be an array of at least one");
    CHECK_ERROR(with("/probes", "none"), SPECEE_ERR_BUNDLE, "probes must be an array");
    CHECK_ERROR(with("/probes/1", nullptr), SPECEE_ERR_BUNDLE, "probes[1] must be an object");
    CHECK_ERROR(with("/probes/0/layer", 0), SPECEE_ERR_BUNDLE, "probes[0].layer must be an integer in 1 .. 7");
    CHECK_ERROR(with("/probes/2/layer", 8), SPECEE_ERR_BUNDLE, "probes[2].layer must be an integer in 1 .. 7");
    CHECK_ERROR(with("/probes/1/layer", 3), SPECEE_ERR_BUNDLE, "probes[1].layer must be larger than the one before");
    CHECK_ERROR(with("/probes/1/layer", 2), SPECEE_ERR_BUNDLE, "probes[1].layer must be larger than the one before");
    CHECK_ERROR(without("/probes/1", "threshold_exact"), SPECEE_ERR_BUNDLE, "probes[1].threshold_exact is missing");
    CHECK_ERROR(with("/probes/0/threshold_exact", "high"), SPECEE_ERR_BUNDLE, "threshold_exact must be a finite");
    CHECK_ERROR(with("/probes/0/threshold_exact", 1e300), SPECEE_ERR_BUNDLE, "threshold_exact must be a finite");
    CHECK_ERROR(with("/probes/0/threshold_calibrated", -0.5), SPECEE_ERR_BUNDLE, "threshold_calibrated must be");
    CHECK_ERROR(with("/probes/0/predictor", "../p.onnx"), SPECEE_ERR_BUNDLE, "must be a plain file name");
    CHECK_ERROR(with("/probes/0/predictor", ".."), SPECEE_ERR_BUNDLE, "must be a plain file name");
    CHECK_ERROR(with("/probes/0/predictor", "/etc/passwd"), SPECEE_ERR_BUNDLE, "must be a plain file name");
    CHECK_ERROR(with("/probes/0/predictor", "a\nb\x1b"), SPECEE_ERR_BUNDLE, "is \"a\\x0ab\\x1b\"");
    CHECK_ERROR(with("/probes/0/predictor", "gone.onnx"), SPECEE_ERR_BUNDLE, "\"gone.onnx\", which is missing");
}

static void test_text_failures() {
    temporary_dir      dir;
    const bundle_files files = sound();
    const std::string  path  = dir / "b.specee";
    const auto         load  = [&](const char * file, const std::string & bytes) {
        files.write(path);
        write_file(path + "/" + file, bytes);
        return bundle::load(path);
    };
    CHECK_ERROR(load("manifest.json", ""), SPECEE_ERR_BUNDLE, "manifest.json: not valid JSON");
    CHECK_ERROR(load("manifest.json", "{\"format\": NaN}"), SPECEE_ERR_BUNDLE, "manifest.json: not valid JSON");
    CHECK_ERROR(load("manifest.json", "[1]"), SPECEE_ERR_BUNDLE, "manifest.json:  must be an object");
    CHECK_ERROR(load("manifest.json", std::string(1 << 20, '[')), SPECEE_ERR_BUNDLE, "not valid JSON");
    CHECK_ERROR(load("manifest.json", std::string(5 << 20, ' ')), SPECEE_ERR_BUNDLE, "more than the");
    CHECK_ERROR(load("translators.safetensors", ""), SPECEE_ERR_BUNDLE, "translators.safetensors: too short");
    CHECK_ERROR(load("head.safetensors", "0123456789"), SPECEE_ERR_BUNDLE, "head.safetensors: the header's length");
    files.write(path);
    std::filesystem::remove(std::filesystem::u8path(path + "/manifest.json"));
    CHECK_ERROR(bundle::load(path), SPECEE_ERR_BUNDLE, "manifest.json: no such file");
    files.write(path);
    std::filesystem::remove(std::filesystem::u8path(path + "/head.safetensors"));
    CHECK_ERROR(bundle::load(path), SPECEE_ERR_BUNDLE, "head.safetensors: no such file");
    CHECK_ERROR(bundle::load(path + "/manifest.json"), SPECEE_ERR_BUNDLE, "no such bundle folder");
}

static void test_tensor_failures() {
    const auto translator = [](const char * name, const char * dtype, const std::vector<int64_t> & shape,
                               size_t n_bytes) {
        return load_changed(
            [&](bundle_files & f) { f.translators[name] = {dtype, shape, std::string(n_bytes, '\0')}; });
    };
    CHECK_ERROR(load_changed([](bundle_files & f) { f.translators.erase("layer_5.u"); }), SPECEE_ERR_BUNDLE,
                "tensor layer_5.u is missing");
    CHECK_ERROR(translator("layer_5.v", "F32", {8, 32}, 8 * 32 * 4), SPECEE_ERR_BUNDLE,
                "tensor layer_5.v must be F16 [-1, 32] (-1: any), is F32 [8, 32]");
    CHECK_ERROR(translator("layer_5.v", "F16", {8, 31}, 8 * 31 * 2), SPECEE_ERR_BUNDLE, "layer_5.v must be F16");
    CHECK_ERROR(translator("layer_5.v", "F16", {256}, 256 * 2), SPECEE_ERR_BUNDLE, "layer_5.v must be F16");
    CHECK_ERROR(translator("layer_5.v", "F16", {0, 32}, 0), SPECEE_ERR_BUNDLE, "layer_5.v has rank 0");
    CHECK_ERROR(translator("layer_5.v", "F16", {33, 32}, 33 * 64), SPECEE_ERR_BUNDLE, "layer_5.v has rank 33");
    CHECK_ERROR(translator("layer_5.v", "F16", {9, 32}, 9 * 64), SPECEE_ERR_BUNDLE, "layer_5.u must be F16 [32, 9]");
    CHECK_ERROR(translator("layer_5.b", "F16", {1}, 2), SPECEE_ERR_BUNDLE, "layer_5.b must be F16 [32]");
    CHECK_ERROR(load_changed([](bundle_files & f) {
                    f.translators["layer_5.b"].data = raw_bytes(std::vector<uint16_t>(32, 0x7e00));
                }),
                SPECEE_ERR_BUNDLE, "layer_5.b holds a value that is not finite");

    const auto lens = [](const std::vector<int32_t> & ids) {
        return load_changed([&](bundle_files & f) { f.set_lens(ids); });
    };
    CHECK_EQ(lens({0, 5, 62, 63}).lens_ids.size(), 4u);
    CHECK_ERROR(lens({0, 5, 63}), SPECEE_ERR_BUNDLE, "lens_ids holds 3 ids, fewer than the k = 4");
    CHECK_ERROR(lens({}), SPECEE_ERR_BUNDLE, "lens_ids holds 0 ids");
    CHECK_ERROR(lens({0, 5, 63, 64}), SPECEE_ERR_BUNDLE, "but 64 follows 63");
    CHECK_ERROR(lens({-1, 5, 62, 63}), SPECEE_ERR_BUNDLE, "but -1 follows -1");
    CHECK_ERROR(lens({0, 5, 5, 63}), SPECEE_ERR_BUNDLE, "but 5 follows 5");
    CHECK_ERROR(lens({0, 6, 5, 63}), SPECEE_ERR_BUNDLE, "but 5 follows 6");
    CHECK_ERROR(load_changed([](bundle_files & f) { f.head.clear(); }), SPECEE_ERR_BUNDLE, "lens_ids is missing");
    CHECK_ERROR(load_changed([](bundle_files & f) { f.head["lens_ids"].dtype = "U32"; }), SPECEE_ERR_BUNDLE,
                "lens_ids must be I32");
}

// A safetensors file with that header, and n zero bytes of data.
static std::string with_header(const std::string & header, size_t n_data) {
    std::string out;
    for (int i = 0; i < 8; ++i) {
        out += static_cast<char>(static_cast<uint64_t>(header.size()) >> (8 * i));
    }
    return out + header + std::string(n_data, '\0');
}

static void test_safetensors() {
    temporary_dir     dir;
    const std::string path = dir / "t.safetensors";
    const auto        read = [&](const std::string & bytes) {
        write_file(path, bytes);
        return read_safetensors(path);
    };
    const auto entry = [&](const char * text, size_t n_data) {
        return read(with_header(std::string("{\"t\":") + text + "}", n_data));
    };

    const auto two = read(with_header("{\"__metadata__\":{\"a\":\"b\"},\"x\":{\"dtype\":\"I32\",\"shape\":[2],"
                                      "\"data_offsets\":[4,12]},\"y\":{\"dtype\":\"F32\",\"shape\":[],"
                                      "\"data_offsets\":[0,4]}}  ",
                                      12));
    CHECK_EQ(two.size(), 2u);
    CHECK_EQ(two.at("x").data.size(), 8u);
    CHECK_EQ(two.at("x").shape.size(), 1u);
    CHECK_EQ(two.at("y").shape.size(), 0u);
    CHECK_EQ(read(with_header("{}", 0)).size(), 0u);

    CHECK_ERROR(read("1234567"), SPECEE_ERR_BUNDLE, "too short");
    CHECK_ERROR(read(std::string(8, '\xff')), SPECEE_ERR_BUNDLE, "the header's length, 18446744073709551615");
    CHECK_ERROR(read(with_header(std::string(2 << 20, ' '), 0)), SPECEE_ERR_BUNDLE, "exceeds the file or 1 MiB");
    CHECK_ERROR(read(with_header(std::string(1 << 20, '['), 0)), SPECEE_ERR_BUNDLE, "the header is not a JSON object");
    CHECK_ERROR(read(with_header("", 0)), SPECEE_ERR_BUNDLE, "the header is not a JSON object");
    CHECK_ERROR(read(with_header("{}", 1)), SPECEE_ERR_BUNDLE, "1 bytes belong to no tensor");
    CHECK_ERROR(entry("3", 0), SPECEE_ERR_BUNDLE, "tensor \"t\": dtype must be a string");
    CHECK_ERROR(entry(R"({"dtype":"Q7","shape":[1],"data_offsets":[0,1]})", 1), SPECEE_ERR_BUNDLE, "dtype \"Q7\"");
    CHECK_ERROR(entry(R"({"dtype":"I8","data_offsets":[0,1]})", 1), SPECEE_ERR_BUNDLE, "shape must be an array");
    CHECK_ERROR(entry(R"({"dtype":"I8","shape":[-1],"data_offsets":[0,1]})", 1), SPECEE_ERR_BUNDLE, "shape must hold");
    CHECK_ERROR(entry(R"({"dtype":"I8","shape":[1.0],"data_offsets":[0,1]})", 1), SPECEE_ERR_BUNDLE, "shape must hold");
    CHECK_ERROR(entry(R"({"dtype":"I8","shape":[18446744073709551615],"data_offsets":[0,1]})", 1), SPECEE_ERR_BUNDLE,
                "shape must hold");
    CHECK_ERROR(entry(R"({"dtype":"I8","shape":[1],"data_offsets":[1,0]})", 1), SPECEE_ERR_BUNDLE, "outside the file");
    CHECK_ERROR(entry(R"({"dtype":"I8","shape":[1],"data_offsets":[0]})", 1), SPECEE_ERR_BUNDLE, "outside the file");
    CHECK_ERROR(entry(R"({"dtype":"I8","shape":[2],"data_offsets":[0,2]})", 1), SPECEE_ERR_BUNDLE, "outside the file");
    CHECK_ERROR(entry(R"({"dtype":"I16","shape":[1],"data_offsets":[0,1]})", 1), SPECEE_ERR_BUNDLE, "does not match");
    CHECK_ERROR(entry(R"({"dtype":"I64","shape":[2305843009213693952],"data_offsets":[0,0]})", 0), SPECEE_ERR_BUNDLE,
                "does not match"); // 2^61 x 8 bytes is 0 when it overflows
    CHECK_ERROR(entry(R"({"dtype":"I8","shape":[4294967296,4294967296],"data_offsets":[0,0]})", 0), SPECEE_ERR_BUNDLE,
                "does not match");
    CHECK_ERROR(entry(R"({"dtype":"I8","shape":[1],"data_offsets":[1,2]})", 2), SPECEE_ERR_BUNDLE, "hole at byte 0");
    CHECK_ERROR(read(with_header(R"({"a":{"dtype":"I8","shape":[2],"data_offsets":[0,2]},)"
                                 R"("b":{"dtype":"I8","shape":[2],"data_offsets":[1,3]}})",
                                 3)),
                SPECEE_ERR_BUNDLE, "overlap or leave a hole at byte 1");
}

// Damaged files: whatever is done to the bytes, the answer is a bundle or an error, never a crash (the sanitizers
// watch).
static void test_damaged_files() {
    temporary_dir      dir;
    const std::string  path    = dir / "b.specee";
    const char * const names[] = {"manifest.json", "translators.safetensors", "head.safetensors"};
    const bundle_files files("llama", 8, 32, 64, {3}, 4, 2);
    files.write(path);
    std::vector<std::string> originals;
    for (const char * name : names) {
        originals.push_back(read_text(path + "/" + name));
    }

    random_numbers random(2024);
    int            n_loaded = 0, n_refused = 0, n_other = 0;
    for (int round = 0; round < 6000; ++round) {
        const size_t i     = static_cast<size_t>(random.below(3));
        std::string  bytes = originals[i];
        // the first part holds the numbers that a reader may trust, so most of the damage goes there
        const uint64_t reach = random.below(4) ? std::min<uint64_t>(bytes.size(), 400) : bytes.size();
        for (uint64_t n = 1 + random.below(3); n > 0 && !bytes.empty(); --n) {
            const size_t at = static_cast<size_t>(random.below(std::min<uint64_t>(reach, bytes.size())));
            switch (random.below(6)) {
                case 0: bytes[at] = static_cast<char>(random.below(256)); break;
                case 1: bytes[at] = static_cast<char>(bytes[at] ^ 1 << random.below(8)); break;
                case 2: bytes[at] = "0123456789-.eE[]{},:\"\\"[random.below(22)]; break;
                case 3: bytes.erase(at, static_cast<size_t>(1 + random.below(16))); break;
                case 4: bytes.insert(at, bytes.substr(at, static_cast<size_t>(random.below(32)))); break;
                case 5: bytes.resize(at); break;
            }
        }
        write_file(path + "/" + names[i], bytes);
        try {
            const bundle b = bundle::load(path);
            n_loaded += b.probes.size() == 1;
        } catch (const specee::error & e) {
            n_refused += e.status == SPECEE_ERR_BUNDLE && std::string(e.what()).find('\n') == std::string::npos;
        } catch (const std::exception & e) {
            ++n_other;
            std::fprintf(stderr, "round %d, %s: %s\n", round, names[i], e.what());
        }
        write_file(path + "/" + names[i], originals[i]);
    }
    CHECK_EQ(n_other, 0);
    CHECK_EQ(n_loaded + n_refused, 6000);
    CHECK(n_refused > 2000);
    CHECK(n_loaded > 200); // a change in a weight or in an unknown field is no damage that can be seen
}

int main() {
    return run({{"load", test_load},
                {"path with letters", test_path_with_letters},
                {"manifest failures", test_manifest_failures},
                {"text failures", test_text_failures},
                {"tensor failures", test_tensor_failures},
                {"safetensors", test_safetensors},
                {"damaged files", test_damaged_files}});
}
