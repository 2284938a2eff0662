// The context handle, as context, decode, memory, state and sampler see it. Fields are written only by an entered call.
#pragma once

#include "lcs_internal.hpp"

#include <array>

class llama_kv_cache_iswa;

namespace lcs {

struct threadpool_free {
    void operator()(ggml_threadpool * pool) const noexcept;
};
using threadpool_ptr = std::unique_ptr<ggml_threadpool, threadpool_free>;

struct llama_context_free {
    void operator()(llama_context * ctx) const noexcept { llama_free(ctx); }
};
using context_ptr = std::unique_ptr<llama_context, llama_context_free>;

// Where the rows of the last decode are. Its last llama_decode's rows lie in llama.cpp's output buffer; those of the
// batches before it, which that buffer has lost, were copied.
struct decode_rows {
    int32_t              n_tokens = 0;   // of the last decode; 0: no rows
    int32_t              live_begin = 0; // first token of the last llama_decode
    std::vector<uint8_t> wanted;
    std::vector<int32_t> saved_row;      // of each token before live_begin; -1: not wanted
    std::vector<float>   saved_logits;
    std::vector<float>   saved_embeddings;

    void clear() { n_tokens = 0; }
};

} // namespace lcs

struct lcs_context : lcs::handle, lcs::counted<lcs::kind::context> {
    // Order matters: the context goes before its pools, and both before the weights.
    std::shared_ptr<lcs::model_box>                     model;
    std::vector<std::shared_ptr<lcs::adapter_box>>      adapters;
    lcs::threadpool_ptr                                 pool;
    lcs::threadpool_ptr                                 pool_batch; // null: pool serves both
    lcs::context_ptr                                    ctx;

    lcs_context_info info{};
    int32_t          poll = 0;
    int64_t          n_pos_max = INT32_MAX; // positions are below it; less where the model has a table of them
    bool             can_cut = true;       // a prefill may be cut into batches: causal and not pooled
    bool             positions_may_jump = false;
    bool             perf = false;
    bool             v_trans = false;      // V is kept transposed

    bool              fatal = false;
    std::string       fatal_cause;
    std::atomic<bool> cancel{false};
    bool              abort_armed = false; // the abort callback may stop the graph that runs now
    int32_t           injected_status = 0; // by a test, from the abort callback

    // seq_add and seq_cp across streams move data only at llama.cpp's next update.
    bool update_pending = false;

    // Recurrent rollback (n_rs_seq > 0): what the slots of each sequence hold, since llama.cpp accepts more than that.
    std::array<uint32_t, 256> rollback_tokens{};
    std::array<bool, 256>     rollback_pending{};

    lcs::decode_rows                rows;
    std::vector<lcs::decode_rows>   retired_rows; // held by a reader
    int32_t                         n_holders = 0;
    uint64_t                        output_floats = 0; // what llama.cpp's output buffer is known to hold

    // Scratch of decode, kept between calls.
    std::vector<int32_t>  pos;
    std::vector<int32_t>  n_seq_id;
    std::vector<int32_t>  seq_id;
    std::vector<int32_t*> seq_ids;
    std::vector<int8_t>   want;

    llama_memory_t memory() const { return llama_get_memory(ctx.get()); }
    bool           recurrent() const {
        return info.memory_kind == LCS_MEMORY_KIND_RECURRENT || info.memory_kind == LCS_MEMORY_KIND_HYBRID;
    }
};

namespace lcs {

// Enters a context that is not fatal. DECODE_FATAL with the first cause otherwise.
class entered_context {
public:
    explicit entered_context(lcs_context * ctx);

private:
    entered entered_;
};

// The memory, or UNSUPPORTED ("memory").
llama_memory_t require_memory(const lcs_context & ctx);
void           require_seq(const lcs_context & ctx, const char * what, int32_t seq_id);

// Makes the context fatal and throws DECODE_FATAL.
[[noreturn]] void fail_fatal(lcs_context & ctx, const std::string & cause);

// Runs what seq_add and seq_cp left pending, with the abort callback disarmed: llama.cpp would go on after an aborted
// shift and apply it again.
void flush_updates(lcs_context & ctx);

// memory.cpp. The caches of a memory with windowed layers, or of its part that has them; null: none has.
const llama_kv_cache_iswa * windowed_memory(const lcs_context & ctx);
// memory.cpp. Gives up what no window shows any more, in a cache that sequences share; whether there was anything.
// Where a call found no room it is worth another try: llama.cpp overwrites such cells of one sequence itself, but those
// that several have in common stay with all of them.
bool free_masked_cells(lcs_context & ctx);

// What llama.cpp is asked for. ARG, RANGE, UNSUPPORTED.
llama_context_params judge_context(const model_box & box, const lcs_context_params & params);
// By parameters that were judged. NOMEM, INTERNAL.
context_ptr make_context(model_box & box, const llama_context_params & params);
// Of llama.cpp's output buffer in a context that has decoded nothing yet.
uint64_t first_output_floats(const model_box & box, const llama_context_params & params);

// Into the caller's array; BUFFER where it is too small. n_out has the number in either case.
void give_uses(const std::vector<lcs_memory_use> & uses, lcs_memory_use * entries, size_t capacity, size_t * n_out);

// fit.cpp. The memory of one layer, prediction layers included; il < n_layer_all.
lcs_header_layer layer_of(const model_box & model, uint32_t il);

// NOMEM unless the KV cache, then (after creation) the compute buffers, fit what the machine has left: Linux
// would promise the memory and kill the process when it is touched.
void require_kv_fits(const model_box & model, const llama_context_params & params);
void require_compute_fits(const lcs_context & ctx, uint64_t available_before);
// The same of what making a context allocates or lists where its model has no weights: recurrent state, and cells.
void require_dry_run_fits(const model_box & model, const llama_context_params & params);

} // namespace lcs
