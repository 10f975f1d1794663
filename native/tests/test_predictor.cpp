// The features against their definition, and p against a plain forward pass, over a whole bundle.
#include "predictor.h"

#include "bundle_files.h"
#include "check.h"

#include <limits>
#include <memory>

using namespace specee_test;
using specee::bundle;
using specee::onnx_runtime;
using specee::predictor;

static std::unique_ptr<onnx_runtime> runtime;

static void test_load() {
    runtime = std::make_unique<onnx_runtime>(need_env("SPECEE_TEST_ONNXRUNTIME"));
    CHECK(!runtime->version().empty());
}

static predictor make_predictor(const bundle_files & files) {
    temporary_dir dir;
    return predictor(*runtime, bundle::load(files.write(dir / "b.specee")));
}

static std::vector<double> softmax(const std::vector<float> & logits) {
    double max = logits[0], sum = 0.0;
    for (const float l : logits) {
        max = std::max(max, static_cast<double>(l));
    }
    std::vector<double> out;
    for (const float l : logits) {
        out.push_back(std::exp(l - max));
        sum += out.back();
    }
    for (double & p : out) {
        p /= sum;
    }
    return out;
}

static void test_features() {
    const predictor          p = make_predictor({"llama", 8, 32, 64, {3, 5}});
    predictor::history       history;
    std::vector<float>       out(12);
    const std::vector<float> first  = {1.0f, 3.0f, -2.0f, 0.5f};
    const std::vector<float> second = {2.0f, 2.5f, 0.0f, 4.0f};
    CHECK_EQ(p.n_feature(), 12);
    CHECK(history.empty());

    p.features(first.data(), history, out.data());
    const std::vector<double> p1 = softmax(first);
    for (size_t i = 0; i < 4; ++i) {
        CHECK(out[i] == first[i]);
        CHECK_NEAR(out[4 + i], p1[i], 1e-6);
        CHECK_NEAR(out[8 + i], p1[i], 1e-6); // no layer before: the softmax again
    }
    CHECK(!history.empty());

    p.features(second.data(), history, out.data());
    const std::vector<double> p2 = softmax(second);
    for (size_t i = 0; i < 4; ++i) {
        CHECK(out[i] == second[i]);
        CHECK_NEAR(out[4 + i], p2[i], 1e-6);
        CHECK_NEAR(out[8 + i], p2[i] - p1[i], 1e-6);
    }

    history.clear(); // the next token
    p.features(second.data(), history, out.data());
    CHECK_NEAR(out[8], p2[0], 1e-6);
}

static void test_extreme_logits() {
    const predictor          p = make_predictor({"llama", 8, 32, 64, {3}});
    predictor::history       history;
    std::vector<float>       out(12);
    const std::vector<float> huge = {3.0e38f, -3.0e38f, 3.0e38f, 0.0f};
    p.features(huge.data(), history, out.data());
    for (const float value : out) {
        CHECK(std::isfinite(value));
    }
    CHECK_NEAR(out[4], 0.5f, 1e-6f);
    CHECK(out[5] == 0.0f);
}

static void test_evaluate() {
    const bundle_files files("llama", 8, 32, 64, {2, 5, 7});
    predictor          p = make_predictor(files);
    random_numbers     random(5);
    const int32_t      layers[] = {2, 5, 7};
    for (const int64_t n : {1, 4, 1, 16}) {
        std::vector<float> x;
        for (int64_t i = 0; i < n * 12; ++i) {
            x.push_back(3.0f * random.normal());
        }
        for (size_t i_probe = 0; i_probe < 3; ++i_probe) {
            const mlp          m(12, 32, static_cast<uint64_t>(layers[i_probe])); // as bundle_files makes it
            std::vector<float> out(static_cast<size_t>(n), -1.0f);
            p.evaluate(i_probe, x.data(), n, out.data());
            for (size_t i = 0; i < out.size(); ++i) {
                CHECK_NEAR(out[i], m.forward(&x[i * 12]), 1e-5f);
            }
        }
    }
    // what is not a number stays so, and then exceeds no threshold
    const std::vector<float> nan(12, std::numeric_limits<float>::quiet_NaN());
    float                    out = 0.0f;
    p.evaluate(0, nan.data(), 1, &out);
    CHECK(!(out >= 0.0f));
}

static void test_other_k() {
    for (const int32_t k : {1, 8, 16}) {
        predictor          p = make_predictor({"llama", 4, 32, 64, {2}, k});
        predictor::history history;
        std::vector<float> logits(static_cast<size_t>(k), 1.0f), out(static_cast<size_t>(3 * k));
        p.features(logits.data(), history, out.data());
        CHECK_NEAR(out[static_cast<size_t>(k)], 1.0f / static_cast<float>(k), 1e-6f);
        float value = -1.0f;
        p.evaluate(0, out.data(), 1, &value);
        CHECK_NEAR(value, mlp(3 * k, 32, 2).forward(out.data()), 1e-5f);
    }
}

static void test_failures() {
    bundle_files files("llama", 8, 32, 64, {3, 5});
    files.predictors["predictor_5.onnx"] = mlp_bytes(mlp(9, 8, 1));
    CHECK_ERROR(make_predictor(files), SPECEE_ERR_BUNDLE,
                "predictor_5.onnx: takes 9 features, but the bundle's k = 4 makes 12");
    files.predictors["predictor_5.onnx"] = "garbage";
    CHECK_ERROR(make_predictor(files), SPECEE_ERR_ONNX, "predictor_5.onnx: ");
}

int main() {
    return run({{"load", test_load},
                {"features", test_features},
                {"extreme logits", test_extreme_logits},
                {"evaluate", test_evaluate},
                {"other k", test_other_k},
                {"failures", test_failures}});
}
