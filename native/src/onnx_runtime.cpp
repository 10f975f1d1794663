#include "onnx_runtime.h"

#include "error.h"
#include "file.h"

#include <cstddef>
#include <cstring>
#include <filesystem>
#include <vector>

#ifdef _WIN32
#define WIN32_LEAN_AND_MEAN
#include <windows.h>
#define ORT_CALL __stdcall
#else
#include <dlfcn.h>
#define ORT_CALL
#endif

namespace specee {

// ---- the part of ONNX Runtime's C ABI that is used ----
// The function table only ever grows at its end. Version 1 holds all we need, and every later library offers it. Gaps
// are functions that we do not call; the assertions below pin the positions.

struct ort_status;
struct ort_env;
struct ort_session;
struct ort_session_options;
struct ort_value;
struct ort_type_info;
struct ort_tensor_info;
struct ort_memory_info;
struct ort_allocator;
struct ort_run_options;

struct ort_api {
    using status = ort_status *; // null: success

    void * gap_0[2];
    const char *(ORT_CALL * get_error_message)(const ort_status *);
    status(ORT_CALL * create_env)(int log_level, const char * log_id, ort_env ** out);
    void * gap_4[2];
    status(ORT_CALL * disable_telemetry)(const ort_env *);
    void * gap_7;
    status(ORT_CALL * create_session_from_array)(const ort_env *, const void * model, size_t n_bytes,
                                                 const ort_session_options *, ort_session ** out);
    status(ORT_CALL * run)(ort_session *, const ort_run_options *, const char * const * in_names,
                           const ort_value * const * in, size_t n_in, const char * const * out_names, size_t n_out,
                           ort_value ** out);
    status(ORT_CALL * create_session_options)(ort_session_options ** out);
    void * gap_11[11];
    status(ORT_CALL * set_log_severity)(ort_session_options *, int level);
    status(ORT_CALL * set_graph_optimization)(ort_session_options *, int level);
    status(ORT_CALL * set_intra_op_threads)(ort_session_options *, int n);
    status(ORT_CALL * set_inter_op_threads)(ort_session_options *, int n);
    void * gap_26[4];
    status(ORT_CALL * input_count)(const ort_session *, size_t * out);
    status(ORT_CALL * output_count)(const ort_session *, size_t * out);
    void * gap_32;
    status(ORT_CALL * input_type)(const ort_session *, size_t i, ort_type_info ** out);
    status(ORT_CALL * output_type)(const ort_session *, size_t i, ort_type_info ** out);
    void * gap_35;
    status(ORT_CALL * input_name)(const ort_session *, size_t i, ort_allocator *, char ** out);
    status(ORT_CALL * output_name)(const ort_session *, size_t i, ort_allocator *, char ** out);
    void * gap_38[11];
    status(ORT_CALL * create_tensor_with_data)(const ort_memory_info *, void * data, size_t n_bytes,
                                               const int64_t * shape, size_t n_dim, int type, ort_value ** out);
    void * gap_50[5];
    status(ORT_CALL * cast_to_tensor_info)(const ort_type_info *, const ort_tensor_info ** out);
    void * gap_56[4];
    status(ORT_CALL * element_type)(const ort_tensor_info *, int * out);
    status(ORT_CALL * dimension_count)(const ort_tensor_info *, size_t * out);
    status(ORT_CALL * dimensions)(const ort_tensor_info *, int64_t * out, size_t n_dim);
    void * gap_63[6];
    status(ORT_CALL * create_cpu_memory_info)(int allocator, int memory, ort_memory_info ** out);
    void * gap_70[6];
    status(ORT_CALL * allocator_free)(ort_allocator *, void * p);
    void * gap_77;
    status(ORT_CALL * default_allocator)(ort_allocator ** out);
    void * gap_79[13];
    void(ORT_CALL * release_env)(ort_env *);
    void(ORT_CALL * release_status)(ort_status *);
    void(ORT_CALL * release_memory_info)(ort_memory_info *);
    void(ORT_CALL * release_session)(ort_session *);
    void(ORT_CALL * release_value)(ort_value *);
    void * gap_97;
    void(ORT_CALL * release_type_info)(ort_type_info *);
    void * gap_99;
    void(ORT_CALL * release_session_options)(ort_session_options *);
};

static_assert(offsetof(ort_api, run) == 9 * sizeof(void *), "");
static_assert(offsetof(ort_api, set_log_severity) == 22 * sizeof(void *), "");
static_assert(offsetof(ort_api, input_count) == 30 * sizeof(void *), "");
static_assert(offsetof(ort_api, create_tensor_with_data) == 49 * sizeof(void *), "");
static_assert(offsetof(ort_api, element_type) == 60 * sizeof(void *), "");
static_assert(offsetof(ort_api, create_cpu_memory_info) == 69 * sizeof(void *), "");
static_assert(offsetof(ort_api, default_allocator) == 78 * sizeof(void *), "");
static_assert(offsetof(ort_api, release_session_options) == 100 * sizeof(void *), "");

struct ort_api_base {
    const ort_api *(ORT_CALL * get_api)(uint32_t version);
    const char *(ORT_CALL * version)();
};

static const uint32_t ORT_VERSION_1    = 1;
static const int      ORT_LOG_FATAL    = 4; // errors come back as a status; nothing is printed
static const int      ORT_OPTIMIZE_ALL = 99;
static const int      ORT_FLOAT        = 1;
static const int      ORT_ALLOC_DEVICE = 0;
static const int      ORT_MEM_DEFAULT  = 0;

static const char * const INPUT_NAME      = "features";
static const char * const OUTPUT_NAME     = "p";
static const uint64_t     MAX_MODEL_BYTES = 64ull << 20;

// ---- the library ----

#ifdef _WIN32

static void * library_open(const std::string & path, std::string & reason) {
    // the altered search path finds the library's own neighbours; it needs an absolute path
    const std::filesystem::path full   = std::filesystem::absolute(std::filesystem::u8path(path));
    HMODULE                     handle = LoadLibraryExW(full.c_str(), nullptr, LOAD_WITH_ALTERED_SEARCH_PATH);
    if (handle == nullptr) {
        reason = "Windows error " + std::to_string(GetLastError());
    }
    return handle;
}

static void * library_symbol(void * handle, const char * name) {
    return reinterpret_cast<void *>(GetProcAddress(static_cast<HMODULE>(handle), name));
}

static void library_close(void * handle) {
    FreeLibrary(static_cast<HMODULE>(handle));
}

#else

static void * library_open(const std::string & path, std::string & reason) {
    void * handle = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (handle == nullptr) {
        const char * text = dlerror();
        reason            = text ? text : "unknown reason";
    }
    return handle;
}

static void * library_symbol(void * handle, const char * name) {
    return dlsym(handle, name);
}

static void library_close(void * handle) {
    dlclose(handle);
}

#endif

struct onnx_runtime::impl {
    const ort_api *   api         = nullptr;
    ort_env *         env         = nullptr;
    ort_memory_info * memory_info = nullptr;
    std::string       version;

    ~impl() {
        if (memory_info) {
            api->release_memory_info(memory_info);
        }
        if (env) {
            api->release_env(env);
        }
    }

    // Throws when the call failed: "<subject>: <what ONNX Runtime says>".
    void check(ort_status * status, const std::string & subject) const {
        if (status) {
            std::string text = api->get_error_message(status);
            api->release_status(status);
            for (char & c : text) { // messages have one line
                c = static_cast<unsigned char>(c) < 0x20 ? ' ' : c;
            }
            throw error(SPECEE_ERR_ONNX, subject + ": " + text);
        }
    }
};

onnx_runtime::onnx_runtime(const std::string & library_path) : self(std::make_unique<impl>()) {
    std::error_code ec;
    if (!std::filesystem::is_regular_file(std::filesystem::u8path(library_path), ec)) {
        throw error(SPECEE_ERR_ONNX, library_path + ": no such ONNX Runtime library");
    }
    std::string  reason;
    void * const handle = library_open(library_path, reason);
    if (handle == nullptr) {
        throw error(SPECEE_ERR_ONNX, library_path + ": cannot be loaded as the ONNX Runtime library: " + reason);
    }
    using get_api_base_fn        = const ort_api_base *(ORT_CALL *)();
    get_api_base_fn get_api_base = nullptr;
    void * const    symbol       = library_symbol(handle, "OrtGetApiBase");
    static_assert(sizeof(symbol) == sizeof(get_api_base), "a function fits into a pointer");
    std::memcpy(&get_api_base, &symbol, sizeof(symbol));
    if (get_api_base == nullptr) {
        library_close(handle);
        throw error(SPECEE_ERR_ONNX, library_path + ": not an ONNX Runtime library (it has no OrtGetApiBase)");
    }
    // from here on the library stays: it may have started threads and exit handlers, which must not lose their code
    const ort_api_base * base = get_api_base();
    self->version             = base->version();
    self->api                 = base->get_api(ORT_VERSION_1);
    if (self->api == nullptr) {
        throw error(SPECEE_ERR_ONNX,
                    library_path + ": ONNX Runtime " + self->version + " no longer offers version 1 of its C ABI");
    }
    self->check(self->api->create_env(ORT_LOG_FATAL, "specee", &self->env), library_path);
    self->check(self->api->disable_telemetry(self->env), library_path);
    self->check(self->api->create_cpu_memory_info(ORT_ALLOC_DEVICE, ORT_MEM_DEFAULT, &self->memory_info), library_path);
}

onnx_runtime::~onnx_runtime() = default;

const std::string & onnx_runtime::version() const {
    return self->version;
}

// ---- a session ----

struct onnx_session::impl {
    const onnx_runtime::impl & runtime;
    const ort_api &            api;
    std::string                path;
    int64_t                    n_in    = 0;
    ort_session *              session = nullptr;

    // tensors over our own buffers, for the n of the last run
    int64_t            n         = 0;
    ort_value *        in_value  = nullptr;
    ort_value *        out_value = nullptr;
    std::vector<float> in_data; // [n, n_in]
    std::vector<float> out_data; // [n]

    impl(const onnx_runtime::impl & runtime, const std::string & path) :
        runtime(runtime),
        api(*runtime.api),
        path(path) {}

    ~impl() {
        release_tensors();
        if (session) {
            api.release_session(session);
        }
    }

    void check(ort_status * status) const { runtime.check(status, path); }

    void release_tensors() {
        if (in_value) {
            api.release_value(in_value);
        }
        if (out_value) {
            api.release_value(out_value);
        }
        in_value = out_value = nullptr;
        n                    = 0;
    }

    ort_value * tensor_over(std::vector<float> & data, int64_t n_row, int64_t n_col) const {
        const int64_t shape[2] = {n_row, n_col};
        ort_value *   value    = nullptr;
        check(api.create_tensor_with_data(runtime.memory_info, data.data(), data.size() * sizeof(float), shape, 2,
                                          ORT_FLOAT, &value));
        return value;
    }

    void make_tensors(int64_t n_row) {
        release_tensors();
        in_data.resize(static_cast<size_t>(n_row * n_in));
        out_data.resize(static_cast<size_t>(n_row));
        in_value  = tensor_over(in_data, n_row, n_in);
        out_value = tensor_over(out_data, n_row, 1);
        n         = n_row;
    }

    void open() {
        const std::vector<uint8_t> model   = read_file(path, MAX_MODEL_BYTES, SPECEE_ERR_ONNX);
        ort_session_options *      options = nullptr;
        check(api.create_session_options(&options));
        const auto release = [this](ort_session_options * o) { api.release_session_options(o); };
        std::unique_ptr<ort_session_options, decltype(release)> guard(options, release);

        check(api.set_log_severity(options, ORT_LOG_FATAL));
        check(api.set_graph_optimization(options, ORT_OPTIMIZE_ALL));
        check(api.set_intra_op_threads(options, 1)); // the calling thread alone: no pool, so nothing spins
        check(api.set_inter_op_threads(options, 1));
        check(api.create_session_from_array(runtime.env, model.data(), model.size(), options, &session));
    }

    // The model must have exactly one input and one output, of our names, as float32 [n, columns] with a free n.
    void check_signature() {
        size_t n_inputs  = 0;
        size_t n_outputs = 0;
        check(api.input_count(session, &n_inputs));
        check(api.output_count(session, &n_outputs));
        if (n_inputs != 1 || n_outputs != 1) {
            throw error(SPECEE_ERR_ONNX, path + ": must have one input and one output, has " +
                                             std::to_string(n_inputs) + " and " + std::to_string(n_outputs));
        }
        check_name("input", api.input_name, INPUT_NAME);
        check_name("output", api.output_name, OUTPUT_NAME);
        n_in                = columns("input", api.input_type);
        const int64_t n_out = columns("output", api.output_type);
        if (n_out != 1) {
            throw error(SPECEE_ERR_ONNX, path + ": the output must be [n, 1], is [n, " + std::to_string(n_out) + "]");
        }
    }

    void check_name(const char * what, decltype(ort_api::input_name) get, const char * expected) const {
        ort_allocator * allocator = nullptr;
        char *          text      = nullptr;
        check(api.default_allocator(&allocator));
        check(get(session, 0, allocator, &text));
        const std::string name = text;
        check(api.allocator_free(allocator, text));
        if (name != expected) {
            throw error(SPECEE_ERR_ONNX,
                        path + ": the " + what + " must be named \"" + expected + "\", is " + printable(name));
        }
    }

    int64_t columns(const char * what, decltype(ort_api::input_type) get) const {
        ort_type_info * type = nullptr;
        check(get(session, 0, &type));
        const auto release = [this](ort_type_info * t) { api.release_type_info(t); };
        std::unique_ptr<ort_type_info, decltype(release)> guard(type, release);

        const std::string       must_be = std::string("the ") + what + " must be float32 [n, columns] with a free n";
        const ort_tensor_info * info    = nullptr; // owned by type; null when it is no tensor
        check(api.cast_to_tensor_info(type, &info));
        if (info == nullptr) {
            throw error(SPECEE_ERR_ONNX, path + ": " + must_be + ", is no tensor");
        }
        int    element = 0;
        size_t n_dim   = 0;
        check(api.element_type(info, &element));
        check(api.dimension_count(info, &n_dim));
        int64_t dims[2] = {0, 0};
        if (element == ORT_FLOAT && n_dim == 2) {
            check(api.dimensions(info, dims, 2));
        }
        if (dims[0] != -1 || dims[1] < 1) {
            throw error(SPECEE_ERR_ONNX, path + ": " + must_be + ", has element type " + std::to_string(element) +
                                             " and " + std::to_string(n_dim) + " dimensions, the first two [" +
                                             std::to_string(dims[0]) + ", " + std::to_string(dims[1]) + "]");
        }
        return dims[1];
    }
};

onnx_session::onnx_session(const onnx_runtime & runtime, const std::string & model_path) :
    self(std::make_unique<impl>(*runtime.self, model_path)) {
    self->open();
    self->check_signature();
}

onnx_session::~onnx_session() = default;

int64_t onnx_session::n_in() const {
    return self->n_in;
}

void onnx_session::run(const float * x, int64_t n, float * p) {
    impl & s = *self;
    if (n != s.n) {
        s.make_tensors(n);
    }
    std::memcpy(s.in_data.data(), x, s.in_data.size() * sizeof(float));
    s.check(s.api.run(s.session, nullptr, &INPUT_NAME, &s.in_value, 1, &OUTPUT_NAME, 1, &s.out_value));
    std::memcpy(p, s.out_data.data(), s.out_data.size() * sizeof(float));
}

} // namespace specee
