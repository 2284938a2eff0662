// Owns one question: does a context fit what the machine has left. Sizes follow from the model's shape before the cache
// is made, and from llama.cpp's own breakdown after.
#include "lcs_context.hpp"

#include "llama-ext.h"
#include "llama-model.h"

#include <algorithm>

namespace lcs {

namespace {

std::string bytes_text(uint64_t bytes) {
    return std::to_string(bytes >> 20) + " MiB";
}

uint64_t padded(uint64_t n) {
    return (n + 255) / 256 * 256;
}

// What the caches of a context would hold. Least: some architectures keep more, which only llama.cpp can tell.
struct cache_size {
    uint64_t n_cells = 0;
    uint64_t kv_bytes = 0;
    uint64_t state_bytes = 0;
};

cache_size cache_size_of(const model_box & model, const llama_context_params & params) {
    const llama_hparams & h = model.model->hparams;
    const uint64_t n_ctx = padded(params.n_ctx);
    const uint64_t n_stream = params.kv_unified ? 1 : params.n_seq_max;
    const uint64_t n_ctx_seq = params.kv_unified ? n_ctx : padded(n_ctx / n_stream);
    const uint64_t n_swa_cells = padded(std::min<uint64_t>(
            n_ctx_seq, uint64_t{h.n_swa} * (params.kv_unified ? params.n_seq_max : 1) + params.n_ubatch));
    const auto row = [](ggml_type type, uint64_t n) {
        return n / static_cast<uint64_t>(ggml_blck_size(type)) * ggml_type_size(type);
    };
    cache_size size;
    size.n_cells = n_ctx_seq * n_stream;
    for (uint32_t il = 0; il < h.n_layer(); ++il) {
        const lcs_header_layer layer = layer_of(model, il);
        const uint64_t         cells = !params.swa_full && layer.windowed ? n_swa_cells : n_ctx_seq;
        size.kv_bytes += cells * n_stream * (row(params.type_k, layer.n_embd_k) + row(params.type_v, layer.n_embd_v));
        size.state_bytes += uint64_t{layer.n_state} * sizeof(float) * params.n_seq_max * (1 + params.n_rs_seq);
    }
    return size;
}

} // namespace

void require_available(const char * what, uint64_t needed, uint64_t available) {
    if (needed > available) {
        fail(LCS_STATUS_NOMEM,
             std::string(what) + " needs " + bytes_text(needed) + ", " + bytes_text(available) + " are available",
             "memory", std::to_string(available), std::to_string(needed));
    }
}

lcs_header_layer layer_of(const model_box & model, uint32_t il) {
    const llama_hparams & h = model.model->hparams;
    lcs_header_layer      layer{};
    layer.n_head = static_cast<int32_t>(h.n_head(il));
    layer.n_head_kv = static_cast<int32_t>(h.n_head_kv(il));
    layer.prediction = il >= h.n_layer();
    if (model.info.memory_kind == LCS_MEMORY_KIND_NONE) {
        return layer;
    }
    if (!layer.prediction && h.is_recr(il)) {
        layer.n_state = h.n_embd_r() + h.n_embd_s();
    }
    // Falcon-H1 keeps both in every layer.
    if ((layer.n_state == 0 && (layer.prediction || h.has_kv(il))) || model.architecture == "falcon-h1") {
        layer.windowed = h.is_swa(il);
        layer.n_embd_k = h.n_embd_k_gqa(il);
        layer.n_embd_v = h.is_mla() ? 0 : h.n_embd_v_gqa(il);
    }
    return layer;
}

void require_kv_fits(const model_box & model, const llama_context_params & params) {
    if (!model.model->devices.empty() && params.offload_kqv) {
        return; // device allocations fail cleanly
    }
    const cache_size size = cache_size_of(model, params);
    require_available("the KV cache", size.kv_bytes + size.state_bytes, available_memory_bytes());
}

void require_dry_run_fits(const model_box & model, const llama_context_params & params) {
    constexpr uint64_t CELL_BYTES = 128; // position, shift and sequences of a cell, in two caches at most
    constexpr uint64_t MAX_CELLS = uint64_t{1} << 22; // more take seconds to list
    const cache_size   size = cache_size_of(model, params);
    if (size.n_cells > MAX_CELLS) {
        fail(LCS_STATUS_NOMEM, "a dry run lists at most " + std::to_string(MAX_CELLS) + " cells");
    }
    require_available("the dry run", size.state_bytes + size.n_cells * CELL_BYTES, available_memory_bytes() / 2);
}

void require_compute_fits(const lcs_context & ctx, uint64_t available_before) {
    uint64_t needed = 0;
    for (const auto & [type, use] : llama_get_memory_breakdown(ctx.ctx.get())) {
        if (ggml_backend_buft_is_host(type)) {
            needed += use.context + use.compute;
        }
    }
    require_available("the context", needed, available_before);
}

} // namespace lcs
