// onnx_file.h - writes small ONNX models by hand, and computes the predictors' one in plain C++.
//
// ONNX files are protobuf messages (https://github.com/onnx/onnx, onnx.proto); the few fields that a small MLP needs
// are encoded here, so that the native tests need no Python.
#pragma once

#include "check.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

namespace specee_test {

// p = sigmoid(relu(x w1 + b1) w2 + b2)
struct mlp {
    int64_t            n_in;
    int64_t            n_hidden;
    std::vector<float> w1; // [n_in, n_hidden]
    std::vector<float> b1; // [n_hidden]
    std::vector<float> w2; // [n_hidden, 1]
    std::vector<float> b2; // [1]

    mlp(int64_t n_in, int64_t n_hidden, uint64_t seed) : n_in(n_in), n_hidden(n_hidden) {
        random_numbers random(seed);
        const auto     fill = [&](std::vector<float> & v, int64_t n, float scale) {
            for (int64_t i = 0; i < n; ++i) {
                v.push_back(scale * random.normal());
            }
        };
        fill(w1, n_in * n_hidden, 1.0f / std::sqrt(static_cast<float>(n_in)));
        fill(b1, n_hidden, 0.1f);
        fill(w2, n_hidden, 2.0f / std::sqrt(static_cast<float>(n_hidden)));
        fill(b2, 1, 0.1f);
    }

    float forward(const float * x) const {
        double logit = b2[0];
        for (int64_t h = 0; h < n_hidden; ++h) {
            double sum = b1[h];
            for (int64_t i = 0; i < n_in; ++i) {
                sum += static_cast<double>(x[i]) * w1[i * n_hidden + h];
            }
            logit += std::max(sum, 0.0) * w2[h];
        }
        return static_cast<float>(1.0 / (1.0 + std::exp(-logit)));
    }
};

namespace onnx {

const int32_t FLOAT  = 1;
const int32_t DOUBLE = 11;

inline std::string varint(uint64_t value) {
    std::string out;
    for (; value >= 0x80; value >>= 7) {
        out += static_cast<char>(value | 0x80);
    }
    return out + static_cast<char>(value);
}

inline std::string number(int field, uint64_t value) {
    return varint(static_cast<uint64_t>(field) << 3) + varint(value);
}

inline std::string bytes(int field, const std::string & value) {
    return varint(static_cast<uint64_t>(field) << 3 | 2) + varint(value.size()) + value;
}

inline std::string node(const std::string & op, const std::vector<std::string> & in, const std::string & out) {
    std::string message;
    for (const std::string & name : in) {
        message += bytes(1, name);
    }
    return bytes(1, message + bytes(2, out) + bytes(4, op)); // GraphProto.node
}

inline std::string initializer(const std::string & name, const std::vector<int64_t> & dims,
                               const std::vector<float> & data) {
    std::string message;
    for (const int64_t dim : dims) {
        message += number(1, static_cast<uint64_t>(dim));
    }
    std::string raw(data.size() * sizeof(float), '\0');
    std::memcpy(&raw[0], data.data(), raw.size());
    return bytes(5, message + number(2, FLOAT) + bytes(8, name) + bytes(9, raw)); // GraphProto.initializer
}

// A ValueInfoProto as GraphProto.input or .output; a dimension of 0 is free.
inline std::string value(bool input, const std::string & name, const std::vector<int64_t> & dims, int32_t type) {
    std::string shape;
    for (const int64_t dim : dims) {
        shape += bytes(1, dim ? number(1, static_cast<uint64_t>(dim)) : bytes(2, "n"));
    }
    const std::string tensor = number(1, static_cast<uint64_t>(type)) + bytes(2, shape);
    return bytes(input ? 11 : 12, bytes(1, name) + bytes(2, bytes(1, tensor)));
}

// ModelProto: ir_version 8, the graph, opset 13
inline std::string model(const std::string & graph) {
    return number(1, 8) + bytes(7, bytes(2, "predictor") + graph) + bytes(8, bytes(1, "") + number(2, 13));
}

} // namespace onnx

// n: a fixed number of rows, 0: any
inline std::string mlp_bytes(const mlp & m, const std::string & input = "features", const std::string & output = "p",
                             int64_t n = 0) {
    return onnx::model(onnx::node("Gemm", {input, "w1", "b1"}, "hidden") + onnx::node("Relu", {"hidden"}, "active") +
                       onnx::node("Gemm", {"active", "w2", "b2"}, "logit") + onnx::node("Sigmoid", {"logit"}, output) +
                       onnx::initializer("w1", {m.n_in, m.n_hidden}, m.w1) +
                       onnx::initializer("b1", {m.n_hidden}, m.b1) + onnx::initializer("w2", {m.n_hidden, 1}, m.w2) +
                       onnx::initializer("b2", {1}, m.b2) + onnx::value(true, input, {n, m.n_in}, onnx::FLOAT) +
                       onnx::value(false, output, {n, 1}, onnx::FLOAT));
}

// A predictor whose p is the same for any features: to force or forbid exits.
inline std::string constant_bytes(int64_t n_in, float p) {
    mlp m(n_in, 1, 1);
    std::fill(m.w2.begin(), m.w2.end(), 0.0f);
    m.b2[0] = std::log(p / (1.0f - p));
    return mlp_bytes(m);
}

// p = relu(features), of any shape and type
inline std::string relu_bytes(const std::vector<int64_t> & dims, int32_t type) {
    return onnx::model(onnx::node("Relu", {"features"}, "p") + onnx::value(true, "features", dims, type) +
                       onnx::value(false, "p", dims, type));
}

} // namespace specee_test
