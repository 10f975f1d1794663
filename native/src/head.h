// head.h - the rows of the model's LM head, readable one by one, and a copy of the lens vocabulary's rows.
#pragma once

#include "ggml-cpp.h"

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

struct llama_mmap;
struct llama_model;

namespace specee {

class head {
  public:
    // model_path: UTF-8 path of the GGUF (its first shard), read only where the loaded head is repacked for its
    // kernels. Throws error{SPECEE_ERR_UNSUPPORTED, ...} for a head with a bias, error{SPECEE_ERR_IO, ...} for an
    // unreadable file.
    head(const llama_model * model, const std::string & model_path);
    ~head();

    head(const head &)             = delete;
    head & operator=(const head &) = delete;

    ggml_tensor * rows() const { return rows_; } // [n_embd, n_vocab], in place: quantized, host memory, row after row
    ggml_tensor * lens() const { return lens_; } // [n_embd, n_lens], of the same type

    void copy_lens(const std::vector<int32_t> & ids);

  private:
    void map_from_file(const std::string & model_path, const char * name);

    ggml_context_ptr            ctx;
    ggml_backend_buffer_ptr     map_buffer;
    ggml_backend_buffer_ptr     lens_buffer;
    std::unique_ptr<llama_mmap> map;

    ggml_tensor * rows_ = nullptr;
    ggml_tensor * lens_ = nullptr;
};

} // namespace specee
