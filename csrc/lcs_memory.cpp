// Owns the memory operations: which of them this memory can do is judged here, since llama.cpp asserts on the others.
#include "lcs_context.hpp"

#include "llama-kv-cache-iswa.h"
#include "llama-memory-hybrid-iswa.h"
#include "llama-model.h"

#include <algorithm>

namespace lcs {

namespace {

// p0 < 0 means 0, p1 < 0 means to the end, as upstream; one spelling from here on.
struct span {
    int32_t p0;
    int32_t p1;

    bool empty() const { return p0 >= p1; }
};

span make_span(int32_t p0, int32_t p1) {
    return {std::max(p0, 0), p1 < 0 ? INT32_MAX : p1};
}

// Recurrent tail cuts are rollbacks into slots, of which llama.cpp also accepts stale ones.
bool rollback_allowed(const lcs_context & ctx, int32_t seq_id, const span & cut) {
    const auto    s = static_cast<size_t>(seq_id);
    const int32_t pos_max = llama_memory_seq_pos_max(ctx.memory(), seq_id);
    const int64_t n = int64_t{pos_max} + 1 - cut.p0;
    return !ctx.rollback_pending[s] && n >= 1 && n <= int64_t{ctx.rollback_tokens[s]};
}

void forget_rollback(lcs_context & ctx, int32_t seq_id) {
    ctx.rollback_tokens[static_cast<size_t>(seq_id)] = 0;
    ctx.rollback_pending[static_cast<size_t>(seq_id)] = false;
}

} // namespace

const llama_kv_cache_iswa * windowed_memory(const lcs_context & ctx) {
    const llama_memory_i * memory = ctx.memory();
    const auto *           hybrid = dynamic_cast<const llama_memory_hybrid_iswa *>(memory);
    return hybrid != nullptr ? hybrid->get_mem_attn() : dynamic_cast<const llama_kv_cache_iswa *>(memory);
}

bool free_masked_cells(lcs_context & ctx) {
    const llama_kv_cache_iswa * windowed = windowed_memory(ctx);
    if (windowed == nullptr || ctx.info.n_stream > 1) {
        return false;
    }
    llama_kv_cache * const cache = windowed->get_swa();
    const llama_hparams & h = ctx.model->model->hparams;
    bool                  freed = false;
    for (int32_t s = 0; s < static_cast<int32_t>(ctx.info.n_seq_max); ++s) {
        const int32_t pos_min = cache->seq_pos_min(s);
        const int32_t pos_max = cache->seq_pos_max(s);
        int32_t       first = pos_min;
        while (first >= 0 && first < pos_max && llama_hparams::is_masked_swa(h.n_swa, h.swa_type, first, pos_max)) {
            ++first;
        }
        if (first > pos_min) {
            cache->seq_rm(s, pos_min, first);
            freed = true;
        }
    }
    return freed;
}

} // namespace lcs

extern "C" {

lcs_status lcs_context_clear(lcs_context * ctx, bool data) {
    return lcs::guard([&] {
        const lcs::entered_context entered(ctx);
        const llama_memory_t memory = lcs::require_memory(*ctx);
        lcs::flush_updates(*ctx); // clearing does not drop pending copies
        llama_memory_clear(memory, data);
        ctx->rollback_tokens.fill(0);
        ctx->rollback_pending.fill(false);
    });
}

lcs_status lcs_context_seq_rm(lcs_context * ctx, int32_t seq_id, int32_t p0, int32_t p1, bool * removed_out) {
    return lcs::guard([&] {
        const lcs::entered_context entered(ctx);
        const llama_memory_t memory = lcs::require_memory(*ctx);
        lcs::require_seq(*ctx, "seq_id", seq_id);
        lcs::require(removed_out, "removed_out");
        const lcs::span cut = lcs::make_span(p0, p1);
        if (cut.empty()) {
            *removed_out = true;
            return;
        }
        // Where memories have parts, pos_max is that of the shortest: a cut beyond it may still remove something.
        const int32_t pos_max = llama_memory_seq_pos_max(memory, seq_id);
        const bool    whole = cut.p0 == 0 && cut.p1 > pos_max;
        const bool    rollback = ctx->recurrent() && !whole && cut.p0 <= pos_max;
        // Of a recurrent sequence llama.cpp accepts a cut that spares the tail, without effect.
        if (rollback && (cut.p1 <= pos_max || !lcs::rollback_allowed(*ctx, seq_id, cut))) {
            *removed_out = false;
            return;
        }
        *removed_out = llama_memory_seq_rm(memory, seq_id, cut.p0, cut.p1 == INT32_MAX ? -1 : cut.p1);
        if (whole) {
            lcs::forget_rollback(*ctx, seq_id);
        } else if (rollback && *removed_out) {
            ctx->rollback_pending[static_cast<size_t>(seq_id)] = true;
        }
    });
}

lcs_status lcs_context_seq_cp(lcs_context * ctx, int32_t src, int32_t dst, int32_t p0, int32_t p1) {
    return lcs::guard([&] {
        const lcs::entered_context entered(ctx);
        const llama_memory_t memory = lcs::require_memory(*ctx);
        lcs::require_seq(*ctx, "src", src);
        lcs::require_seq(*ctx, "dst", dst);
        if (src == dst) {
            return;
        }
        const lcs::span copied = lcs::make_span(p0, p1);
        const int32_t   pos_max = llama_memory_seq_pos_max(memory, src);
        const bool      whole = copied.p0 <= std::max(0, llama_memory_seq_pos_min(memory, src)) && copied.p1 > pos_max;
        const bool      streams = ctx->info.n_stream > 1;
        if (!whole && (streams || ctx->recurrent())) {
            lcs::fail(LCS_STATUS_UNSUPPORTED,
                      streams ? "part of a sequence cannot be copied between streams; use kv_unified"
                              : "part of a recurrent sequence cannot be copied",
                      "partial seq_cp");
        }
        if (ctx->rollback_pending[static_cast<size_t>(src)]) {
            lcs::fail(LCS_STATUS_UNSUPPORTED, "a sequence with a pending rollback cannot be copied", "seq_cp");
        }
        lcs::fault_point();
        llama_memory_seq_rm(memory, dst, -1, -1);
        lcs::forget_rollback(*ctx, dst);
        if (pos_max < 0 || copied.empty()) {
            return;
        }
        llama_memory_seq_cp(memory, src, dst, whole ? -1 : copied.p0, whole ? -1 : copied.p1);
        ctx->update_pending = ctx->update_pending || streams;
    });
}

lcs_status lcs_context_seq_keep(lcs_context * ctx, int32_t seq_id) {
    return lcs::guard([&] {
        const lcs::entered_context entered(ctx);
        const llama_memory_t memory = lcs::require_memory(*ctx);
        lcs::require_seq(*ctx, "seq_id", seq_id);
        // llama_memory_seq_keep looks only at the stream of this sequence.
        for (int32_t s = 0; s < static_cast<int32_t>(ctx->info.n_seq_max); ++s) {
            if (s != seq_id) {
                llama_memory_seq_rm(memory, s, -1, -1);
                lcs::forget_rollback(*ctx, s);
            }
        }
    });
}

lcs_status lcs_context_seq_add(lcs_context * ctx, int32_t seq_id, int32_t p0, int32_t p1, int32_t delta) {
    return lcs::guard([&] {
        const lcs::entered_context entered(ctx);
        const llama_memory_t memory = lcs::require_memory(*ctx);
        lcs::require_seq(*ctx, "seq_id", seq_id);
        if (!ctx->info.can_shift) {
            lcs::fail(LCS_STATUS_UNSUPPORTED, "this memory cannot shift positions", "shift");
        }
        if (ggml_is_quantized(static_cast<ggml_type>(ctx->info.type_k))) {
            lcs::fail(LCS_STATUS_UNSUPPORTED, "a quantised K cache cannot be shifted", "shift");
        }
        const lcs::span moved = lcs::make_span(p0, p1);
        const int32_t   pos_max = llama_memory_seq_pos_max(memory, seq_id);
        if (delta == 0 || moved.empty() || moved.p0 > pos_max) {
            return;
        }
        const int64_t last = std::min<int64_t>(pos_max, int64_t{moved.p1} - 1);
        lcs::require_range("pos", last + delta, INT32_MIN, ctx->n_pos_max - 1);
        llama_memory_seq_add(memory, seq_id, moved.p0, moved.p1, delta);
        lcs::forget_rollback(*ctx, seq_id);
        ctx->update_pending = true;
    });
}

lcs_status lcs_context_seq_pos(lcs_context * ctx, int32_t seq_id, int32_t * min_out, int32_t * max_out) {
    return lcs::guard([&] {
        const lcs::entered entered(ctx, "context"); // also of a fatal context: what is left can be looked at
        const llama_memory_t memory = lcs::require_memory(*ctx);
        lcs::require_seq(*ctx, "seq_id", seq_id);
        lcs::require(min_out, "min_out");
        lcs::require(max_out, "max_out");
        *min_out = llama_memory_seq_pos_min(memory, seq_id);
        *max_out = llama_memory_seq_pos_max(memory, seq_id);
    });
}

} // extern "C"
