// Owns the making of a context, its resolved values, threads, adapters and counters. Decoding is lcs_decode.cpp's.
#include "lcs_context.hpp"

#include "llama-context.h"
#include "llama-ext.h"
#include "llama-model.h"

#include "ggml-cpu.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <fstream>
#include <set>
#include <thread>

namespace lcs {

namespace {

constexpr int32_t  THREADS_MAX = GGML_MAX_N_THREADS;
// Positions are int32, and llama.cpp pads counts to 256.
constexpr uint32_t N_CTX_MAX = 0x7fffff00;
constexpr uint32_t DEFAULT_OUTPUT_ROWS = 32;
// ggml's default: idle threads spin about a tenth of a second before they sleep.
constexpr int32_t  DEFAULT_POLL = 50;

constexpr lcs_type CACHE_TYPES[] = {LCS_TYPE_F32,  LCS_TYPE_F16,  LCS_TYPE_BF16, LCS_TYPE_Q8_0,  LCS_TYPE_Q5_0,
                                    LCS_TYPE_Q5_1, LCS_TYPE_Q4_0, LCS_TYPE_Q4_1, LCS_TYPE_IQ4_NL};

ggml_type cache_type(const char * what, int32_t type) {
    if (std::find(std::begin(CACHE_TYPES), std::end(CACHE_TYPES), type) == std::end(CACHE_TYPES)) {
        fail(LCS_STATUS_ARG, std::string(what) + " " + std::to_string(type) + " is no type of a KV cache", what, "",
             std::to_string(type));
    }
    return static_cast<ggml_type>(type);
}

// The cores this process may run on; of two hardware threads of one core, one: they share its arithmetic.
int32_t default_threads() {
    const unsigned allowed = std::max(1u, std::thread::hardware_concurrency());
    std::set<std::string> cores;
    for (unsigned cpu = 0;; ++cpu) {
        std::ifstream file("/sys/devices/system/cpu/cpu" + std::to_string(cpu) + "/topology/thread_siblings");
        std::string   siblings;
        if (!(file >> siblings)) {
            break;
        }
        cores.insert(siblings);
    }
    const unsigned n = cores.empty() ? allowed : std::min(allowed, static_cast<unsigned>(cores.size()));
    return static_cast<int32_t>(std::min(n, static_cast<unsigned>(THREADS_MAX)));
}

int32_t resolve_threads(const char * what, int32_t n, int32_t otherwise) {
    if (n <= 0) {
        return otherwise;
    }
    require_range(what, n, 1, THREADS_MAX);
    return n;
}

// Graph computation asks this after each node, on the thread that called decode.
bool should_abort(void * data) {
    auto & ctx = *static_cast<lcs_context *>(data);
    if (const int32_t status = decode_fault_at_node(); status != 0) {
        ctx.injected_status = status;
        return true;
    }
    return ctx.abort_armed && ctx.cancel.load(std::memory_order_relaxed);
}

// Every layer's K (and V) must be whole blocks a head: views of heads cannot begin inside a block.
void require_blocks(const llama_hparams & h, const char * what, ggml_type type, bool is_k) {
    const auto block = static_cast<uint32_t>(ggml_blck_size(type));
    for (uint32_t il = 0; il < h.n_layer() && block > 1; ++il) {
        if (h.is_recr(il) || !h.has_kv(il)) {
            continue;
        }
        const uint32_t head = is_k ? h.n_embd_head_k(il) : h.n_embd_head_v(il);
        if (head % block != 0) {
            fail(LCS_STATUS_ARG,
                 std::string(what) + " " + ggml_type_name(type) + " has blocks of " + std::to_string(block) +
                         ", which do not divide the head size " + std::to_string(head),
                 what, std::to_string(block), std::to_string(head));
        }
    }
}

} // namespace

llama_context_params judge_context(const model_box & box, const lcs_context_params & p) {
    if (box.info.vocab_only) {
        fail(LCS_STATUS_UNSUPPORTED, "a vocab_only model has no weights to make a context from", "context");
    }
    if (box.info.has_encoder) {
        fail(LCS_STATUS_UNSUPPORTED, "encoder-decoder models are not supported", "encoder");
    }
    const llama_hparams & h = box.model->hparams;

    const int64_t n_ctx = p.n_ctx == 0 ? box.info.n_ctx_train : static_cast<int64_t>(p.n_ctx);
    require_range("n_ctx", n_ctx, 1, N_CTX_MAX);
    require_range("n_batch", p.n_batch, 1, INT32_MAX);
    require_range("n_ubatch", p.n_ubatch, 1, INT32_MAX);
    require_range("n_seq_max", p.n_seq_max, 1, 256);
    require_range("n_rs_seq", p.n_rs_seq, 0, 1024);
    require_range("flash_attn", p.flash_attn, -1, 1, LCS_STATUS_ARG);
    require_range("pooling", p.pooling, -1, 4, LCS_STATUS_ARG);
    require_range("attention", p.attention, -1, 1, LCS_STATUS_ARG);
    require_range("rope_scaling", p.rope_scaling, -1, 3, LCS_STATUS_ARG);
    require_range("poll", p.poll, -1, 100);
    require_finite("rope_freq_base", p.rope_freq_base, 0, 1e12);
    require_finite("rope_freq_scale", p.rope_freq_scale, 0, 1e6);
    require_finite("yarn_ext_factor", p.yarn_ext_factor, -1e6, 1e6);
    require_finite("yarn_attn_factor", p.yarn_attn_factor, -1e6, 1e6);
    require_finite("yarn_beta_fast", p.yarn_beta_fast, -1e6, 1e6);
    require_finite("yarn_beta_slow", p.yarn_beta_slow, -1e6, 1e6);
    require_range("yarn_orig_ctx", p.yarn_orig_ctx, 0, N_CTX_MAX);

    llama_context_params out = llama_context_default_params();
    out.n_ctx = static_cast<uint32_t>(n_ctx);
    out.n_batch = std::min(p.n_batch, out.n_ctx);
    out.n_ubatch = std::min(p.n_ubatch, out.n_batch);
    out.n_seq_max = p.n_seq_max;
    out.n_rs_seq = p.n_rs_seq;
    if (p.n_seq_max > out.n_batch) {
        fail(LCS_STATUS_ARG,
             "n_seq_max " + std::to_string(p.n_seq_max) + " exceeds n_batch or n_ctx, " + std::to_string(out.n_batch),
             "n_seq_max", std::to_string(out.n_batch), std::to_string(p.n_seq_max));
    }
    if (p.n_rs_seq > 0 && out.n_ubatch <= p.n_rs_seq + 1) {
        fail(LCS_STATUS_ARG,
             "n_ubatch " + std::to_string(out.n_ubatch) + " must exceed n_rs_seq + 1, " + std::to_string(p.n_rs_seq + 1),
             "n_ubatch", std::to_string(p.n_rs_seq + 2), std::to_string(out.n_ubatch));
    }

    out.type_k = cache_type("type_k", p.type_k);
    out.type_v = cache_type("type_v", p.type_v);
    require_blocks(h, "type_k", out.type_k, true);
    require_blocks(h, "type_v", out.type_v, false);
    if (ggml_is_quantized(out.type_v) && p.flash_attn == LCS_FLASH_ATTN_OFF) {
        fail(LCS_STATUS_ARG,
             std::string("a quantised V cache (") + ggml_type_name(out.type_v) + ") needs flash attention", "type_v",
             "f16", ggml_type_name(out.type_v));
    }
    if (h.is_mla() && out.type_k != out.type_v) {
        fail(LCS_STATUS_ARG, "this model needs type_k and type_v to be the same", "type_v", ggml_type_name(out.type_k),
             ggml_type_name(out.type_v));
    }

    const bool no_memory = box.info.memory_kind == LCS_MEMORY_KIND_NONE;
    const bool every_row = p.embeddings || no_memory;
    if (no_memory) {
        out.n_ubatch = out.n_batch; // such a model sees a batch whole
    }
    uint32_t rows = p.n_outputs_max;
    if (rows == 0) {
        rows = every_row ? out.n_batch : std::max(p.n_seq_max, DEFAULT_OUTPUT_ROWS);
    }
    if (rows < p.n_seq_max) {
        fail(LCS_STATUS_ARG,
             "n_outputs_max " + std::to_string(rows) + " is less than n_seq_max, " + std::to_string(p.n_seq_max),
             "n_outputs_max", std::to_string(p.n_seq_max), std::to_string(rows));
    }
    out.n_outputs_max = std::min(rows, out.n_batch);
    out.n_outputs_max_per_seq = out.n_outputs_max;

    out.n_threads = resolve_threads("n_threads", p.n_threads, default_threads());
    out.n_threads_batch = resolve_threads("n_threads_batch", p.n_threads_batch, out.n_threads);
    // llama.cpp turns it off for Grok by itself; said here, it also tells how V is kept.
    out.flash_attn_type = box.architecture == "grok" ? LLAMA_FLASH_ATTN_TYPE_DISABLED
                                                     : static_cast<llama_flash_attn_type>(p.flash_attn);
    out.pooling_type = static_cast<enum llama_pooling_type>(p.pooling);
    out.attention_type = static_cast<llama_attention_type>(p.attention);
    out.rope_scaling_type = static_cast<llama_rope_scaling_type>(p.rope_scaling);
    out.rope_freq_base = p.rope_freq_base;
    out.rope_freq_scale = p.rope_freq_scale;
    out.yarn_ext_factor = p.yarn_ext_factor;
    out.yarn_attn_factor = p.yarn_attn_factor;
    out.yarn_beta_fast = p.yarn_beta_fast;
    out.yarn_beta_slow = p.yarn_beta_slow;
    out.yarn_orig_ctx = p.yarn_orig_ctx;
    out.embeddings = p.embeddings;
    out.offload_kqv = p.offload_kqv;
    out.op_offload = p.op_offload;
    out.swa_full = p.swa_full;
    out.kv_unified = p.kv_unified;
    out.no_perf = !p.perf;
    return out;
}

uint64_t first_output_floats(const model_box & box, const llama_context_params & params) {
    const int64_t row = box.info.n_vocab + (params.embeddings ? box.info.n_embd_out : 0);
    return static_cast<uint64_t>(row) * params.n_seq_max;
}

namespace {

#if !defined(LCS_OPENMP)
// The CPU backend remembers the pool of its last graph and pauses it when it is given another: also one that is gone.
void forget_pool(lcs_context & ctx) {
    const ggml_backend_sched_t sched = ctx.ctx->get_sched();
    for (int i = 0; i < ggml_backend_sched_get_n_backends(sched); ++i) {
        const ggml_backend_t backend = ggml_backend_sched_get_backend(sched, i);
        if (ggml_backend_is_cpu(backend)) {
            ggml_backend_cpu_set_threadpool(backend, nullptr);
        }
    }
}
#endif

void attach_pools(lcs_context & ctx, int32_t n_threads, int32_t n_threads_batch) {
#if !defined(LCS_OPENMP) // OpenMP keeps its own team, and reads a smaller pool out of bounds
    const auto make = [&](int32_t n) {
        fault_point();
        ggml_threadpool_params params = ggml_threadpool_params_default(n);
        params.poll = static_cast<uint32_t>(ctx.poll);
        threadpool_ptr pool(ggml_threadpool_new(&params));
        if (pool == nullptr) {
            fail(LCS_STATUS_NOMEM, "no thread pool of " + std::to_string(n) + " threads can be made");
        }
        return pool;
    };
    threadpool_ptr pool = make(n_threads);
    threadpool_ptr pool_batch = n_threads == n_threads_batch ? nullptr : make(n_threads_batch);
    llama_attach_threadpool(ctx.ctx.get(), pool.get(), pool_batch ? pool_batch.get() : pool.get());
    forget_pool(ctx);
    ctx.pool = std::move(pool);
    ctx.pool_batch = std::move(pool_batch);
#endif
    llama_set_n_threads(ctx.ctx.get(), n_threads, n_threads_batch);
    ctx.info.n_threads = n_threads;
    ctx.info.n_threads_batch = n_threads_batch;
}

void read_info(lcs_context & ctx, const llama_context_params & params) {
    const llama_cparams & resolved = ctx.ctx->get_cparams();
    const llama_memory_t  memory = ctx.memory();
    lcs_context_info &    info = ctx.info;
    info.n_ctx = resolved.n_ctx;
    info.n_ctx_seq = resolved.n_ctx_seq;
    info.n_batch = resolved.n_batch;
    info.n_ubatch = resolved.n_ubatch;
    info.n_seq_max = resolved.n_seq_max;
    info.n_rs_seq = resolved.n_rs_seq;
    info.n_outputs_max = resolved.n_outputs_max;
    info.flash_attn = resolved.flash_attn ? LCS_FLASH_ATTN_ON : LCS_FLASH_ATTN_OFF;
    info.type_k = params.type_k;
    info.type_v = params.type_v;
    info.pooling = resolved.pooling_type;
    info.memory_kind = memory == nullptr ? LCS_MEMORY_KIND_NONE : ctx.model->info.memory_kind;
    info.kv_unified = resolved.kv_unified;
    info.n_stream = resolved.kv_unified ? 1 : static_cast<int32_t>(resolved.n_seq_max);
    info.swa_full = params.swa_full;
    info.can_shift = memory != nullptr && llama_memory_can_shift(memory);
    info.embeddings = params.embeddings;
    ctx.can_cut = memory != nullptr && resolved.causal_attn && resolved.pooling_type == LLAMA_POOLING_TYPE_NONE;
    ctx.perf = !params.no_perf;
    // Decided by what was asked at creation: auto counts as on, whatever it resolved to.
    ctx.v_trans = params.flash_attn_type == LLAMA_FLASH_ATTN_TYPE_DISABLED;
    ctx.positions_may_jump = ctx.model->model->hparams.n_pos_per_embd() > 1;
    if (const ggml_tensor * table = ctx.model->model->pos_embd; table != nullptr) {
        ctx.n_pos_max = table->ne[1]; // a position past the table would be an assert in ggml
    }
    ctx.output_floats = first_output_floats(*ctx.model, params);
}

} // namespace

void threadpool_free::operator()(ggml_threadpool * pool) const noexcept {
    ggml_threadpool_free(pool);
}

entered_context::entered_context(lcs_context * ctx) : entered_(ctx, "context") {
    if (ctx->fatal) {
        fail(LCS_STATUS_DECODE_FATAL, "the context is unusable: " + ctx->fatal_cause);
    }
}

llama_memory_t require_memory(const lcs_context & ctx) {
    const llama_memory_t memory = ctx.memory();
    if (memory == nullptr) {
        fail(LCS_STATUS_UNSUPPORTED, "this model keeps no memory", "memory");
    }
    return memory;
}

void require_seq(const lcs_context & ctx, const char * what, int32_t seq_id) {
    require_range(what, seq_id, 0, static_cast<int64_t>(ctx.info.n_seq_max) - 1);
}

context_ptr make_context(model_box & box, const llama_context_params & params) {
    const std::lock_guard<std::mutex> lock(box.mutex);
    context_ptr                       ctx(llama_init_from_model(box.model, params));
    if (ctx == nullptr) {
        const std::string & log = log_last_line();
        const bool          memory = log.find("alloc") != std::string::npos;
        fail(memory ? LCS_STATUS_NOMEM : LCS_STATUS_INTERNAL,
             log.empty() ? "llama.cpp refused to make a context" : log);
    }
    return ctx;
}

void give_uses(const std::vector<lcs_memory_use> & uses, lcs_memory_use * entries, size_t capacity, size_t * n_out) {
    *n_out = uses.size();
    if (capacity < uses.size()) {
        fail(LCS_STATUS_BUFFER, "capacity is less than " + std::to_string(uses.size()) + " entries");
    }
    require(entries, "entries");
    std::copy(uses.begin(), uses.end(), entries);
}

void fail_fatal(lcs_context & ctx, const std::string & cause) {
    if (!ctx.fatal) {
        ctx.fatal = true;
        ctx.info.fatal = true;
        ctx.fatal_cause = cause;
    }
    ctx.rows.clear();
    fail(LCS_STATUS_DECODE_FATAL, "the context is unusable: " + ctx.fatal_cause);
}

} // namespace lcs

extern "C" {

void lcs_context_params_init(lcs_context_params * params_out) {
    if (params_out == nullptr) {
        return;
    }
    const llama_context_params upstream = llama_context_default_params();
    lcs_context_params p{};
    p.n_ctx = upstream.n_ctx;
    p.n_batch = upstream.n_batch;
    p.n_ubatch = upstream.n_ubatch;
    p.n_seq_max = upstream.n_seq_max;
    p.poll = -1;
    p.flash_attn = LCS_FLASH_ATTN_OFF;
    p.type_k = upstream.type_k;
    p.type_v = upstream.type_v;
    p.pooling = upstream.pooling_type;
    p.attention = upstream.attention_type;
    p.rope_scaling = upstream.rope_scaling_type;
    p.yarn_ext_factor = upstream.yarn_ext_factor;
    p.yarn_attn_factor = upstream.yarn_attn_factor;
    p.yarn_beta_fast = upstream.yarn_beta_fast;
    p.yarn_beta_slow = upstream.yarn_beta_slow;
    p.yarn_orig_ctx = upstream.yarn_orig_ctx;
    p.offload_kqv = upstream.offload_kqv;
    p.op_offload = upstream.op_offload;
    *params_out = p;
}

lcs_status lcs_context_init(lcs_model * model, const lcs_context_params * params, lcs_context ** ctx_out) {
    return lcs::guard([&] {
        lcs::require_alive(model, "model");
        lcs::require(ctx_out, "ctx_out");
        lcs_context_params defaults;
        lcs_context_params_init(&defaults);
        const lcs_context_params & given = params == nullptr ? defaults : *params;

        auto ctx = std::make_unique<lcs_context>();
        ctx->model = model->box;
        ctx->poll = given.poll < 0 ? lcs::DEFAULT_POLL : given.poll;
        llama_context_params judged = lcs::judge_context(*model->box, given);
        judged.abort_callback = lcs::should_abort;
        judged.abort_callback_data = ctx.get();

        const uint64_t available = lcs::available_memory_bytes();
        lcs::require_kv_fits(*model->box, judged);
        lcs::fault_point();
        ctx->ctx = lcs::make_context(*model->box, judged);
        lcs::require_compute_fits(*ctx, available);
        lcs::read_info(*ctx, judged);
        lcs::attach_pools(*ctx, judged.n_threads, judged.n_threads_batch);
        *ctx_out = ctx.release();
    });
}

void lcs_context_free(lcs_context * ctx) {
    lcs::free_handle(ctx);
}

lcs_status lcs_context_get_info(const lcs_context * ctx, lcs_context_info * info_out) {
    return lcs::guard([&] {
        lcs::require_alive(ctx, "context");
        lcs::require(info_out, "info_out");
        *info_out = ctx->info;
    });
}

lcs_status lcs_context_set_threads(lcs_context * ctx, int32_t n_threads, int32_t n_threads_batch) {
    return lcs::guard([&] {
        const lcs::entered_context entered(ctx);
        const int32_t n = lcs::resolve_threads("n_threads", n_threads, lcs::default_threads());
        const int32_t n_batch = lcs::resolve_threads("n_threads_batch", n_threads_batch, n);
        llama_synchronize(ctx->ctx.get());
        lcs::attach_pools(*ctx, n, n_batch);
    });
}

lcs_status lcs_context_set_embeddings(lcs_context * ctx, bool embeddings) {
    return lcs::guard([&] {
        const lcs::entered_context entered(ctx);
        if (embeddings == ctx->info.embeddings) {
            return;
        }
        ctx->rows.clear();
        llama_set_embeddings(ctx->ctx.get(), embeddings);
        ctx->info.embeddings = embeddings;
    });
}

lcs_status lcs_context_set_adapters(
        lcs_context * ctx, lcs_adapter * const * adapters, const float * scales, size_t n) {
    return lcs::guard([&] {
        const lcs::entered_context entered(ctx);
        if (n > 0) {
            lcs::require(adapters, "adapters");
            lcs::require(scales, "scales");
        }
        std::vector<std::shared_ptr<lcs::adapter_box>> boxes;
        std::vector<llama_adapter_lora *>              raw;
        std::vector<float>                             factors;
        for (size_t i = 0; i < n; ++i) {
            lcs::require_alive(adapters[i], "adapter");
            const auto & box = adapters[i]->box;
            if (box->model != ctx->model) {
                lcs::fail(LCS_STATUS_ARG, "adapter " + std::to_string(i) + " was loaded for another model");
            }
            if (std::find(boxes.begin(), boxes.end(), box) != boxes.end()) {
                lcs::fail(LCS_STATUS_ARG, "adapter " + std::to_string(i) + " is named twice");
            }
            lcs::require_finite("scale", scales[i], -1e6, 1e6);
            boxes.push_back(box);
            raw.push_back(box->adapter);
            factors.push_back(scales[i]);
        }
        lcs::fault_point();
        if (llama_set_adapters_lora(ctx->ctx.get(), raw.data(), n, factors.data()) != 0) {
            lcs::fail(LCS_STATUS_INTERNAL, "llama.cpp refused the adapters");
        }
        ctx->adapters = std::move(boxes);
    });
}

lcs_status lcs_context_cancel(lcs_context * ctx) {
    return lcs::guard([&] {
        lcs::require_alive(ctx, "context");
        ctx->cancel.store(true, std::memory_order_relaxed);
    });
}

void lcs_context_cancel_signal(lcs_context * ctx) {
    ctx->cancel.store(true, std::memory_order_relaxed);
}

void lcs_context_cancel_clear(lcs_context * ctx) {
    ctx->cancel.store(false, std::memory_order_relaxed);
}

lcs_status lcs_context_get_perf(lcs_context * ctx, lcs_perf * perf_out) {
    return lcs::guard([&] {
        const lcs::entered entered(ctx, "context");
        lcs::require(perf_out, "perf_out");
        // Upstream divides by these counts and so never lets them be 0: what was not measured is 0 here.
        const llama_perf_context_data data = llama_perf_context(ctx->ctx.get());
        *perf_out = {};
        if (ctx->perf) {
            perf_out->load_ms = data.t_load_ms;
            perf_out->prefill_ms = data.t_p_eval_ms;
            perf_out->decode_ms = data.t_eval_ms;
            perf_out->n_prefill = data.t_p_eval_ms > 0 ? data.n_p_eval : 0;
            perf_out->n_decode = data.t_eval_ms > 0 ? data.n_eval : 0;
            perf_out->n_reused = data.n_reused;
        }
    });
}

lcs_status lcs_context_reset_perf(lcs_context * ctx) {
    return lcs::guard([&] {
        const lcs::entered entered(ctx, "context");
        llama_perf_context_reset(ctx->ctx.get());
    });
}

lcs_status lcs_context_memory_use(lcs_context * ctx, lcs_memory_use * entries, size_t capacity, size_t * n_out) {
    return lcs::guard([&] {
        const lcs::entered entered(ctx, "context");
        lcs::require(n_out, "n_out");
        std::vector<lcs_memory_use> found;
        for (const auto & [type, use] : llama_get_memory_breakdown(ctx->ctx.get())) {
            found.push_back({ggml_backend_buft_name(type), use.model, use.context, use.compute});
        }
        found.push_back({"output", 0, 0, ctx->output_floats * sizeof(float)});
        lcs::give_uses(found, entries, capacity, n_out);
    });
}

} // extern "C"
