// api.cpp - the C ABI: checks, and the one place where exceptions become codes.

#include "build_info.h"
#include "error.h"
#include "record.h"
#include "session.h"
#include "specee.h"

#include <algorithm>
#include <cstring>
#include <new>
#include <string>

struct specee_session {
    specee::session self;
};

namespace {

thread_local std::string last_error;

specee_status fail(specee_status status, const char * message) {
    try {
        last_error = message;
    } catch (...) {
        last_error.clear();
    }
    return status;
}

template <typename F>
specee_status guarded(F && call) {
    try {
        call();
        last_error.clear();
        return SPECEE_OK;
    } catch (const specee::error & err) {
        return fail(err.status, err.what());
    } catch (const std::bad_alloc &) {
        return fail(SPECEE_ERR_NO_MEMORY, "out of memory");
    } catch (const std::exception & err) {
        return fail(SPECEE_ERR_INTERNAL, err.what());
    } catch (...) {
        return fail(SPECEE_ERR_INTERNAL, "unknown error");
    }
}

void require(bool condition, const char * message) {
    if (!condition) {
        throw specee::error(SPECEE_ERR_INVALID_ARGUMENT, message);
    }
}

// A struct of the caller, who may know fewer fields than we do, or more: fields unknown to one side read as zero.
template <typename T>
T copy_struct(const T * from) {
    require(from && from->struct_size >= sizeof(size_t), "a parameter struct is missing or has no struct_size");
    T to = {};
    memcpy(&to, from, std::min(from->struct_size, sizeof(T)));
    return to;
}

} // namespace

int32_t specee_abi_version(void) {
    return SPECEE_ABI_VERSION;
}

const char * specee_build_info(void) {
    return SPECEE_BUILD_INFO;
}

const char * specee_last_error(void) {
    return last_error.c_str();
}

int32_t specee_can_exit(const llama_context * ctx) {
    return guarded([&] {
               require(ctx, "ctx is NULL");
               const std::string reason = specee::why_no_windows(ctx);
               if (!reason.empty()) {
                   throw specee::error(SPECEE_ERR_UNSUPPORTED, reason);
               }
           }) == SPECEE_OK;
}

specee_status specee_session_init(llama_context * ctx, const specee_session_params * params, specee_session ** out) {
    return guarded([&] {
        require(ctx && out, "ctx or out is NULL");
        *out = new specee_session{specee::session(ctx, copy_struct(params))};
    });
}

void specee_session_free(specee_session * session) {
    delete session;
}

specee_status specee_session_prompt(specee_session * session, const int32_t * tokens, int32_t n) {
    return guarded([&] {
        require(session && tokens, "session or tokens is NULL");
        session->self.prompt(tokens, n);
    });
}

specee_status specee_session_next(specee_session * session, llama_sampler * sampler, specee_event * out) {
    return guarded([&] {
        require(session && out, "session or out is NULL");
        *out = session->self.next(sampler);
    });
}

specee_status specee_session_rewind(specee_session * session, int32_t n_keep) {
    return guarded([&] {
        require(session, "session is NULL");
        session->self.rewind(n_keep);
    });
}

specee_status specee_session_complete(specee_session * session) {
    return guarded([&] {
        require(session, "session is NULL");
        session->self.complete();
    });
}

int32_t specee_session_n_token(const specee_session * session) {
    return session ? session->self.n_token() : 0;
}

specee_status specee_session_stats(const specee_session * session, specee_stats * out) {
    return guarded([&] {
        require(session && out && out->struct_size >= sizeof(size_t),
                "session or out is NULL, or out has no struct_size");
        const size_t size = std::min(out->struct_size, sizeof(specee_stats));
        memcpy(out, &session->self.stats(), size);
        out->struct_size = size;
    });
}

void specee_session_stats_reset(specee_session * session) {
    if (session) {
        session->self.stats_reset();
    }
}

specee_status specee_session_histogram(const specee_session * session, int64_t * histogram, int32_t n) {
    return guarded([&] {
        require(session && histogram, "session or histogram is NULL");
        const auto & counts = session->self.histogram();
        require(n == static_cast<int32_t>(counts.size()), "the histogram needs n_layer + 1 places");
        std::copy(counts.begin(), counts.end(), histogram);
    });
}

specee_status specee_record(llama_context * ctx, const specee_record_params * params, int64_t * n_rows) {
    return guarded([&] {
        require(ctx && n_rows, "ctx or n_rows is NULL");
        *n_rows = specee::record(ctx, copy_struct(params));
    });
}
