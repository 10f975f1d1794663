// ONNX Runtime through our own declaration of its C ABI: values, every failure, no growth.
#include "check.h"
#include "onnx_file.h"
#include "onnx_runtime.h"

#include <memory>

using namespace specee_test;
using specee::onnx_runtime;
using specee::onnx_session;

static std::unique_ptr<onnx_runtime> runtime;

static std::vector<float> random_features(int64_t n, uint64_t seed) {
    random_numbers     random(seed);
    std::vector<float> x;
    for (int64_t i = 0; i < n; ++i) {
        x.push_back(5.0f * random.normal());
    }
    return x;
}

static void test_load() {
    runtime = std::make_unique<onnx_runtime>(need_env("SPECEE_TEST_ONNXRUNTIME"));
    CHECK(runtime->version().find('.') != std::string::npos);
}

static void test_library_failures() {
    temporary_dir dir;
    CHECK_ERROR(onnx_runtime(dir / "missing.so"), SPECEE_ERR_ONNX, "missing.so: no such ONNX Runtime library");
    write_file(dir / "text.so", "this is no library");
    CHECK_ERROR(onnx_runtime(dir / "text.so"), SPECEE_ERR_ONNX, "text.so: cannot be loaded");
    // a sound library, but another one
    CHECK_ERROR(onnx_runtime(need_env("SPECEE_TEST_OTHER_LIBRARY")), SPECEE_ERR_ONNX, "it has no OrtGetApiBase");
}

static void test_agrees_with_plain_code() {
    temporary_dir dir;
    const mlp     m(12, 512, 7);
    write_file(dir / "p.onnx", mlp_bytes(m));
    onnx_session session(*runtime, dir / "p.onnx");
    CHECK_EQ(session.n_in(), 12);

    float low = 1.0f, high = 0.0f;
    for (int64_t n = 1; n <= 16; ++n) {
        const std::vector<float> x = random_features(n * 12, static_cast<uint64_t>(n));
        std::vector<float>       p(static_cast<size_t>(n), -1.0f);
        session.run(x.data(), n, p.data());
        for (int64_t i = 0; i < n; ++i) {
            CHECK_NEAR(p[static_cast<size_t>(i)], m.forward(&x[static_cast<size_t>(i * 12)]), 1e-5f);
            low  = std::min(low, p[static_cast<size_t>(i)]);
            high = std::max(high, p[static_cast<size_t>(i)]);
        }
    }
    CHECK(low < 0.2f && high > 0.8f); // the values above were worth comparing
}

// The kept tensors must follow a changing n and a second session must not disturb the first.
static void test_changing_batches_and_sessions() {
    temporary_dir dir;
    const mlp     a(12, 512, 1), b(6, 64, 2);
    write_file(dir / "a.onnx", mlp_bytes(a));
    write_file(dir / "b.onnx", mlp_bytes(b));
    onnx_session sa(*runtime, dir / "a.onnx"), sb(*runtime, dir / "b.onnx");
    CHECK_EQ(sb.n_in(), 6);
    for (const int64_t n : {1, 1, 3, 16, 2, 2, 1, 16}) {
        const std::vector<float> x = random_features(n * 12, static_cast<uint64_t>(100 + n));
        std::vector<float>       pa(static_cast<size_t>(n)), pb(static_cast<size_t>(n));
        sa.run(x.data(), n, pa.data());
        sb.run(x.data(), n, pb.data());
        for (size_t i = 0; i < static_cast<size_t>(n); ++i) {
            CHECK_NEAR(pa[i], a.forward(&x[i * 12]), 1e-5f);
            CHECK_NEAR(pb[i], b.forward(&x[i * 6]), 1e-5f);
        }
    }
}

static void test_second_runtime() {
    temporary_dir dir;
    write_file(dir / "p.onnx", constant_bytes(12, 0.25f));
    const onnx_runtime other(need_env("SPECEE_TEST_ONNXRUNTIME")); // the same library twice, as two sessions do
    onnx_session       session(other, dir / "p.onnx");
    const auto         x = random_features(12, 3);
    float              p = 0.0f;
    session.run(x.data(), 1, &p);
    CHECK_NEAR(p, 0.25f, 1e-6f);
}

static void test_model_failures() {
    temporary_dir     dir;
    const mlp         m(12, 16, 1);
    const std::string path = dir / "p.onnx";
    const auto        open = [&](const std::string & bytes) {
        write_file(path, bytes);
        onnx_session session(*runtime, path);
    };
    CHECK_ERROR(onnx_session(*runtime, dir / "no.onnx"), SPECEE_ERR_ONNX, "no.onnx: no such file");
    CHECK_ERROR(onnx_session(*runtime, dir.path()), SPECEE_ERR_ONNX, "not a regular file");
    CHECK_ERROR(open(""), SPECEE_ERR_ONNX, "p.onnx: ");
    CHECK_ERROR(open("no model at all"), SPECEE_ERR_ONNX, "p.onnx: ");
    CHECK_ERROR(open(mlp_bytes(m).substr(0, 300)), SPECEE_ERR_ONNX, "p.onnx: ");
    CHECK_ERROR(open(mlp_bytes(m, "x")), SPECEE_ERR_ONNX, "the input must be named \"features\", is \"x\"");
    CHECK_ERROR(open(mlp_bytes(m, "features", "y")), SPECEE_ERR_ONNX, "the output must be named \"p\", is \"y\"");
    CHECK_ERROR(open(mlp_bytes(m, "features", "p", 1)), SPECEE_ERR_ONNX, "the input must be float32 [n, columns]");
    CHECK_ERROR(open(relu_bytes({0, 12}, onnx::FLOAT)), SPECEE_ERR_ONNX, "the output must be [n, 1], is [n, 12]");
    CHECK_ERROR(open(relu_bytes({0, 1}, onnx::DOUBLE)), SPECEE_ERR_ONNX, "has element type 11");
    CHECK_ERROR(open(relu_bytes({0}, onnx::FLOAT)), SPECEE_ERR_ONNX, "and 1 dimensions");
    CHECK_ERROR(open(relu_bytes({0, 1, 1}, onnx::FLOAT)), SPECEE_ERR_ONNX, "and 3 dimensions");
    CHECK_ERROR(open(onnx::model(
                    onnx::node("Add", {"features", "more"}, "p") + onnx::value(true, "features", {0, 1}, onnx::FLOAT) +
                    onnx::value(true, "more", {0, 1}, onnx::FLOAT) + onnx::value(false, "p", {0, 1}, onnx::FLOAT))),
                SPECEE_ERR_ONNX, "must have one input and one output, has 2 and 1");
    CHECK_ERROR(open(onnx::model(onnx::node("NoSuchOperator", {"features"}, "p") +
                                 onnx::value(true, "features", {0, 1}, onnx::FLOAT) +
                                 onnx::value(false, "p", {0, 1}, onnx::FLOAT))),
                SPECEE_ERR_ONNX, "NoSuchOperator");
    open(mlp_bytes(m)); // the same path with a sound model loads
}

// A model whose real output has more rows than it declares fails in run(), and writes nothing beyond p.
static void test_wrong_output_at_run_time() {
    temporary_dir     dir;
    const std::string path = dir / "p.onnx";
    // Concat with the attribute axis = 0 (AttributeProto: name, i, type INT)
    const std::string node = onnx::bytes(
        1, onnx::bytes(1, "features") + onnx::bytes(1, "features") + onnx::bytes(2, "p") + onnx::bytes(4, "Concat") +
               onnx::bytes(5, onnx::bytes(1, "axis") + onnx::number(3, 0) + onnx::number(20, 2)));
    write_file(path, onnx::model(node + onnx::value(true, "features", {0, 1}, onnx::FLOAT) +
                                 onnx::value(false, "p", {0, 1}, onnx::FLOAT)));
    onnx_session session(*runtime, path);
    const float  x    = 1.0f;
    float        p[2] = {-1.0f, -1.0f};
    CHECK_ERROR(session.run(&x, 1, p), SPECEE_ERR_ONNX, "p.onnx: ");
    CHECK(p[1] == -1.0f);
}

int main() {
    return run({{"load", test_load},
                {"library failures", test_library_failures},
                {"agrees with plain code", test_agrees_with_plain_code},
                {"changing batches and sessions", test_changing_batches_and_sessions},
                {"second runtime", test_second_runtime},
                {"model failures", test_model_failures},
                {"wrong output at run time", test_wrong_output_at_run_time}});
}
