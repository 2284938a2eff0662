// Owns state blobs: our envelope around llama.cpp's bytes, and what is refused before llama.cpp sees one.
#include "lcs_context.hpp"

#include "llama-context.h"
#include "llama-kv-cache-iswa.h"
#include "llama-memory-hybrid.h"
#include "llama-memory-recurrent.h"
#include "llama-model.h"

#define XXH_INLINE_ALL
#include "hash/xxhash/xxhash.h"

#include <cstdlib>
#include <cstring>
#include <sstream>

namespace lcs {

namespace {

constexpr char     MAGIC[8] = {'L', 'C', 'S', 'S', 'T', 'A', 'T', 'E'};
constexpr uint32_t VERSION = 1;

enum class blob_kind : uint32_t { whole = 0, sequence = 1, partial = 2 };

const char * kind_name(blob_kind kind) {
    switch (kind) {
        case blob_kind::whole:    return "whole";
        case blob_kind::sequence: return "sequence";
        case blob_kind::partial:  return "partial";
    }
    return "?";
}

// The envelope. Little-endian, as every platform llama.cpp supports for GGUF; no padding inside.
struct header {
    char      magic[8];
    uint32_t  version;
    blob_kind kind;
    char      pin[16];
    uint64_t  model;
    int32_t   type_k;
    int32_t   type_v;
    uint32_t  v_trans;
    uint32_t  n_stream;
    uint32_t  n_seq_max; // of a whole state
    uint32_t  swa_full;
    uint32_t  rotation_off;
    int32_t   rope_scaling;
    float     rope_freq_base;
    float     rope_freq_scale;
    float     yarn_ext_factor;
    float     yarn_attn_factor;
    float     yarn_beta_fast;
    float     yarn_beta_slow;
    uint32_t  yarn_orig_ctx;
    int32_t   pos_min; // of a sequence; -1: empty
    int32_t   pos_max;
    uint32_t  reserved;
    uint64_t  payload_bytes;
    uint64_t  payload_hash;
    uint64_t  header_hash; // of everything before it
};
static_assert(sizeof(header) == 136, "the envelope has no padding");

constexpr size_t HASHED_HEADER = offsetof(header, header_hash);

uint64_t hash(const void * data, size_t n_bytes) {
    return XXH3_64bits(data, n_bytes);
}

blob_kind kind_of(const lcs_context & ctx, int32_t seq_id, bool partial) {
    if (seq_id == -1) {
        return blob_kind::whole;
    }
    // Attention memories have no part that cannot be cut: llama.cpp writes them whole.
    return partial && ctx.info.memory_kind != LCS_MEMORY_KIND_ATTENTION ? blob_kind::partial : blob_kind::sequence;
}

// Last position of what a partial state leaves alone. INT32_MAX: a recurrent memory has no such part. UNSUPPORTED for
// memories whose parts we cannot tell apart.
int32_t uncut_pos_max(const lcs_context & ctx, int32_t seq_id) {
    const llama_memory_i * memory = ctx.memory();
    if (dynamic_cast<const llama_memory_recurrent *>(memory) != nullptr) {
        return INT32_MAX;
    }
    if (const auto * windowed = windowed_memory(ctx)) {
        return windowed->get_base()->seq_pos_max(seq_id);
    }
    if (const auto * hybrid = dynamic_cast<const llama_memory_hybrid *>(memory)) {
        return hybrid->get_mem_attn()->seq_pos_max(seq_id);
    }
    fail(LCS_STATUS_UNSUPPORTED, "partial states of this memory kind are not supported", "partial state");
}

llama_state_seq_flags flags_of(blob_kind kind) {
    return kind == blob_kind::partial ? LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY : LLAMA_STATE_SEQ_FLAGS_NONE;
}

// What this context would write, less sizes and hashes.
header describe(const lcs_context & ctx, blob_kind kind) {
    const llama_cparams & c = ctx.ctx->get_cparams();
    const char *          rotation_off = std::getenv("LLAMA_ATTN_ROT_DISABLE"); // changes the basis cells are kept in
    header h{};
    std::memcpy(h.magic, MAGIC, sizeof MAGIC);
    h.version = VERSION;
    h.kind = kind;
    std::strncpy(h.pin, LCS_PIN, sizeof h.pin - 1);
    h.model = ctx.model->fingerprint;
    h.type_k = ctx.info.type_k;
    h.type_v = ctx.info.type_v;
    h.v_trans = ctx.v_trans;
    h.n_stream = static_cast<uint32_t>(ctx.info.n_stream);
    h.n_seq_max = ctx.info.n_seq_max;
    h.swa_full = ctx.info.swa_full;
    h.rotation_off = rotation_off != nullptr && std::atoi(rotation_off) != 0;
    h.rope_scaling = c.rope_scaling_type;
    h.rope_freq_base = c.rope_freq_base;
    h.rope_freq_scale = c.rope_freq_scale;
    h.yarn_ext_factor = c.yarn_ext_factor;
    h.yarn_attn_factor = c.yarn_attn_factor;
    h.yarn_beta_fast = c.yarn_beta_fast;
    h.yarn_beta_slow = c.yarn_beta_slow;
    h.yarn_orig_ctx = c.n_ctx_orig_yarn;
    return h;
}

[[noreturn]] void fail_corrupt(const std::string & why) {
    fail(LCS_STATUS_STATE_CORRUPT, "the state blob is damaged: " + why);
}

template <class T>
std::string text(const T & value) {
    std::ostringstream out;
    out << value;
    return out.str();
}

template <class T>
void require_same(const char * field, const T & expected, const T & actual) {
    if (expected != actual) {
        fail(LCS_STATUS_STATE_MISMATCH,
             std::string("the state blob has another ") + field + ": " + text(actual) + ", expected " + text(expected),
             field, text(expected), text(actual));
    }
}

// Everything that can be known of a blob before llama.cpp reads it.
header judge_blob(const lcs_context & ctx, blob_kind kind, const uint8_t * data, size_t n_bytes) {
    if (n_bytes < sizeof(header)) {
        fail_corrupt(std::to_string(n_bytes) + " bytes are less than its header of " + std::to_string(sizeof(header)));
    }
    header h;
    std::memcpy(&h, data, sizeof h);
    if (std::memcmp(h.magic, MAGIC, sizeof MAGIC) != 0) {
        fail_corrupt("it does not begin with our magic");
    }
    if (h.header_hash != hash(data, HASHED_HEADER)) {
        fail_corrupt("the checksum of its header is wrong");
    }
    if (h.payload_bytes != n_bytes - sizeof(header)) {
        fail_corrupt("it holds " + std::to_string(n_bytes - sizeof(header)) + " bytes of state, its header says " +
                     std::to_string(h.payload_bytes));
    }
    if (h.payload_hash != hash(data + sizeof(header), h.payload_bytes)) {
        fail_corrupt("its checksum is wrong");
    }
    const header own = describe(ctx, kind);
    require_same("version", own.version, h.version);
    require_same<std::string>("pin", own.pin, std::string(h.pin, strnlen(h.pin, sizeof h.pin)));
    require_same<std::string>("kind", kind_name(kind), kind_name(h.kind));
    require_same("model", own.model, h.model);
    require_same("type_k", own.type_k, h.type_k);
    require_same("type_v", own.type_v, h.type_v);
    require_same("v_trans", own.v_trans, h.v_trans);
    require_same("n_stream", own.n_stream, h.n_stream);
    if (kind == blob_kind::whole) {
        require_same("n_seq_max", own.n_seq_max, h.n_seq_max);
    }
    require_same("swa_full", own.swa_full, h.swa_full);
    require_same("rotation_off", own.rotation_off, h.rotation_off);
    require_same("rope_scaling", own.rope_scaling, h.rope_scaling);
    require_same("rope_freq_base", own.rope_freq_base, h.rope_freq_base);
    require_same("rope_freq_scale", own.rope_freq_scale, h.rope_freq_scale);
    require_same("yarn_ext_factor", own.yarn_ext_factor, h.yarn_ext_factor);
    require_same("yarn_attn_factor", own.yarn_attn_factor, h.yarn_attn_factor);
    require_same("yarn_beta_fast", own.yarn_beta_fast, h.yarn_beta_fast);
    require_same("yarn_beta_slow", own.yarn_beta_slow, h.yarn_beta_slow);
    require_same("yarn_orig_ctx", own.yarn_orig_ctx, h.yarn_orig_ctx);
    return h;
}

void require_state_seq(const lcs_context & ctx, int32_t seq_id, bool partial) {
    require_range("seq_id", seq_id, -1, static_cast<int64_t>(ctx.info.n_seq_max) - 1);
    if (seq_id == -1 && partial) {
        fail(LCS_STATUS_ARG, "a partial state is of one sequence", "partial");
    }
    if (kind_of(ctx, seq_id, partial) == blob_kind::partial) {
        uncut_pos_max(ctx, seq_id);
    }
}

void require_no_rollback(const lcs_context & ctx, int32_t seq_id) {
    for (uint32_t s = 0; s < ctx.info.n_seq_max; ++s) {
        if (ctx.rollback_pending[s] && (seq_id == -1 || seq_id == static_cast<int32_t>(s))) {
            fail(LCS_STATUS_UNSUPPORTED, "a sequence with a pending rollback cannot be saved; decode a token first",
                 "rollback");
        }
    }
}

size_t payload_bytes(lcs_context & ctx, int32_t seq_id, blob_kind kind) {
    return kind == blob_kind::whole ? llama_state_get_size(ctx.ctx.get())
                                    : llama_state_seq_get_size_ext(ctx.ctx.get(), seq_id, flags_of(kind));
}

constexpr const char * EMPTIED = "; what was held there is gone";

// Destination of a load: emptied before, and again after a failure.
void drop(lcs_context & ctx, int32_t seq_id) {
    const llama_memory_t memory = ctx.memory();
    if (seq_id == -1) {
        llama_memory_clear(memory, false);
        ctx.rollback_tokens.fill(0);
        ctx.rollback_pending.fill(false);
    } else {
        llama_memory_seq_rm(memory, seq_id, -1, -1);
        ctx.rollback_tokens[static_cast<size_t>(seq_id)] = 0;
        ctx.rollback_pending[static_cast<size_t>(seq_id)] = false;
    }
}

void load_payload(lcs_context & ctx, int32_t seq_id, blob_kind kind, const header & h, const uint8_t * payload) {
    if (kind == blob_kind::sequence) {
        const int64_t n_cells = h.pos_max < 0 ? 0 : int64_t{h.pos_max} - h.pos_min + 1;
        if (n_cells == 0) {
            return; // llama.cpp would leave what is there
        }
        if (n_cells > static_cast<int64_t>(ctx.info.n_ctx_seq)) {
            fail(LCS_STATUS_NO_KV_SLOT,
                 "the state needs " + std::to_string(n_cells) + " cells, a sequence has " +
                         std::to_string(ctx.info.n_ctx_seq) + EMPTIED,
                 "n_cells", std::to_string(ctx.info.n_ctx_seq), std::to_string(n_cells));
        }
    }
    fault_point();
    const auto load = [&] {
        return h.payload_bytes == (kind == blob_kind::whole
                                           ? llama_state_set_data(ctx.ctx.get(), payload, h.payload_bytes)
                                           : llama_state_seq_set_data_ext(ctx.ctx.get(), payload, h.payload_bytes,
                                                                          seq_id, flags_of(kind)));
    };
    // What was judged before leaves a cache no other reason to refuse.
    const auto is_full = [] {
        const std::string & log = log_last_line();
        return log.find("available cells") != std::string::npos || log.find("restore kv cache") != std::string::npos;
    };
    if (load()) {
        return;
    }
    if (kind != blob_kind::whole && is_full() && free_masked_cells(ctx)) {
        if (kind == blob_kind::sequence) {
            drop(ctx, seq_id);
        }
        if (load()) {
            return;
        }
    }
    const std::string why =
            is_full() ? "too few free cells for the state" : "llama.cpp refused the state: " + log_last_line();
    fail(is_full() ? LCS_STATUS_NO_KV_SLOT : LCS_STATUS_INTERNAL, why + EMPTIED);
}

} // namespace

} // namespace lcs

extern "C" {

uint64_t lcs_hash(const void * data, size_t n_bytes) {
    return data == nullptr ? lcs::hash("", 0) : lcs::hash(data, n_bytes);
}

lcs_status lcs_state_bytes(lcs_context * ctx, int32_t seq_id, bool partial, size_t * n_out) {
    return lcs::guard([&] {
        const lcs::entered_context entered(ctx);
        lcs::require_memory(*ctx);
        lcs::require_state_seq(*ctx, seq_id, partial);
        lcs::require(n_out, "n_out");
        lcs::require_no_rollback(*ctx, seq_id);
        lcs::flush_updates(*ctx);
        *n_out = sizeof(lcs::header) + lcs::payload_bytes(*ctx, seq_id, lcs::kind_of(*ctx, seq_id, partial));
    });
}

lcs_status lcs_state_save(
        lcs_context * ctx, int32_t seq_id, bool partial, void * buf, size_t capacity, size_t * n_out) {
    return lcs::guard([&] {
        const lcs::entered_context entered(ctx);
        const llama_memory_t memory = lcs::require_memory(*ctx);
        lcs::require_state_seq(*ctx, seq_id, partial);
        lcs::require(n_out, "n_out");
        lcs::require_no_rollback(*ctx, seq_id);
        lcs::flush_updates(*ctx);
        const auto   kind = lcs::kind_of(*ctx, seq_id, partial);
        lcs::header  h = lcs::describe(*ctx, kind);
        h.payload_bytes = lcs::payload_bytes(*ctx, seq_id, kind);
        *n_out = sizeof h + h.payload_bytes;
        if (capacity < *n_out) {
            lcs::fail(LCS_STATUS_BUFFER,
                      "capacity " + std::to_string(capacity) + " is less than " + std::to_string(*n_out) + " bytes");
        }
        lcs::require(buf, "buf");
        lcs::fault_point();
        uint8_t * const payload = static_cast<uint8_t *>(buf) + sizeof h;
        const size_t    written =
                kind == lcs::blob_kind::whole
                        ? llama_state_get_data(ctx->ctx.get(), payload, h.payload_bytes)
                        : llama_state_seq_get_data_ext(ctx->ctx.get(), payload, h.payload_bytes, seq_id,
                                                       lcs::flags_of(kind));
        if (written != h.payload_bytes) {
            lcs::fail(LCS_STATUS_INTERNAL,
                      "llama.cpp wrote " + std::to_string(written) + " of " + std::to_string(h.payload_bytes) + " bytes");
        }
        h.pos_min = seq_id < 0 ? -1 : llama_memory_seq_pos_min(memory, seq_id);
        h.pos_max = seq_id < 0 ? -1 : llama_memory_seq_pos_max(memory, seq_id);
        h.payload_hash = lcs::hash(payload, h.payload_bytes);
        h.header_hash = lcs::hash(&h, lcs::HASHED_HEADER);
        std::memcpy(buf, &h, sizeof h);
    });
}

lcs_status lcs_state_load(lcs_context * ctx, int32_t seq_id, bool partial, const void * buf, size_t n_bytes) {
    return lcs::guard([&] {
        const lcs::entered_context entered(ctx);
        const llama_memory_t memory = lcs::require_memory(*ctx);
        lcs::require_state_seq(*ctx, seq_id, partial);
        if (n_bytes > 0) {
            lcs::require(buf, "buf");
        }
        const auto * data = static_cast<const uint8_t *>(buf);
        const auto   kind = lcs::kind_of(*ctx, seq_id, partial);
        const auto   h = lcs::judge_blob(*ctx, kind, data, n_bytes);
        if (kind == lcs::blob_kind::partial) {
            const int32_t resident = lcs::uncut_pos_max(*ctx, seq_id);
            if (resident < h.pos_max) {
                lcs::fail(LCS_STATUS_STATE_MISMATCH,
                          "the partial state needs positions to " + std::to_string(h.pos_max) +
                                  " resident, the sequence holds them to " + std::to_string(resident),
                          "resident", std::to_string(h.pos_max), std::to_string(resident));
            }
        }
        lcs::flush_updates(*ctx);

        ctx->rows.clear();
        // A partial state replaces its part of the memory; the rest must stay resident to be of use.
        if (kind != lcs::blob_kind::partial) {
            lcs::drop(*ctx, seq_id);
        }
        try {
            lcs::load_payload(*ctx, seq_id, kind, h, data + sizeof(lcs::header));
        } catch (...) {
            lcs::drop(*ctx, seq_id); // some memories keep the first half of what was refused
            throw;
        }
        if (kind == lcs::blob_kind::partial) {
            // What the rest of the memory holds beyond this point belongs to another continuation.
            llama_memory_seq_rm(memory, seq_id, h.pos_max + 1, -1);
        }
        if (seq_id >= 0) {
            ctx->rollback_tokens[static_cast<size_t>(seq_id)] = 0;
            ctx->rollback_pending[static_cast<size_t>(seq_id)] = false;
        }
    });
}

} // extern "C"
