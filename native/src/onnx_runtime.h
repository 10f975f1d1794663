// onnx_runtime.h - ONNX Runtime through its C ABI, from a library that is named at run time.
//
// The wheel brings the library without a header, so the few functions of its versioned, append-only table that are
// needed here are declared in onnx_runtime.cpp.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace specee {

struct ort_functions;

// The loaded library and its environment. Sessions share it and must not outlive it.
class onnx_runtime {
  public:
    // Throws error{SPECEE_ERR_ONNX, ...} when the library cannot be loaded or is no (or too old an) ONNX Runtime.
    explicit onnx_runtime(const std::string & library_path);
    ~onnx_runtime();

    onnx_runtime(const onnx_runtime &)             = delete;
    onnx_runtime & operator=(const onnx_runtime &) = delete;

    const std::string & version() const; // of the library, such as "1.32.0"

  private:
    friend class onnx_session;

    std::unique_ptr<ort_functions> ort;
};

// One model with a single float32 input [n, n_in] and a single float32 output [n, 1], run on one thread.
class onnx_session {
  public:
    // Throws error{SPECEE_ERR_ONNX, ...} when the file is missing, corrupt or of another shape.
    onnx_session(const onnx_runtime & runtime, const std::string & model_path);
    ~onnx_session();

    onnx_session(const onnx_session &)             = delete;
    onnx_session & operator=(const onnx_session &) = delete;

    int64_t n_in() const;

    // x: [n, n_in], p: [n], n >= 1. The tensors of the last n are kept: calling with the same n again allocates nothing
    // here.
    void run(const float * x, int64_t n, float * p);

  private:
    struct impl;
    std::unique_ptr<impl> self;
};

} // namespace specee
