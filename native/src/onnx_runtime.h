// onnx_runtime.h - ONNX Runtime through its C ABI, from a library that is named at run time.
//
// The wheel brings the library without a header, so the few functions of its versioned, append-only table that are
// needed here are declared in onnx_runtime.cpp.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

namespace specee {

// The loaded library and its environment. It must outlive its sessions. The library stays in the process for good.
class onnx_runtime {
  public:
    // Throws error{SPECEE_ERR_ONNX, ...} when the library cannot be loaded or is no ONNX Runtime.
    explicit onnx_runtime(const std::string & library_path);
    ~onnx_runtime();

    onnx_runtime(const onnx_runtime &)             = delete;
    onnx_runtime & operator=(const onnx_runtime &) = delete;

    const std::string & version() const; // of the library, such as "1.32.0"

  private:
    friend class onnx_session;
    struct impl;
    std::unique_ptr<impl> self;
};

// A model with one float32 input "features" [n, n_in] and one float32 output "p" [n, 1], run on the calling thread.
class onnx_session {
  public:
    // Throws error{SPECEE_ERR_ONNX, ...} when the file is missing, corrupt or of another shape.
    onnx_session(const onnx_runtime & runtime, const std::string & model_path);
    ~onnx_session();

    onnx_session(const onnx_session &)             = delete;
    onnx_session & operator=(const onnx_session &) = delete;

    int64_t n_in() const;

    // x: [n, n_in], p: [n], n >= 1. The tensors of the last n are kept: the same n again allocates nothing here.
    // Throws error{SPECEE_ERR_ONNX, ...}.
    void run(const float * x, int64_t n, float * p);

  private:
    struct impl;
    std::unique_ptr<impl> self;
};

} // namespace specee
