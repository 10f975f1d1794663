#include "head.h"

#include "error.h"
#include "ggml-cpu.h"
#include "gguf.h"
#include "llama-ext.h"
#include "llama-mmap.h"

#include <cstring>

namespace specee {

namespace {

ggml_context_ptr make_context(size_t n_tensors) {
    return ggml_context_ptr(ggml_init({n_tensors * ggml_tensor_overhead(), nullptr, true}));
}

// The file that holds the tensor: the GGUF itself or one of its shards.
std::string find_shard(const std::string & model_path, const gguf_context * gguf, const char * name) {
    if (gguf_find_tensor(gguf, name) >= 0) {
        return model_path;
    }
    const int64_t key     = gguf_find_key(gguf, "split.count");
    const int     n_split = key < 0 ? 0 : gguf_get_val_u16(gguf, key);
    char          prefix[4096];
    char          path[4096];
    if (n_split > 1 && llama_split_prefix(prefix, sizeof(prefix), model_path.c_str(), 0, n_split) > 0) {
        for (int i = 1; i < n_split; ++i) {
            llama_split_path(path, sizeof(path), prefix, i, n_split);
            gguf_context_ptr shard(gguf_init_from_file(path, {true, nullptr}));
            if (shard && gguf_find_tensor(shard.get(), name) >= 0) {
                return path;
            }
        }
    }
    throw error(SPECEE_ERR_IO,
                model_path + ": has no tensor " + name + "; is it the file that the model was loaded from?");
}

} // namespace

head::head(const llama_model * model, const std::string & model_path) : ctx(make_context(2)) {
    if (llama_model_get_tensor(model, "output.bias")) {
        throw error(SPECEE_ERR_UNSUPPORTED, "the model's LM head has a bias; exits do not support that yet");
    }

    const char *        name   = "output.weight";
    const ggml_tensor * weight = llama_model_get_tensor(model, name);
    if (!weight) { // tied
        name   = "token_embd.weight";
        weight = llama_model_get_tensor(model, name);
    }
    if (!weight) {
        throw error(SPECEE_ERR_UNSUPPORTED, "the model has neither an output.weight nor a token_embd.weight");
    }

    if (weight->buffer && ggml_backend_buffer_is_host(weight->buffer)) {
        rows_ = const_cast<ggml_tensor *>(weight);
        return;
    }

    map_from_file(model_path, name);
    if (rows_->type != weight->type || rows_->ne[0] != weight->ne[0] || rows_->ne[1] != weight->ne[1]) {
        throw error(SPECEE_ERR_IO, model_path + ": is not the file that the model was loaded from");
    }
}

head::~head() = default;

// A head that was repacked for its matrix kernels cannot be read by rows. The file's pages are in the page cache
// anyway, and only the pages of rows that are candidates are ever touched.
void head::map_from_file(const std::string & model_path, const char * name) {
    gguf_context_ptr gguf(gguf_init_from_file(model_path.c_str(), {true, nullptr}));
    if (!gguf) {
        throw error(SPECEE_ERR_IO, model_path + ": cannot be read again for the rows of the LM head");
    }

    const std::string path = find_shard(model_path, gguf.get(), name);

    ggml_context * shapes = nullptr;
    gguf.reset(gguf_init_from_file(path.c_str(), {true, &shapes}));
    ggml_context_ptr shapes_ptr(shapes);
    if (!gguf) {
        throw error(SPECEE_ERR_IO, path + ": cannot be read again for the rows of the LM head");
    }

    const ggml_tensor * shape = ggml_get_tensor(shapes, name);
    const size_t        offset =
        gguf_get_data_offset(gguf.get()) + gguf_get_tensor_offset(gguf.get(), gguf_find_tensor(gguf.get(), name));

    try {
        llama_file file(path.c_str(), "rb");
        if (offset + ggml_nbytes(shape) > file.size()) {
            throw error(SPECEE_ERR_IO, path + ": is truncated");
        }
        map = std::make_unique<llama_mmap>(&file, 0);
    } catch (const error &) {
        throw;
    } catch (const std::exception & err) {
        throw error(SPECEE_ERR_IO, path + ": cannot be mapped: " + err.what());
    }

    map_buffer.reset(ggml_backend_cpu_buffer_from_ptr(map->addr(), map->size()));
    rows_ = ggml_new_tensor_2d(ctx.get(), shape->type, shape->ne[0], shape->ne[1]);
    ggml_backend_tensor_alloc(map_buffer.get(), rows_, static_cast<uint8_t *>(map->addr()) + offset);
}

void head::copy_lens(const std::vector<int32_t> & ids) {
    lens_ = ggml_new_tensor_2d(ctx.get(), rows_->type, rows_->ne[0], ids.size());
    lens_buffer.reset(ggml_backend_buft_alloc_buffer(ggml_backend_cpu_buffer_type(), ggml_nbytes(lens_)));
    if (!lens_buffer) {
        throw error(SPECEE_ERR_NO_MEMORY, "no memory for the lens vocabulary");
    }
    ggml_backend_tensor_alloc(lens_buffer.get(), lens_, ggml_backend_buffer_get_base(lens_buffer.get()));

    const size_t    row_size = rows_->nb[1];
    const uint8_t * src      = static_cast<const uint8_t *>(rows_->data);
    uint8_t *       dst      = static_cast<uint8_t *>(lens_->data);
    for (size_t i = 0; i < ids.size(); ++i) {
        memcpy(dst + i * row_size, src + ids[i] * row_size, row_size);
    }
}

} // namespace specee
