/*
 * lcs.h - the C ABI of llamacppshim: one pinned llama.cpp behind calls that cannot kill the process.
 *
 * Every function that can fail returns an lcs_status and is a no-throw boundary. What upstream would assert, abort or
 * throw on is judged before the call. Unless an entry says otherwise:
 *
 *   errors    after any status but OK nothing has changed and no output is written. lcs_last_error() tells more.
 *   threads   a model may be used by any number of threads at once. A context, a sampler and a chat template take one
 *             call at a time: a second one gets BUSY at once and changes nothing. lcs_context_cancel() is the exception.
 *   fork      a handle made before fork() answers FORKED in the child, and freeing it there frees nothing.
 *   lifetime  a context, a sampler, an adapter and a chat template keep what they need of their model alive:
 *             handles may be freed in any order. Every _free takes NULL, never fails, and must not run while another
 *             thread is inside the same handle.
 *   buffers   a function that fills (buf, capacity, n_out) always writes the needed size to n_out, and gives BUFFER
 *             with buf untouched when capacity is less.
 *   NULL      a NULL handle or a NULL required pointer is ARG.
 *
 * Counts are in tokens, sizes in bytes, positions 0-based, ranges half open [p0, p1). Token, sequence and position ids
 * are llama.cpp's own. "Source" names the function of llama.h that does the work.
 */
#ifndef LCS_H
#define LCS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#if defined(_WIN32)
#    define LCS_API
#else
#    define LCS_API __attribute__((visibility("hidden")))
#endif

typedef struct lcs_model         lcs_model;
typedef struct lcs_header        lcs_header;
typedef struct lcs_context       lcs_context;
typedef struct lcs_sampler       lcs_sampler;
typedef struct lcs_adapter       lcs_adapter;
typedef struct lcs_chat_template lcs_chat_template;
typedef struct lcs_string        lcs_string;

typedef enum lcs_status {
    LCS_STATUS_OK = 0,
    LCS_STATUS_ARG,             /* an argument is NULL, or its value makes no sense */
    LCS_STATUS_RANGE,           /* a token, sequence, row, position or size lies outside its range */
    LCS_STATUS_BUFFER,          /* the caller's buffer is too small; the needed size was written */
    LCS_STATUS_NOMEM,           /* host or device memory ran out */
    LCS_STATUS_UNSUPPORTED,     /* this model, memory kind or build cannot do it; field names the feature */
    LCS_STATUS_BUSY,            /* another thread is inside this handle */
    LCS_STATUS_FORKED,          /* the handle was made before fork() */
    LCS_STATUS_LOAD,            /* a model or adapter file is missing, damaged or foreign */
    LCS_STATUS_CANCELLED,       /* the progress callback said stop */
    LCS_STATUS_BATCH_TOO_LARGE, /* more tokens or outputs than one batch of this context takes */
    LCS_STATUS_NO_KV_SLOT,      /* llama_decode 1: too few free cells */
    LCS_STATUS_ABORTED,         /* llama_decode 2: cancelled */
    LCS_STATUS_INVALID_BATCH,   /* llama_decode -1 */
    LCS_STATUS_ALLOC_FAILED,    /* llama_decode -2 */
    LCS_STATUS_COMPUTE_FAILED,  /* llama_decode -3 */
    LCS_STATUS_DECODE_FATAL,    /* another status or an exception; the context answers nothing else from then on */
    LCS_STATUS_STATE_CORRUPT,   /* a state blob is cut, damaged or not one of ours */
    LCS_STATUS_STATE_MISMATCH,  /* a state blob of another model, pin, cache layout or kind; field says which */
    LCS_STATUS_TEMPLATE,        /* a chat template does not parse, fails, or exceeds its limits */
    LCS_STATUS_GRAMMAR,         /* a grammar does not parse, exceeds its limits, or refuses a token */
    LCS_STATUS_INTERNAL,        /* llama.cpp refused in a way that has no status of its own */
    LCS_STATUS_COUNT
} lcs_status;

/* "OK", "ARG", ...; "?" for a number that is no status. Static. */
LCS_API const char * lcs_status_name(lcs_status status);

/* What went wrong. Pointers are never NULL (empty when absent) and live until this thread's next lcs call. */
typedef struct lcs_error_info {
    lcs_status   status;
    const char * message;  /* one line: the value and the limit */
    const char * log;      /* llama.cpp's last error or warning line during the call */
    const char * field;    /* what differs or is missing: "n_tokens", "type_k", "lora" */
    const char * expected; /* for field: the limit, or the value of this side */
    const char * actual;   /* for field: the value met */
} lcs_error_info;

/* The last failure of this thread. Status OK where there was none. */
LCS_API void lcs_last_error(lcs_error_info * info_out);

/*
 * Build and process.
 */

/* Static text. options and system_info are "name=value" words; pin is llama.cpp's commit; backend cpu|cuda|metal|vulkan. */
typedef struct lcs_build {
    const char * version;      /* of this shim */
    const char * pin;
    const char * llama_version;
    const char * ggml_version;
    const char * backend;
    const char * options;      /* build type, compiler, native, openmp, sanitizer */
    const char * cpu_compiled; /* CPU features this build was compiled for, space separated */
    const char * cpu_found;    /* of those, the ones this machine has */
    const char * system_info;  /* llama_print_system_info() */
    bool         openmp;
    bool         gpu_offload;
    bool         mmap;
    bool         mlock;
} lcs_build;

/* UNSUPPORTED  this machine lacks a CPU feature that the build needs (field: its name); build_out is still written */
LCS_API lcs_status lcs_build_info(lcs_build * build_out);

/* Handles alive in this process, and bytes of the strings among them. */
typedef struct lcs_live_counts {
    int64_t models;
    int64_t headers;
    int64_t contexts;
    int64_t samplers;
    int64_t adapters;
    int64_t chat_templates;
    int64_t strings;
} lcs_live_counts;

LCS_API void lcs_live(lcs_live_counts * counts_out);

/* A text that the shim allocated. data is NUL-terminated; bytes does not count the NUL; it may contain NULs. */
LCS_API const char * lcs_string_data(const lcs_string * string);
LCS_API size_t       lcs_string_bytes(const lcs_string * string);
LCS_API void         lcs_string_free(lcs_string * string);

typedef enum lcs_log_level {
    LCS_LOG_LEVEL_DEBUG = 1,
    LCS_LOG_LEVEL_INFO  = 2,
    LCS_LOG_LEVEL_WARN  = 3,
    LCS_LOG_LEVEL_ERROR = 4,
    LCS_LOG_LEVEL_NONE  = 5
} lcs_log_level;

/*
 * Log capture. llama.cpp's lines are never printed: complete lines at or above the level are kept in one queue of the
 * process, oldest dropped beyond 1,024. Default level: WARN.
 *
 *   lcs_log_pending  lines waiting; cheap, for a look after each call
 *   lcs_log_next     takes the oldest; *line_out is NULL when there is none, else owned by the caller
 */
LCS_API void       lcs_log_set_level(lcs_log_level level);
LCS_API int64_t    lcs_log_pending(void);
LCS_API lcs_status lcs_log_next(lcs_log_level * level_out, lcs_string ** line_out);

/*
 * Faults, for tests. Off by default, at the cost of one atomic load a fallible step.
 *
 *   lcs_fault_arm         the n-th fallible step of this thread from now (1-based) fails with NOMEM; 0 disarms
 *   lcs_fault_fired       whether it has failed since
 *   lcs_fault_arm_decode  after n_nodes (>= 1) more graph nodes computed in this thread's decodes, the graph is stopped
 *                         and llama_decode's status is replaced by raw_status, INT32_MIN meaning an exception; 0
 *                         disarms. Memory is left as that point leaves it, so every partial state can be met. CPU only.
 */
LCS_API void lcs_fault_arm(int64_t n);
LCS_API bool lcs_fault_fired(void);
LCS_API void lcs_fault_arm_decode(int32_t raw_status, int64_t n_nodes);

/*
 * Model.
 */

typedef enum lcs_split_mode {
    LCS_SPLIT_MODE_NONE   = 0,
    LCS_SPLIT_MODE_LAYER  = 1,
    LCS_SPLIT_MODE_ROW    = 2,
    LCS_SPLIT_MODE_TENSOR = 3
} lcs_split_mode;

/* Called on the loading thread with 0..1; false cancels the load. Must not throw or longjmp. */
typedef bool (*lcs_progress_fn)(float fraction, void * data);

typedef struct lcs_model_params {
    int32_t              n_gpu_layers; /* < 0: all */
    int32_t              split_mode;   /* lcs_split_mode */
    int32_t              main_gpu;     /* for LCS_SPLIT_MODE_NONE */
    const char * const * devices;      /* backend device names ("CUDA0"); NULL: all */
    size_t               n_devices;
    const float        * tensor_split; /* share of each device, each finite and >= 0; NULL: by free memory */
    size_t               n_tensor_split;
    bool                 use_mmap;
    bool                 use_mlock;
    bool                 check_tensors;   /* read every tensor and refuse NaN or broken blocks */
    bool                 use_extra_bufts; /* repack weights for faster kernels: more memory, other bits */
    bool                 vocab_only;      /* tokenizer and metadata only: no context can be made */
    bool                 load_mtp;        /* load prediction layers too */
    lcs_progress_fn      progress;
    void               * progress_data;
} lcs_model_params;

/* Upstream's defaults: all layers on devices, mmap, no mlock, no check, extra buffer types. */
LCS_API void lcs_model_params_init(lcs_model_params * params_out);

/*
 * Load a GGUF file of any suffix; of a split model, its first part (named *-00001-of-NNNNN.gguf).
 *
 *   path       UTF-8, NUL-terminated
 *   model_out  owned by the caller; lcs_model_free
 *
 * LOAD         missing, a folder, short, foreign, damaged, or refused by llama.cpp (message gives the reason)
 * CANCELLED    progress returned false
 * ARG RANGE    a parameter outside its range
 * UNSUPPORTED  the CPU lacks a feature this build was compiled for
 * NOMEM
 * Cost: reads the header twice (it is checked before llama.cpp sees it), then the weights.
 * Source: llama_model_load_from_file.
 */
LCS_API lcs_status lcs_model_load(const char * path, const lcs_model_params * params, lcs_model ** model_out);
LCS_API void       lcs_model_free(lcs_model * model);

typedef enum lcs_memory_kind {
    LCS_MEMORY_KIND_NONE      = 0, /* no memory: encoders, diffusion models, vocab_only */
    LCS_MEMORY_KIND_ATTENTION = 1, /* full attention: can be cut anywhere */
    LCS_MEMORY_KIND_SWA       = 2, /* some layers keep a sliding window */
    LCS_MEMORY_KIND_RECURRENT = 3,
    LCS_MEMORY_KIND_HYBRID    = 4  /* attention and recurrent layers */
} lcs_memory_kind;

typedef struct lcs_model_info {
    uint64_t n_params;
    uint64_t n_bytes;        /* of all tensors */
    int32_t  n_vocab;        /* rows of a logits array */
    int32_t  n_ctx_train;
    int32_t  n_embd;
    int32_t  n_embd_out;     /* columns of an embeddings array */
    int32_t  n_layer;
    int32_t  n_layer_nextn;  /* prediction layers, counted apart */
    int32_t  n_head;
    int32_t  n_head_kv;
    int32_t  n_swa;          /* window in tokens; 0: none */
    int32_t  memory_kind;    /* lcs_memory_kind */
    int32_t  vocab_type;     /* llama_vocab_type: 0 none, 1 SPM, 2 BPE, 3 WPM, 4 UGM, 5 RWKV, 6 PLaMo-2 */
    int32_t  rope_type;      /* llama_rope_type; -1 none */
    int32_t  ftype;          /* llama_ftype */
    bool     has_encoder;
    bool     has_decoder;
    bool     is_diffusion;
    bool     vocab_only;
    float    rope_freq_scale_train;
} lcs_model_info;

LCS_API lcs_status lcs_model_get_info(const lcs_model * model, lcs_model_info * info_out);

/* Texts owned by the model; never NULL except where noted. */
LCS_API const char * lcs_model_description(const lcs_model * model);            /* "llama ?B Q4_1" */
LCS_API const char * lcs_model_architecture(const lcs_model * model);
LCS_API const char * lcs_model_chat_template(const lcs_model * model, const char * name); /* NULL: it has none */

/* GGUF metadata as text, scalars only; arrays are not given. RANGE: i outside [0, count). */
LCS_API int32_t    lcs_model_meta_count(const lcs_model * model);
LCS_API lcs_status lcs_model_meta_at(const lcs_model * model, int32_t i, const char ** key_out, const char ** value_out);

/*
 * Headers: what a GGUF file says of its model, and what it would need. No weight is read, no cache is allocated.
 */

typedef struct lcs_header_info {
    lcs_model_info model;   /* as the loaded model would give it */
    const char *   tokenizer; /* "llama" (SentencePiece), "gpt2" (BPE), "bert", ...; "" without one. Owned by the header */
    uint32_t       version; /* of the GGUF format */
    int32_t        n_parts; /* files of a split model */
    uint64_t       n_file_bytes;   /* of all parts */
    uint64_t       n_header_bytes; /* of the first part */
    int32_t        n_tensors;
    int32_t        n_types;        /* tensor types, see lcs_header_type_at */
    int32_t        n_layer_all;    /* prediction layers included, see lcs_header_layer_at */
    int32_t        n_expert;
    int32_t        n_expert_used;  /* the most of a layer */
} lcs_header_info;

/* One layer as its memory sees it. Widths in elements of one cell. */
typedef struct lcs_header_layer {
    int32_t  n_head;
    int32_t  n_head_kv;
    uint32_t n_embd_k;   /* of K and V in the cache; 0: none */
    uint32_t n_embd_v;
    uint32_t n_state;    /* f32 numbers of recurrent state a sequence; 0: none */
    bool     windowed;   /* keeps a sliding window */
    bool     prediction; /* a layer of multi-token prediction */
} lcs_header_layer;

typedef struct lcs_header_type {
    const char * name; /* "f16", "q4_0"; static */
    int32_t      n_tensors;
    uint64_t     n_bytes;
} lcs_header_type;

/*
 * Read and check a file's header; of a split model those of all parts. The check is that of lcs_model_load, which this
 * call shares; what passes both can be loaded, but for its weights.
 *
 *   params  how the model would be loaded: decides where weights go. NULL: the defaults. progress and vocab_only are
 *           not looked at.
 *
 * Errors as lcs_model_load.
 * Cost: the header is read once; a vocabulary of 150,000 tokens takes some 20 ms.
 */
LCS_API lcs_status lcs_header_read(const char * path, const lcs_model_params * params, lcs_header ** header_out);
LCS_API void       lcs_header_free(lcs_header * header);

LCS_API lcs_status lcs_header_get_info(const lcs_header * header, lcs_header_info * info_out);
LCS_API const char * lcs_header_architecture(const lcs_header * header); /* owned by the header; never NULL */

/* RANGE: i outside [0, n_layer_all), [0, n_types), [0, count). */
LCS_API lcs_status lcs_header_layer_at(const lcs_header * header, int32_t i, lcs_header_layer * layer_out);
LCS_API lcs_status lcs_header_type_at(const lcs_header * header, int32_t i, lcs_header_type * type_out);
LCS_API int32_t    lcs_header_meta_count(const lcs_header * header);
LCS_API lcs_status lcs_header_meta_at(
        const lcs_header * header, int32_t i, const char ** key_out, const char ** value_out);

/*
 * Vocabulary. All UNSUPPORTED ("vocab") on a model without one.
 */

/* Token ids; -1 where the model has none. */
typedef struct lcs_vocab_specials {
    int32_t bos, eos, eot, sep, nl, pad, mask;
    int32_t fim_pre, fim_suf, fim_mid, fim_pad, fim_rep, fim_sep;
    bool    add_bos, add_eos, add_sep; /* what add_special does */
} lcs_vocab_specials;

LCS_API lcs_status lcs_vocab_get_specials(const lcs_model * model, lcs_vocab_specials * specials_out);

/*
 * Text to tokens.
 *
 *   text           n_bytes bytes, NULs allowed; need not be UTF-8
 *   add_special    add BOS, EOS or SEP as the model wants; can append, so only for a text that does not go on
 *   parse_special  let control tokens written in the text become those tokens
 *   tokens         capacity entries; n_out gets the number of tokens
 *
 * ARG          add_special on a model that wants a token it does not have
 * RANGE        n_bytes over 2^31 - 1; or, for pre-tokenizers that llama.cpp runs by std::regex, which recurses for each
 *              character: one word of over 1,048,576 characters (deepseek-llm: over 1,000 blanks; superbpe: digits)
 * UNSUPPORTED  the model has no vocabulary ("vocab"), or lacks tokens for bytes of the text ("byte tokens")
 * Source: llama_tokenize.
 */
LCS_API lcs_status lcs_vocab_tokenize(
        const lcs_model * model, const char * text, size_t n_bytes, bool add_special, bool parse_special,
        int32_t * tokens, size_t capacity, size_t * n_out);

/*
 * Tokens to bytes. A piece may be part of a UTF-8 character.
 *
 *   remove_special   drop the BOS and EOS that add_special would have added
 *   unparse_special  give control tokens as their text
 *
 * RANGE   a token outside [0, n_vocab), or more than 2^31 - 1 tokens
 * BUFFER  see above; buf gets no terminating NUL
 * Source: llama_detokenize, llama_token_to_piece.
 */
LCS_API lcs_status lcs_vocab_detokenize(
        const lcs_model * model, const int32_t * tokens, size_t n_tokens, bool remove_special, bool unparse_special,
        char * buf, size_t capacity, size_t * n_out);
LCS_API lcs_status lcs_vocab_piece(
        const lcs_model * model, int32_t token, bool special, char * buf, size_t capacity, size_t * n_out);

typedef struct lcs_token_info {
    const char * text;  /* as in the vocabulary file; owned by the model */
    float        score;
    int32_t      attr;  /* llama_token_attr bits */
    bool         is_eog;
    bool         is_control;
} lcs_token_info;

/* RANGE: a token outside [0, n_vocab). */
LCS_API lcs_status lcs_vocab_token(const lcs_model * model, int32_t token, lcs_token_info * info_out);

/*
 * Everything that text becomes tokens by, as bytes to be hashed: settings, each token's text, score and attributes,
 * merges. Equal bytes, equal tokens. Some 20 bytes a token. BUFFER: n_out has the size needed.
 */
LCS_API lcs_status lcs_vocab_describe(const lcs_model * model, char * buf, size_t capacity, size_t * n_out);

/*
 * LoRA adapters.
 */

/*
 * Load an adapter for a model. LOAD as for lcs_model_load, and for an adapter of another architecture or shape.
 * Source: llama_adapter_lora_init.
 */
LCS_API lcs_status lcs_adapter_load(lcs_model * model, const char * path, lcs_adapter ** adapter_out);
LCS_API void       lcs_adapter_free(lcs_adapter * adapter);
LCS_API int32_t    lcs_adapter_meta_count(const lcs_adapter * adapter);
LCS_API lcs_status lcs_adapter_meta_at(
        const lcs_adapter * adapter, int32_t i, const char ** key_out, const char ** value_out);

/*
 * Context.
 */

typedef enum lcs_flash_attn {
    LCS_FLASH_ATTN_AUTO = -1,
    LCS_FLASH_ATTN_OFF  = 0,
    LCS_FLASH_ATTN_ON   = 1
} lcs_flash_attn;

/* ggml_type values that a KV cache may have. */
typedef enum lcs_type {
    LCS_TYPE_F32    = 0,
    LCS_TYPE_F16    = 1,
    LCS_TYPE_Q4_0   = 2,
    LCS_TYPE_Q4_1   = 3,
    LCS_TYPE_Q5_0   = 6,
    LCS_TYPE_Q5_1   = 7,
    LCS_TYPE_Q8_0   = 8,
    LCS_TYPE_IQ4_NL = 20,
    LCS_TYPE_BF16   = 30
} lcs_type;

typedef struct lcs_context_params {
    uint32_t n_ctx;          /* cells; 0: the model's training length */
    uint32_t n_batch;        /* most tokens of one llama_decode, >= 1; cut to n_ctx for causal models */
    uint32_t n_ubatch;       /* most tokens of one graph, >= 1 */
    uint32_t n_seq_max;      /* 1..256 */
    uint32_t n_rs_seq;       /* rollback slots of recurrent memories */
    uint32_t n_outputs_max;  /* rows of one llama_decode; 0: enough for n_seq_max and 32 rows (n_batch with embeddings) */
    int32_t  n_threads;      /* one-token batches; <= 0: the physical cores this process may use; at most 512 */
    int32_t  n_threads_batch;/* <= 0: n_threads */
    int32_t  poll;           /* 0..100: how long idle threads of the pool spin before they sleep; < 0: the default */
    int32_t  flash_attn;     /* lcs_flash_attn */
    int32_t  type_k;         /* lcs_type */
    int32_t  type_v;
    int32_t  pooling;        /* llama_pooling_type: -1 model's, 0 none, 1 mean, 2 cls, 3 last, 4 rank */
    int32_t  attention;      /* llama_attention_type: -1 model's, 0 causal, 1 non-causal */
    int32_t  rope_scaling;   /* llama_rope_scaling_type: -1 model's, 0 none, 1 linear, 2 yarn, 3 longrope */
    float    rope_freq_base; /* 0: the model's */
    float    rope_freq_scale;
    float    yarn_ext_factor;
    float    yarn_attn_factor;
    float    yarn_beta_fast;
    float    yarn_beta_slow;
    uint32_t yarn_orig_ctx;
    bool     embeddings;
    bool     offload_kqv;
    bool     op_offload;
    bool     swa_full;       /* keep every cell of windowed layers too */
    bool     kv_unified;     /* one stream of cells for all sequences */
    bool     perf;           /* keep performance counters */
} lcs_context_params;

/* llama.cpp's defaults, but n_threads 0, flash attention off, and swa_full false. */
LCS_API void lcs_context_params_init(lcs_context_params * params_out);

/*
 * Make a context: the KV cache and the compute buffers. Keeps the model alive.
 *
 * ARG RANGE    a parameter outside its range, or a combination llama.cpp refuses (field names it): a quantised V without
 *              flash attention, a block that does not divide the head size, n_seq_max over n_ctx or n_batch, ...
 * UNSUPPORTED  vocab_only model; encoder-decoder model
 * NOMEM        the cache or the buffers do not fit
 * INTERNAL     llama.cpp refused; log has its reason
 * Source: llama_init_from_model.
 */
LCS_API lcs_status lcs_context_init(lcs_model * model, const lcs_context_params * params, lcs_context ** ctx_out);
LCS_API void       lcs_context_free(lcs_context * ctx);

/* Values as resolved. */
typedef struct lcs_context_info {
    uint32_t n_ctx;           /* all cells */
    uint32_t n_ctx_seq;       /* cells one sequence can use */
    uint32_t n_batch;
    uint32_t n_ubatch;
    uint32_t n_seq_max;
    uint32_t n_rs_seq;
    uint32_t n_outputs_max;
    int32_t  n_threads;
    int32_t  n_threads_batch;
    int32_t  flash_attn;      /* LCS_FLASH_ATTN_ON or _OFF */
    int32_t  type_k;
    int32_t  type_v;
    int32_t  pooling;
    int32_t  memory_kind;     /* lcs_memory_kind; NONE where the context has no memory */
    int32_t  n_stream;        /* streams of cells: 1 if unified */
    bool     swa_full;
    bool     kv_unified;
    bool     can_shift;
    bool     embeddings;
    bool     fatal;           /* DECODE_FATAL happened: decode, rows, state and memory are over */
} lcs_context_info;

LCS_API lcs_status lcs_context_get_info(const lcs_context * ctx, lcs_context_info * info_out);

/* RANGE: outside 1..512; <= 0 as in the parameters. */
LCS_API lcs_status lcs_context_set_threads(lcs_context * ctx, int32_t n_threads, int32_t n_threads_batch);

/* Give embeddings with every decode from now on. Rows of the last decode are gone. Source: llama_set_embeddings. */
LCS_API lcs_status lcs_context_set_embeddings(lcs_context * ctx, bool embeddings);

/*
 * Use these adapters, and no others, from the next decode on; n 0 for none. Each keeps alive while in use.
 * What the memory holds was computed with the adapters of its time: clearing it is the caller's duty.
 *
 * ARG    an adapter of another model, one named twice, or a scale that is not finite
 * Source: llama_set_adapters_lora.
 */
LCS_API lcs_status lcs_context_set_adapters(
        lcs_context * ctx, lcs_adapter * const * adapters, const float * scales, size_t n);

/*
 * Decode.
 */

typedef enum lcs_logits {
    LCS_LOGITS_LAST = 0, /* the last token */
    LCS_LOGITS_ALL  = 1,
    LCS_LOGITS_NONE = 2,
    LCS_LOGITS_MASK = 3  /* mask[i] != 0 */
} lcs_logits;

typedef struct lcs_decode_result {
    int32_t  raw_status; /* of the last llama_decode made; 0 where none was */
    int32_t  n_tokens;   /* asked for */
    int32_t  committed;  /* of these, resident and proven. With one sequence: the first `committed` of them */
    int32_t  n_dirty;    /* sequences whose memory can no longer be trusted: remove them whole (or restore) */
    uint64_t dirty[4];   /* bit s % 64 of dirty[s / 64]: sequence s */
} lcs_decode_result;

/*
 * Decode tokens of one sequence, in batches of at most n_batch tokens and n_outputs_max rows.
 *
 *   tokens      n_tokens >= 1 ids
 *   pos         position of the first; -1: after the sequence's last
 *   logits      lcs_logits; mask: n_tokens bytes, only for LCS_LOGITS_MASK
 *   result_out  written for every status from NO_KV_SLOT to DECODE_FATAL too; may be NULL
 *
 * ARG RANGE UNSUPPORTED   judged before the call; memory and logits as they were
 * INVALID_BATCH           pos is not the sequence's next position; memory as it was (logits too, where we judged it)
 * BATCH_TOO_LARGE         pooling or non-causal attention and more tokens than one graph takes; nothing changed
 * NO_KV_SLOT              whole batches before the one that found no cells stay (committed). On windowed memories
 *                         pos_min may have risen: judge a rollback anew
 * ABORTED                 cancelled. Whole ubatches stay on attention memories (committed counts them); on recurrent and
 *                         hybrid memories what was computed cannot be told, and the sequences are dirty, unless the
 *                         cancel came between batches
 * ALLOC_FAILED COMPUTE_FAILED  as ABORTED
 * DECODE_FATAL            an exception or an unknown status: all sequences dirty, the context is unusable
 * After every other status no logits are left.
 * Source: llama_decode.
 */
LCS_API lcs_status lcs_context_decode(
        lcs_context * ctx, const int32_t * tokens, int32_t n_tokens, int32_t seq_id, int32_t pos,
        int32_t logits, const uint8_t * mask, lcs_decode_result * result_out);

/* Tokens of several sequences for one llama_decode. Arrays are borrowed and have n_tokens entries. */
typedef struct lcs_batch {
    int32_t         n_tokens;
    const int32_t * tokens;
    const int32_t * pos;       /* required, >= 0, rising by one within a sequence from its last position + 1 */
    const int32_t * n_seq_id;  /* sequences of each token; NULL: one each */
    const int32_t * seq_ids;   /* theirs, one token after the other */
    const uint8_t * logits;    /* != 0: this token's row is wanted; NULL: none */
} lcs_batch;

/*
 * One llama_decode. As lcs_context_decode, but never cut:
 *
 * BATCH_TOO_LARGE  n_tokens over n_batch, or rows over n_outputs_max (field says which); nothing changed
 * UNSUPPORTED      a token of several sequences where the memory has a stream for each
 * committed counts tokens over all sequences; which ones follows, for a sequence that is not dirty, from its pos_max.
 */
LCS_API lcs_status lcs_context_decode_batch(
        lcs_context * ctx, const lcs_batch * batch, lcs_decode_result * result_out);

/* End the running decode (CPU: within one graph node; device: at the next batch) or, if none runs, the next one, with
 * ABORTED. From any thread. The one call that may run beside another on the same context. */
LCS_API lcs_status lcs_context_cancel(lcs_context * ctx);

/* The same, for a signal handler: one atomic store, nothing else. ctx must be alive. */
LCS_API void lcs_context_cancel_signal(lcs_context * ctx);

/* Take back a cancel that no call has seen yet. ctx must be alive. */
LCS_API void lcs_context_cancel_clear(lcs_context * ctx);

/*
 * One row of the last decode, as n_vocab raw log-odds (logits) or n_embd_out values (embeddings).
 *
 *   row      index into the tokens of the last decode; negative counts from its end
 *   row_out  borrowed from the context; valid until its next decode, state load, set_embeddings or free
 *
 * RANGE        no decode yet, a row outside it, or one that was not asked for
 * UNSUPPORTED  embeddings are off
 * Cost: waits for the device. Source: llama_get_logits_ith, llama_get_embeddings_ith.
 */
LCS_API lcs_status lcs_context_logits(lcs_context * ctx, int32_t row, const float ** row_out);
LCS_API lcs_status lcs_context_embeddings(lcs_context * ctx, int32_t row, const float ** row_out);

/*
 * Keep rows where they are: by +1 for each holder, -1 when it lets go. While held, the memory of every row given out
 * stays readable (a decode may replace its values), and a call that would have to move it is BUSY instead.
 */
LCS_API lcs_status lcs_context_hold_rows(lcs_context * ctx, int32_t by);

/* Pooled embedding of a sequence of the last decode. UNSUPPORTED: no pooling. Source: llama_get_embeddings_seq. */
LCS_API lcs_status lcs_context_embeddings_seq(lcs_context * ctx, int32_t seq_id, const float ** row_out);

typedef struct lcs_perf {
    double  load_ms;
    double  prefill_ms; /* batches of more than one token */
    double  decode_ms;  /* one-token batches */
    int32_t n_prefill;
    int32_t n_decode;
    int32_t n_reused;   /* graphs used again */
} lcs_perf;

/* Zeros unless params.perf. Source: llama_perf_context. */
LCS_API lcs_status lcs_context_get_perf(lcs_context * ctx, lcs_perf * perf_out);
LCS_API lcs_status lcs_context_reset_perf(lcs_context * ctx);

/* Bytes by buffer type. name is static. The last entry, "output", is the output buffer, which upstream leaves out. */
typedef struct lcs_memory_use {
    const char * name;
    uint64_t     model;
    uint64_t     context;
    uint64_t     compute;
} lcs_memory_use;

/* Source: llama_get_memory_breakdown. */
LCS_API lcs_status lcs_context_memory_use(lcs_context * ctx, lcs_memory_use * entries, size_t capacity, size_t * n_out);

/*
 * What lcs_context_memory_use would say of a context with these parameters, without its memory. One caller at a time.
 *
 * ARG RANGE UNSUPPORTED  as lcs_context_init, which judges the same
 * NOMEM                  what a dry run itself needs (recurrent state is allocated, cells are listed) is not there
 * Source: llama_get_memory_breakdown of a context that was made with no_alloc.
 */
LCS_API lcs_status lcs_header_measure(
        lcs_header * header, const lcs_context_params * params, lcs_memory_use * entries, size_t capacity,
        size_t * n_out);

/* What the machine has left for this process: free memory and swap, cut to its cgroup's limit. 0: unknown. */
LCS_API uint64_t lcs_available_memory(void);

/*
 * Memory operations. seq_id in [0, n_seq_max) throughout, else RANGE. p0 < 0 means 0, p1 < 0 means to the end.
 * UNSUPPORTED ("memory") where the context has none. Source: llama_memory_*.
 */

/* Drop every sequence. data: overwrite the cells too. */
LCS_API lcs_status lcs_context_clear(lcs_context * ctx, bool data);

/* Remove positions [p0, p1). *removed_out false: this memory cannot cut there, and nothing changed. On a windowed
 * memory true does not mean that what is left can be continued: look at pos_min. */
LCS_API lcs_status lcs_context_seq_rm(lcs_context * ctx, int32_t seq_id, int32_t p0, int32_t p1, bool * removed_out);

/* Make dst hold src's positions [p0, p1); dst is emptied first. UNSUPPORTED: part of a sequence across streams, or of a
 * recurrent memory. Copying a sequence to itself changes nothing. */
LCS_API lcs_status lcs_context_seq_cp(lcs_context * ctx, int32_t src, int32_t dst, int32_t p0, int32_t p1);

/* Drop every sequence but this one. */
LCS_API lcs_status lcs_context_seq_keep(lcs_context * ctx, int32_t seq_id);

/* Move positions [p0, p1) by delta; what would fall below 0 is dropped. UNSUPPORTED: the memory cannot shift, or K is
 * quantised. RANGE: a position would pass 2^31 - 1. */
LCS_API lcs_status lcs_context_seq_add(lcs_context * ctx, int32_t seq_id, int32_t p0, int32_t p1, int32_t delta);

/* Smallest and largest position; -1 where the sequence is empty. */
LCS_API lcs_status lcs_context_seq_pos(lcs_context * ctx, int32_t seq_id, int32_t * min_out, int32_t * max_out);

/*
 * State. A blob is an envelope of ours (magic, version, kind, pin, model and layout fingerprint, length, checksum)
 * around llama.cpp's bytes. The checksum finds damage, not forgery; which weights the state belongs to beyond
 * architecture, shape and metadata is the caller's to know.
 *
 *   seq_id   -1: the whole context; else one sequence
 *   partial  only what cannot be cut: the window or the recurrent part. Loading it cuts the rest, which must still be
 *            resident up to there. On attention memories the same as a full state. Only for one sequence; UNSUPPORTED
 *            on memories with other parts (DeepSeek's, hybrids with an indexer).
 *
 * save: n_out gets the bytes needed, buf may be NULL with capacity 0. Logits are not part of a state.
 * load: what the destination held is dropped first; logits of the last decode are gone.
 *   STATE_CORRUPT   cut, damaged or foreign bytes: found before llama.cpp sees them, nothing changed
 *   STATE_MISMATCH  another model, pin, layout, kind or partial flag (field, expected, actual), or a partial state whose
 *                   rest is no longer resident ("resident"): nothing changed
 *   NO_KV_SLOT      too few free cells; the destination is empty (seq_id -1: everything is)
 *   INTERNAL        llama.cpp refused it; the destination is empty (seq_id -1: everything is)
 * Cost: one copy of the bytes and one pass of a fast hash. Source: llama_state_get_data, llama_state_seq_get_data_ext.
 */
LCS_API lcs_status lcs_state_bytes(lcs_context * ctx, int32_t seq_id, bool partial, size_t * n_out);
LCS_API lcs_status lcs_state_save(
        lcs_context * ctx, int32_t seq_id, bool partial, void * buf, size_t capacity, size_t * n_out);
LCS_API lcs_status lcs_state_load(lcs_context * ctx, int32_t seq_id, bool partial, const void * buf, size_t n_bytes);

/* XXH3-64 of the bytes, seed 0: the hash of state blobs and snapshots. */
LCS_API uint64_t lcs_hash(const void * data, size_t n_bytes);

/*
 * Sampler.
 */

typedef struct lcs_logit_bias {
    int32_t token;
    float   bias; /* -INFINITY forbids the token */
} lcs_logit_bias;

/* The chain, in order: bias, penalties, DRY, top-n-sigma, top-k, typical, top-p, min-p, XTC, temperature, choice.
 * Mirostat replaces everything from top-n-sigma on, but temperature. Values that do nothing are given after each. */
typedef struct lcs_sampler_params {
    float                  temperature;       /* <= 0: greedy, the most likely token after bias and penalties */
    float                  dynatemp_range;    /* 0 */
    float                  dynatemp_exponent; /* 1 */
    int32_t                top_k;             /* <= 0 */
    float                  top_p;             /* 1 */
    float                  min_p;             /* 0 */
    float                  typical_p;         /* 1 */
    float                  top_n_sigma;       /* < 0 */
    float                  xtc_probability;   /* 0 */
    float                  xtc_threshold;     /* > 0.5 */
    float                  penalty_repeat;    /* 1 */
    float                  penalty_freq;      /* 0 */
    float                  penalty_present;   /* 0 */
    int32_t                penalty_last_n;    /* 0; tokens looked back on */
    float                  dry_multiplier;    /* 0 */
    float                  dry_base;
    int32_t                dry_allowed_length;
    int32_t                dry_penalty_last_n;
    const char * const   * dry_breakers;      /* NUL-terminated texts */
    size_t                 n_dry_breakers;
    int32_t                mirostat;          /* 0 off, 1, 2 */
    float                  mirostat_tau;
    float                  mirostat_eta;
    uint32_t               min_keep;
    uint32_t               seed;              /* 0xFFFFFFFF: drawn; read it back with lcs_sampler_seed */
    const lcs_logit_bias * logit_bias;
    size_t                 n_logit_bias;
    const char           * grammar;           /* GBNF, NUL-terminated; NULL: none */
    const char           * grammar_root;      /* NULL: "root" */
    const char           * grammar_prefix;    /* text before the first choice that the grammar begins with; NULL: none */
    bool                   grammar_lazy;      /* inactive until a trigger */
    const char * const   * trigger_patterns;  /* regular expressions over the whole output so far */
    size_t                 n_trigger_patterns;
    const int32_t        * trigger_tokens;
    size_t                 n_trigger_tokens;
} lcs_sampler_params;

/* Greedy: temperature 0 and everything else off; DRY base 1.75, allowed length 2, breakers none. */
LCS_API void lcs_sampler_params_init(lcs_sampler_params * params_out);

/*
 * Make a sampler for a model's vocabulary. Tokens that the model says must never be sampled are suppressed.
 *
 * ARG RANGE  a value outside its range (not finite, a token outside the vocabulary, last_n over 1,000,000, a DRY
 *            breaker of over 40 bytes, ...)
 * GRAMMAR    the grammar does not parse, has no root, is left-recursive, or exceeds its limits (1 MiB of text, nesting
 *            256, a repetition of 4,096); it does not begin with its prefix; a trigger pattern is no regular expression
 * Source: llama_sampler_init_*.
 */
LCS_API lcs_status lcs_sampler_init(lcs_model * model, const lcs_sampler_params * params, lcs_sampler ** sampler_out);
LCS_API void       lcs_sampler_free(lcs_sampler * sampler);

/* A copy that goes on as the original would: same draws, same history, same grammar state. */
LCS_API lcs_status lcs_sampler_clone(lcs_sampler * sampler, lcs_sampler ** sampler_out);

/*
 * Choose a token from a row of the context's last decode, and accept it.
 *
 *   row  as in lcs_context_logits
 *
 * RANGE     as in lcs_context_logits; or the context's model has another vocabulary size
 * INTERNAL  the row holds a NaN, or nothing that may be chosen
 * GRAMMAR   the grammar allows no token
 * Draws: one number a choice, also from a single candidate; XTC takes one more from a generator of its own; a token that
 * the grammar refuses costs one choice more. Ties go to the lower id, -INFINITY is never chosen, an error draws nothing.
 * Cost: greedy without bias, penalties or grammar is one vectorised argmax. With top_k > 0 no pass sorts the vocabulary:
 * top-k selects first. A grammar is asked about the chosen token first, and about all only if it refuses that one.
 */
LCS_API lcs_status lcs_sampler_sample(lcs_sampler * sampler, lcs_context * ctx, int32_t row, int32_t * token_out);

/* The same from n_vocab logits of the caller's. */
LCS_API lcs_status lcs_sampler_sample_row(
        lcs_sampler * sampler, const float * logits, int32_t n_vocab, int32_t * token_out);

/*
 * Tell the sampler of a token that it did not choose: history for penalties and DRY, and the grammar.
 *
 * RANGE    a token outside the vocabulary
 * GRAMMAR  the grammar does not allow it; the sampler is as it was
 */
LCS_API lcs_status lcs_sampler_accept(lcs_sampler * sampler, int32_t token);

/* Back to the state after init, with the same seed. */
LCS_API lcs_status lcs_sampler_reset(lcs_sampler * sampler);

/*
 * The state of the draws (random numbers, Mirostat's mu), as bytes for lcs_sampler_load_draws of a sampler with the same
 * parameters; about 13,000. Not the history nor the grammar: give the accepted tokens to lcs_sampler_accept again.
 *
 * save: BUFFER: n_out has the size needed. load: STATE_CORRUPT: cut or damaged; the sampler is as it was.
 */
LCS_API lcs_status lcs_sampler_save_draws(const lcs_sampler * sampler, char * buf, size_t capacity, size_t * n_out);
LCS_API lcs_status lcs_sampler_load_draws(lcs_sampler * sampler, const char * buf, size_t n_bytes);

/* The seed in use. 0 for greedy. */
LCS_API lcs_status lcs_sampler_seed(const lcs_sampler * sampler, uint32_t * seed_out);

/* Index of the largest value; the first of equals. NaNs are never chosen. -1 where n <= 0 or all are NaN. */
LCS_API int32_t lcs_argmax(const float * values, int32_t n);

/*
 * Chat templates: the pinned Jinja engine. Requests and results are JSON texts (UTF-8), as below.
 */

/*
 * Compile a template.
 *
 *   model    its own template, BOS and EOS texts; may be NULL if source is given
 *   source   n_bytes of Jinja, or NULL for the model's; ChatML where neither has one
 *
 * TEMPLATE  does not parse, or its trial run fails or exceeds its limits (1 MiB of source, nesting 200, and each run:
 *           10 s of CPU time, 64 MiB of output, 1,000,000 items of range)
 */
LCS_API lcs_status lcs_chat_template_init(
        lcs_model * model, const char * source, size_t n_bytes, lcs_chat_template ** template_out);
LCS_API void       lcs_chat_template_free(lcs_chat_template * tmpl);

/* {"source", "supports_tools", "supports_tool_calls", "supports_parallel_tool_calls", "supports_system_role",
 *  "supports_thinking", ...}: booleans but for the source. */
LCS_API lcs_status lcs_chat_template_info(lcs_chat_template * tmpl, lcs_string ** json_out);

/*
 * Render a conversation.
 *
 *   request   {"messages": [{"role", "content" (string, parts or null), "tool_calls"?, "reasoning_content"?, "name"?,
 *             "tool_call_id"?}], "tools"?: [OpenAI function tools], "tool_choice"?: "auto"|"none"|"required",
 *             "parallel_tool_calls"?, "add_generation_prompt"? (true), "enable_thinking"? (true), "reasoning_format"?,
 *             "grammar"?, "json_schema"?, "kwargs"?: {extra variables}}; other keys are ARG
 *   json_out  {"text", "parts": [[text, is_input]], "grammar", "grammar_lazy", "grammar_triggers": [{"type", "value",
 *             "token"}], "generation_prompt", "supports_thinking", "thinking_start", "thinking_ends",
 *             "preserved_tokens", "additional_stops", "format", "syntax"}. The parts joined are the text; is_input marks
 *             what came from the messages. "syntax" is opaque: give it back to lcs_chat_parse.
 *
 * ARG       the request is no JSON or not of this form (message gives the path)
 * TEMPLATE  the template raised, or exceeded its limits
 */
LCS_API lcs_status lcs_chat_template_render(
        lcs_chat_template * tmpl, const char * request, size_t n_bytes, lcs_string ** json_out);

/*
 * Parse a reply by the syntax of the render that asked for it.
 *
 *   partial   the text may stop anywhere
 *   json_out  {"role", "content", "reasoning_content", "tool_calls": [{"id", "name", "arguments"}]}
 *
 * ARG       syntax is not one of ours
 * TEMPLATE  the text does not fit the syntax, or ends within the arguments of a call
 */
LCS_API lcs_status lcs_chat_parse(
        const char * syntax, size_t n_syntax_bytes, const char * text, size_t n_bytes, bool partial,
        lcs_string ** json_out);

/* A JSON schema as a GBNF grammar. GRAMMAR: the schema cannot be expressed, or is no JSON. */
LCS_API lcs_status lcs_json_schema_to_grammar(const char * schema, size_t n_bytes, lcs_string ** grammar_out);

#ifdef __cplusplus
}
#endif

#endif
