# lcs.h for Cython: declarations only. Prose, units, owners and errors are in the header.
from libc.stddef cimport size_t
from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t, uint64_t
from libcpp cimport bool as c_bool


cdef extern from "lcs.h" nogil:
    ctypedef struct lcs_model:
        pass
    ctypedef struct lcs_header:
        pass
    ctypedef struct lcs_context:
        pass
    ctypedef struct lcs_sampler:
        pass
    ctypedef struct lcs_adapter:
        pass
    ctypedef struct lcs_chat_template:
        pass
    ctypedef struct lcs_string:
        pass

    ctypedef enum lcs_status:
        LCS_STATUS_OK
        LCS_STATUS_ARG
        LCS_STATUS_RANGE
        LCS_STATUS_BUFFER
        LCS_STATUS_NOMEM
        LCS_STATUS_UNSUPPORTED
        LCS_STATUS_BUSY
        LCS_STATUS_FORKED
        LCS_STATUS_LOAD
        LCS_STATUS_CANCELLED
        LCS_STATUS_BATCH_TOO_LARGE
        LCS_STATUS_NO_KV_SLOT
        LCS_STATUS_ABORTED
        LCS_STATUS_INVALID_BATCH
        LCS_STATUS_ALLOC_FAILED
        LCS_STATUS_COMPUTE_FAILED
        LCS_STATUS_DECODE_FATAL
        LCS_STATUS_STATE_CORRUPT
        LCS_STATUS_STATE_MISMATCH
        LCS_STATUS_TEMPLATE
        LCS_STATUS_GRAMMAR
        LCS_STATUS_INTERNAL
        LCS_STATUS_COUNT

    const char* lcs_status_name(lcs_status status)

    ctypedef struct lcs_error_info:
        lcs_status status
        const char* message
        const char* log
        const char* field
        const char* expected
        const char* actual

    void lcs_last_error(lcs_error_info* info_out)

    # Build and process

    ctypedef struct lcs_build:
        const char* version
        const char* pin
        const char* llama_version
        const char* ggml_version
        const char* backend
        const char* options
        const char* cpu_compiled
        const char* cpu_found
        const char* system_info
        c_bool openmp
        c_bool gpu_offload
        c_bool mmap
        c_bool mlock

    lcs_status lcs_build_info(lcs_build* build_out)

    ctypedef struct lcs_live_counts:
        int64_t models
        int64_t headers
        int64_t contexts
        int64_t samplers
        int64_t adapters
        int64_t chat_templates
        int64_t strings

    void lcs_live(lcs_live_counts* counts_out)

    const char* lcs_string_data(const lcs_string* string)
    size_t lcs_string_bytes(const lcs_string* string)
    void lcs_string_free(lcs_string* string)

    ctypedef enum lcs_log_level:
        LCS_LOG_LEVEL_DEBUG
        LCS_LOG_LEVEL_INFO
        LCS_LOG_LEVEL_WARN
        LCS_LOG_LEVEL_ERROR
        LCS_LOG_LEVEL_NONE

    void lcs_log_set_level(lcs_log_level level)
    int64_t lcs_log_pending()
    lcs_status lcs_log_next(lcs_log_level* level_out, lcs_string** line_out)

    void lcs_fault_arm(int64_t n)
    c_bool lcs_fault_fired()
    void lcs_fault_arm_decode(int32_t raw_status, int64_t n_nodes)

    # Model

    ctypedef enum lcs_split_mode:
        LCS_SPLIT_MODE_NONE
        LCS_SPLIT_MODE_LAYER
        LCS_SPLIT_MODE_ROW
        LCS_SPLIT_MODE_TENSOR

    ctypedef c_bool (*lcs_progress_fn)(float fraction, void* data) noexcept

    ctypedef struct lcs_model_params:
        int32_t n_gpu_layers
        int32_t split_mode
        int32_t main_gpu
        const char* const* devices
        size_t n_devices
        const float* tensor_split
        size_t n_tensor_split
        c_bool use_mmap
        c_bool use_mlock
        c_bool check_tensors
        c_bool use_extra_bufts
        c_bool vocab_only
        c_bool load_mtp
        lcs_progress_fn progress
        void* progress_data

    void lcs_model_params_init(lcs_model_params* params_out)
    lcs_status lcs_model_load(const char* path, const lcs_model_params* params, lcs_model** model_out)
    void lcs_model_free(lcs_model* model)

    ctypedef enum lcs_memory_kind:
        LCS_MEMORY_KIND_NONE
        LCS_MEMORY_KIND_ATTENTION
        LCS_MEMORY_KIND_SWA
        LCS_MEMORY_KIND_RECURRENT
        LCS_MEMORY_KIND_HYBRID

    ctypedef struct lcs_model_info:
        uint64_t n_params
        uint64_t n_bytes
        int32_t n_vocab
        int32_t n_ctx_train
        int32_t n_embd
        int32_t n_embd_out
        int32_t n_layer
        int32_t n_layer_nextn
        int32_t n_head
        int32_t n_head_kv
        int32_t n_swa
        int32_t memory_kind
        int32_t vocab_type
        int32_t rope_type
        int32_t ftype
        c_bool has_encoder
        c_bool has_decoder
        c_bool is_diffusion
        c_bool vocab_only
        float rope_freq_scale_train

    lcs_status lcs_model_get_info(const lcs_model* model, lcs_model_info* info_out)
    const char* lcs_model_description(const lcs_model* model)
    const char* lcs_model_architecture(const lcs_model* model)
    const char* lcs_model_chat_template(const lcs_model* model, const char* name)
    int32_t lcs_model_meta_count(const lcs_model* model)
    lcs_status lcs_model_meta_at(const lcs_model* model, int32_t i, const char** key_out, const char** value_out)

    # Headers

    ctypedef struct lcs_header_info:
        lcs_model_info model
        const char* tokenizer
        uint32_t version
        int32_t n_parts
        uint64_t n_file_bytes
        uint64_t n_header_bytes
        int32_t n_tensors
        int32_t n_types
        int32_t n_layer_all
        int32_t n_expert
        int32_t n_expert_used

    ctypedef struct lcs_header_layer:
        int32_t n_head
        int32_t n_head_kv
        uint32_t n_embd_k
        uint32_t n_embd_v
        uint32_t n_state
        c_bool windowed
        c_bool prediction

    ctypedef struct lcs_header_type:
        const char* name
        int32_t n_tensors
        uint64_t n_bytes

    lcs_status lcs_header_read(const char* path, const lcs_model_params* params, lcs_header** header_out)
    void lcs_header_free(lcs_header* header)
    lcs_status lcs_header_get_info(const lcs_header* header, lcs_header_info* info_out)
    const char* lcs_header_architecture(const lcs_header* header)
    lcs_status lcs_header_layer_at(const lcs_header* header, int32_t i, lcs_header_layer* layer_out)
    lcs_status lcs_header_type_at(const lcs_header* header, int32_t i, lcs_header_type* type_out)
    int32_t lcs_header_meta_count(const lcs_header* header)
    lcs_status lcs_header_meta_at(const lcs_header* header, int32_t i, const char** key_out, const char** value_out)

    # Vocabulary

    ctypedef struct lcs_vocab_specials:
        int32_t bos
        int32_t eos
        int32_t eot
        int32_t sep
        int32_t nl
        int32_t pad
        int32_t mask
        int32_t fim_pre
        int32_t fim_suf
        int32_t fim_mid
        int32_t fim_pad
        int32_t fim_rep
        int32_t fim_sep
        c_bool add_bos
        c_bool add_eos
        c_bool add_sep

    lcs_status lcs_vocab_get_specials(const lcs_model* model, lcs_vocab_specials* specials_out)
    lcs_status lcs_vocab_tokenize(
        const lcs_model* model, const char* text, size_t n_bytes, c_bool add_special, c_bool parse_special,
        int32_t* tokens, size_t capacity, size_t* n_out)
    lcs_status lcs_vocab_detokenize(
        const lcs_model* model, const int32_t* tokens, size_t n_tokens, c_bool remove_special, c_bool unparse_special,
        char* buf, size_t capacity, size_t* n_out)
    lcs_status lcs_vocab_piece(
        const lcs_model* model, int32_t token, c_bool special, char* buf, size_t capacity, size_t* n_out)

    ctypedef struct lcs_token_info:
        const char* text
        float score
        int32_t attr
        c_bool is_eog
        c_bool is_control

    lcs_status lcs_vocab_describe(const lcs_model* model, char* buf, size_t capacity, size_t* n_out)
    lcs_status lcs_vocab_token(const lcs_model* model, int32_t token, lcs_token_info* info_out)

    # Adapters

    lcs_status lcs_adapter_load(lcs_model* model, const char* path, lcs_adapter** adapter_out)
    void lcs_adapter_free(lcs_adapter* adapter)
    int32_t lcs_adapter_meta_count(const lcs_adapter* adapter)
    lcs_status lcs_adapter_meta_at(
        const lcs_adapter* adapter, int32_t i, const char** key_out, const char** value_out)

    # Context

    ctypedef enum lcs_flash_attn:
        LCS_FLASH_ATTN_AUTO
        LCS_FLASH_ATTN_OFF
        LCS_FLASH_ATTN_ON

    ctypedef enum lcs_type:
        LCS_TYPE_F32
        LCS_TYPE_F16
        LCS_TYPE_Q4_0
        LCS_TYPE_Q4_1
        LCS_TYPE_Q5_0
        LCS_TYPE_Q5_1
        LCS_TYPE_Q8_0
        LCS_TYPE_IQ4_NL
        LCS_TYPE_BF16

    ctypedef struct lcs_context_params:
        uint32_t n_ctx
        uint32_t n_batch
        uint32_t n_ubatch
        uint32_t n_seq_max
        uint32_t n_rs_seq
        uint32_t n_outputs_max
        int32_t n_threads
        int32_t n_threads_batch
        int32_t poll
        int32_t flash_attn
        int32_t type_k
        int32_t type_v
        int32_t pooling
        int32_t attention
        int32_t rope_scaling
        float rope_freq_base
        float rope_freq_scale
        float yarn_ext_factor
        float yarn_attn_factor
        float yarn_beta_fast
        float yarn_beta_slow
        uint32_t yarn_orig_ctx
        c_bool embeddings
        c_bool offload_kqv
        c_bool op_offload
        c_bool swa_full
        c_bool kv_unified
        c_bool perf

    void lcs_context_params_init(lcs_context_params* params_out)
    lcs_status lcs_context_init(lcs_model* model, const lcs_context_params* params, lcs_context** ctx_out)
    void lcs_context_free(lcs_context* ctx)

    ctypedef struct lcs_context_info:
        uint32_t n_ctx
        uint32_t n_ctx_seq
        uint32_t n_batch
        uint32_t n_ubatch
        uint32_t n_seq_max
        uint32_t n_rs_seq
        uint32_t n_outputs_max
        int32_t n_threads
        int32_t n_threads_batch
        int32_t flash_attn
        int32_t type_k
        int32_t type_v
        int32_t pooling
        int32_t memory_kind
        int32_t n_stream
        c_bool swa_full
        c_bool kv_unified
        c_bool can_shift
        c_bool embeddings
        c_bool fatal

    lcs_status lcs_context_get_info(const lcs_context* ctx, lcs_context_info* info_out)
    lcs_status lcs_context_set_threads(lcs_context* ctx, int32_t n_threads, int32_t n_threads_batch)
    lcs_status lcs_context_set_embeddings(lcs_context* ctx, c_bool embeddings)
    lcs_status lcs_context_set_adapters(
        lcs_context* ctx, lcs_adapter* const* adapters, const float* scales, size_t n)

    # Decode

    ctypedef enum lcs_logits:
        LCS_LOGITS_LAST
        LCS_LOGITS_ALL
        LCS_LOGITS_NONE
        LCS_LOGITS_MASK

    ctypedef struct lcs_decode_result:
        int32_t raw_status
        int32_t n_tokens
        int32_t committed
        int32_t n_dirty
        uint64_t dirty[4]

    lcs_status lcs_context_decode(
        lcs_context* ctx, const int32_t* tokens, int32_t n_tokens, int32_t seq_id, int32_t pos,
        int32_t logits, const uint8_t* mask, lcs_decode_result* result_out)

    ctypedef struct lcs_batch:
        int32_t n_tokens
        const int32_t* tokens
        const int32_t* pos
        const int32_t* n_seq_id
        const int32_t* seq_ids
        const uint8_t* logits

    lcs_status lcs_context_decode_batch(
        lcs_context* ctx, const lcs_batch* batch, lcs_decode_result* result_out)
    lcs_status lcs_context_cancel(lcs_context* ctx)
    void lcs_context_cancel_signal(lcs_context* ctx)
    void lcs_context_cancel_clear(lcs_context* ctx)
    lcs_status lcs_context_logits(lcs_context* ctx, int32_t row, const float** row_out)
    lcs_status lcs_context_embeddings(lcs_context* ctx, int32_t row, const float** row_out)
    lcs_status lcs_context_hold_rows(lcs_context* ctx, int32_t by)
    lcs_status lcs_context_embeddings_seq(lcs_context* ctx, int32_t seq_id, const float** row_out)

    ctypedef struct lcs_perf:
        double load_ms
        double prefill_ms
        double decode_ms
        int32_t n_prefill
        int32_t n_decode
        int32_t n_reused

    lcs_status lcs_context_get_perf(lcs_context* ctx, lcs_perf* perf_out)
    lcs_status lcs_context_reset_perf(lcs_context* ctx)

    ctypedef struct lcs_memory_use:
        const char* name
        uint64_t model
        uint64_t context
        uint64_t compute

    lcs_status lcs_context_memory_use(
        lcs_context* ctx, lcs_memory_use* entries, size_t capacity, size_t* n_out)
    lcs_status lcs_header_measure(
        lcs_header* header, const lcs_context_params* params, lcs_memory_use* entries, size_t capacity, size_t* n_out)
    uint64_t lcs_available_memory()

    # Memory operations

    lcs_status lcs_context_clear(lcs_context* ctx, c_bool data)
    lcs_status lcs_context_seq_rm(lcs_context* ctx, int32_t seq_id, int32_t p0, int32_t p1, c_bool* removed_out)
    lcs_status lcs_context_seq_cp(lcs_context* ctx, int32_t src, int32_t dst, int32_t p0, int32_t p1)
    lcs_status lcs_context_seq_keep(lcs_context* ctx, int32_t seq_id)
    lcs_status lcs_context_seq_add(lcs_context* ctx, int32_t seq_id, int32_t p0, int32_t p1, int32_t delta)
    lcs_status lcs_context_seq_pos(lcs_context* ctx, int32_t seq_id, int32_t* min_out, int32_t* max_out)

    # State

    lcs_status lcs_state_bytes(lcs_context* ctx, int32_t seq_id, c_bool partial, size_t* n_out)
    lcs_status lcs_state_save(
        lcs_context* ctx, int32_t seq_id, c_bool partial, void* buf, size_t capacity, size_t* n_out)
    lcs_status lcs_state_load(lcs_context* ctx, int32_t seq_id, c_bool partial, const void* buf, size_t n_bytes)
    uint64_t lcs_hash(const void* data, size_t n_bytes)

    # Sampler

    ctypedef struct lcs_logit_bias:
        int32_t token
        float bias

    ctypedef struct lcs_sampler_params:
        float temperature
        float dynatemp_range
        float dynatemp_exponent
        int32_t top_k
        float top_p
        float min_p
        float typical_p
        float top_n_sigma
        float xtc_probability
        float xtc_threshold
        float penalty_repeat
        float penalty_freq
        float penalty_present
        int32_t penalty_last_n
        float dry_multiplier
        float dry_base
        int32_t dry_allowed_length
        int32_t dry_penalty_last_n
        const char* const* dry_breakers
        size_t n_dry_breakers
        int32_t mirostat
        float mirostat_tau
        float mirostat_eta
        uint32_t min_keep
        uint32_t seed
        const lcs_logit_bias* logit_bias
        size_t n_logit_bias
        const char* grammar
        const char* grammar_root
        const char* grammar_prefix
        c_bool grammar_lazy
        const char* const* trigger_patterns
        size_t n_trigger_patterns
        const int32_t* trigger_tokens
        size_t n_trigger_tokens

    void lcs_sampler_params_init(lcs_sampler_params* params_out)
    lcs_status lcs_sampler_init(lcs_model* model, const lcs_sampler_params* params, lcs_sampler** sampler_out)
    void lcs_sampler_free(lcs_sampler* sampler)
    lcs_status lcs_sampler_clone(lcs_sampler* sampler, lcs_sampler** sampler_out)
    lcs_status lcs_sampler_sample(lcs_sampler* sampler, lcs_context* ctx, int32_t row, int32_t* token_out)
    lcs_status lcs_sampler_sample_row(
        lcs_sampler* sampler, const float* logits, int32_t n_vocab, int32_t* token_out)
    lcs_status lcs_sampler_accept(lcs_sampler* sampler, int32_t token)
    lcs_status lcs_sampler_reset(lcs_sampler* sampler)
    lcs_status lcs_sampler_save_draws(const lcs_sampler* sampler, char* buf, size_t capacity, size_t* n_out)
    lcs_status lcs_sampler_load_draws(lcs_sampler* sampler, const char* buf, size_t n_bytes)
    lcs_status lcs_sampler_seed(const lcs_sampler* sampler, uint32_t* seed_out)
    int32_t lcs_argmax(const float* values, int32_t n)

    # Chat templates

    lcs_status lcs_chat_template_init(
        lcs_model* model, const char* source, size_t n_bytes, lcs_chat_template** template_out)
    void lcs_chat_template_free(lcs_chat_template* tmpl)
    lcs_status lcs_chat_template_info(lcs_chat_template* tmpl, lcs_string** json_out)
    lcs_status lcs_chat_template_render(
        lcs_chat_template* tmpl, const char* request, size_t n_bytes, lcs_string** json_out)
    lcs_status lcs_chat_parse(
        const char* syntax, size_t n_syntax_bytes, const char* text, size_t n_bytes, c_bool partial,
        lcs_string** json_out)
    lcs_status lcs_json_schema_to_grammar(const char* schema, size_t n_bytes, lcs_string** grammar_out)
