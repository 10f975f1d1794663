// specee.h - the C ABI of libspecee: speculative early exiting on a llama.cpp context.
//
// The session sits on a llama_context that the caller made with the patched library and keeps
// owning. Every call returns a status code; specee_last_error() has the reason of the last
// failure of the calling thread. No exception crosses this interface. Structs start with their
// size and only ever grow at the end; check specee_abi_version() before anything else.
#ifndef SPECEE_H
#define SPECEE_H

#include <stddef.h>
#include <stdint.h>

#ifdef _WIN32
#define SPECEE_API __declspec(dllexport)
#else
#define SPECEE_API __attribute__((visibility("default")))
#endif

#define SPECEE_ABI_VERSION 1

#ifdef __cplusplus
extern "C" {
#endif

struct llama_context;
struct llama_sampler;

typedef struct specee_session specee_session;

typedef enum specee_status {
    SPECEE_OK                   = 0,
    SPECEE_ERR_INVALID_ARGUMENT = 1, // an impossible setting
    SPECEE_ERR_BUNDLE           = 2, // the bundle is missing, incomplete or corrupt
    SPECEE_ERR_BUNDLE_MODEL     = 3, // the bundle was fitted on another model
    SPECEE_ERR_ONNX             = 4, // ONNX Runtime is missing or refuses a predictor
    SPECEE_ERR_UNSUPPORTED      = 5, // the model's architecture or memory has no layer windows
    SPECEE_ERR_CONTEXT_FULL     = 6, // no free KV slot is left
    SPECEE_ERR_COMPUTE          = 7, // the backend failed
    SPECEE_ERR_NO_MEMORY        = 8,
    SPECEE_ERR_IO               = 9, // a file could not be read or written
    SPECEE_ERR_INTERNAL         = 10
} specee_status;

typedef enum specee_mode {
    SPECEE_MODE_OFF        = 0, // full depth, one token a pass: stock behaviour
    SPECEE_MODE_EXACT      = 1, // exits are provisional and verified: the text of full depth
    SPECEE_MODE_CALIBRATED = 2  // an exit is final, with the fidelity that the bundle promises
} specee_mode;

typedef struct specee_session_params {
    size_t       struct_size;      // sizeof(specee_session_params)
    int32_t      mode;             // specee_mode
    int32_t      max_pending;      // exited tokens that may wait for completion; 0: the bundle's value
    const char * bundle_dir;       // UTF-8 path of NAME.specee; may be NULL in mode off
    const char * onnxruntime_path; // UTF-8 path of libonnxruntime; may be NULL in mode off
    const char * model_path;       // UTF-8 path of the GGUF that the context was loaded from (first shard)
} specee_session_params;

typedef struct specee_event {
    int32_t token;
    int32_t n_layer; // layers that had run when the token was decided: the exit layer or all of them
    float   p;       // the predictor's probability at the exit; NaN for a token of full depth
} specee_event;

typedef struct specee_stats {
    size_t  struct_size;     // set by the caller
    int64_t n_prompt;        // tokens prefilled
    int64_t n_token;         // tokens emitted by specee_session_next
    int64_t n_exit;          // of these, decided by an exit (exact: confirmed by the full model)
    int64_t n_refuted;       // exact: provisional exits that the full model refuted
    int64_t n_pass;          // passes that reached full depth
    int64_t n_evaluated;     // predictor evaluations
    int64_t n_completed;     // exited tokens whose upper layers were computed later
    int64_t n_layer_sum;     // sum of specee_event.n_layer over emitted tokens
    double  t_prompt_s;      // seconds: prefill
    double  t_layers_s;      // layer windows, without the share of completed tokens
    double  t_head_s;        // LM head
    double  t_probe_s;       // probe logits, features and predictors
    double  t_draft_s;       // candidates
    double  t_completion_s;  // the pending tokens' share of the layer windows
    double  t_sampling_s;    // sampler
    double  t_total_s;       // wall time inside specee_session_next
} specee_stats;

SPECEE_API int32_t      specee_abi_version(void);
SPECEE_API const char * specee_build_info(void);  // JSON: llama_cpp_commit, patch_series, flags, version
SPECEE_API const char * specee_last_error(void);  // of the calling thread; "" after a success

// 1 when the model behind ctx can run in layer windows, else 0 (and specee_last_error() says why).
SPECEE_API int32_t specee_can_exit(const struct llama_context * ctx);

SPECEE_API specee_status specee_session_init(struct llama_context * ctx, const specee_session_params * params,
                                             specee_session ** out);
SPECEE_API void          specee_session_free(specee_session * session);

// Append tokens at full depth (prefill), after completing what is pending. n >= 1.
SPECEE_API specee_status specee_session_prompt(specee_session * session, const int32_t * tokens, int32_t n);

// The next verified token, chosen by the sampler (NULL: greedy) from the logits of the last
// position. The token counts as part of the text; it is decoded by the next call.
SPECEE_API specee_status specee_session_next(specee_session * session, struct llama_sampler * sampler,
                                             specee_event * out);

// Keep the first n_keep tokens of the text and forget the rest, verified or not. The next call must
// be specee_session_prompt with at least one token.
SPECEE_API specee_status specee_session_rewind(specee_session * session, int32_t n_keep);

// Complete every pending token: afterwards the KV cache is what full depth would have written.
SPECEE_API specee_status specee_session_complete(specee_session * session);

SPECEE_API int32_t       specee_session_n_token(const specee_session * session); // tokens of the text so far
SPECEE_API specee_status specee_session_stats(const specee_session * session, specee_stats * out);
SPECEE_API void          specee_session_stats_reset(specee_session * session);
// How many emitted tokens were decided after l layers; histogram[l], l = 0..n_layer, n = n_layer + 1.
SPECEE_API specee_status specee_session_histogram(const specee_session * session, int64_t * histogram, int32_t n);

// ---- recording (for fit) ----

typedef struct specee_record_params {
    size_t          struct_size;
    const int32_t * layers;       // ascending layer counts whose states are recorded, each in [1, n_layer]
    int32_t         n_layers;
    const int32_t * tokens;       // the prompts, one after the other
    const int32_t * n_tokens;     // [n_seq] tokens of each prompt
    int32_t         n_seq;        // prompts decoded in parallel; at most the context's n_seq_max
    int32_t         prompt_id;    // id of the first prompt; the next ones count up
    int32_t         n_predict;    // tokens to generate per prompt
    float           temperature;  // 0: greedy
    uint32_t        seed;
    const char *    path;         // rows are appended to this file
} specee_record_params;

// Generates from the prompts at full depth and appends one row per generated token (the token is
// the argmax's predecessor). A row, little endian, without padding:
//   int32 prompt_id, int32 pos, int32 token (input), int32 argmax (full depth), float32 top-1
//   logit, float32 top-2 logit, then float16 [n_layers][n_embd]: the hidden state after each of
//   the layers (before any norm).
// Clears the context's memory. n_rows: rows appended.
SPECEE_API specee_status specee_record(struct llama_context * ctx, const specee_record_params * params,
                                       int64_t * n_rows);

#ifdef __cplusplus
}
#endif

#endif
