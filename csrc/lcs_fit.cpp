// Owns one question: does a context fit what the machine has left. Sizes follow from the model's shape before the cache
// is made, and from llama.cpp's own breakdown after.
#include "lcs_context.hpp"

#include "llama-ext.h"
#include "llama-model.h"

#include <algorithm>
#include <fstream>

namespace lcs {

namespace {

// A line "<name> <number>[ kB]" of a /proc or cgroup file. UINT64_MAX: none.
uint64_t read_number(const char * path, const std::string & name, uint64_t unit) {
    std::ifstream file(path);
    std::string   word;
    while (file >> word) {
        if (word == name) {
            uint64_t value = 0;
            return file >> value ? value * unit : UINT64_MAX;
        }
        file.ignore(1 << 16, '\n');
    }
    return UINT64_MAX;
}

uint64_t read_number(const char * path) {
    std::ifstream file(path);
    uint64_t      value = 0;
    return file >> value ? value : UINT64_MAX; // "max" is no number
}

std::string bytes_text(uint64_t bytes) {
    return std::to_string(bytes >> 20) + " MiB";
}

[[noreturn]] void fail_fit(const char * what, uint64_t needed, uint64_t available) {
    fail(LCS_STATUS_NOMEM,
         std::string(what) + " needs " + bytes_text(needed) + ", " + bytes_text(available) + " are available",
         "memory", std::to_string(available), std::to_string(needed));
}

uint64_t padded(uint64_t n) {
    return (n + 255) / 256 * 256;
}

} // namespace

uint64_t available_memory_bytes() {
    uint64_t available = UINT64_MAX;
#if defined(__linux__)
    const uint64_t free_ram = read_number("/proc/meminfo", "MemAvailable:", 1024);
    if (free_ram != UINT64_MAX) {
        const uint64_t swap = read_number("/proc/meminfo", "SwapFree:", 1024);
        available = free_ram + (swap == UINT64_MAX ? 0 : swap);
    }
    const uint64_t limit = read_number("/sys/fs/cgroup/memory.max");
    const uint64_t used = read_number("/sys/fs/cgroup/memory.current");
    if (limit != UINT64_MAX && used != UINT64_MAX) {
        // Mapped weights count as used there, but the kernel takes them back before it kills.
        const uint64_t cached = read_number("/sys/fs/cgroup/memory.stat", "file", 1);
        const uint64_t kept = used - std::min(used, cached == UINT64_MAX ? 0 : cached);
        available = std::min(available, limit - std::min(limit, kept));
    }
#endif
    return available;
}

void require_kv_fits(const model_box & model, const llama_context_params & params) {
    if (!model.model->devices.empty() && params.offload_kqv) {
        return; // device allocations fail cleanly
    }
    const llama_hparams & h = model.model->hparams;
    const uint64_t n_ctx = padded(params.n_ctx);
    const uint64_t n_stream = params.kv_unified ? 1 : params.n_seq_max;
    const uint64_t n_ctx_seq = params.kv_unified ? n_ctx : padded(n_ctx / n_stream);
    const uint64_t n_swa_cells = padded(std::min<uint64_t>(
            n_ctx_seq, uint64_t{h.n_swa} * (params.kv_unified ? params.n_seq_max : 1) + params.n_ubatch));
    const auto row = [](ggml_type type, uint64_t n) {
        return n / static_cast<uint64_t>(ggml_blck_size(type)) * ggml_type_size(type);
    };
    uint64_t bytes = 0;
    for (uint32_t il = 0; il < h.n_layer(); ++il) {
        if (h.is_recr(il)) {
            bytes += 4ull * (h.n_embd_r() + h.n_embd_s()) * params.n_seq_max * (1 + params.n_rs_seq);
        } else if (h.has_kv(il)) {
            const uint64_t cells = !params.swa_full && h.is_swa(il) ? n_swa_cells : n_ctx_seq;
            const uint64_t n_v = h.is_mla() ? 0 : h.n_embd_v_gqa(il);
            bytes += cells * n_stream * (row(params.type_k, h.n_embd_k_gqa(il)) + row(params.type_v, n_v));
        }
    }
    const uint64_t available = available_memory_bytes();
    if (bytes > available) {
        fail_fit("the KV cache", bytes, available);
    }
}

void require_compute_fits(const lcs_context & ctx, uint64_t available_before) {
    uint64_t needed = 0;
    for (const auto & [type, use] : llama_get_memory_breakdown(ctx.ctx.get())) {
        if (ggml_backend_buft_is_host(type)) {
            needed += use.context + use.compute;
        }
    }
    if (needed > available_before) {
        fail_fit("the context", needed, available_before);
    }
}

} // namespace lcs
