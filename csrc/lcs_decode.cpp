// Owns decoding: what is judged before llama_decode, how a prefill is cut into batches, what each status leaves behind,
// and the rows of the last decode.
#include "lcs_context.hpp"

#include "llama-context.h"

#include <algorithm>
#include <bitset>

namespace lcs {

namespace {

lcs_status status_of(int32_t raw) {
    switch (raw) {
        case 0:  return LCS_STATUS_OK;
        case 1:  return LCS_STATUS_NO_KV_SLOT;
        case 2:  return LCS_STATUS_ABORTED;
        case -1: return LCS_STATUS_INVALID_BATCH;
        case -2: return LCS_STATUS_ALLOC_FAILED;
        case -3: return LCS_STATUS_COMPUTE_FAILED;
        default: return LCS_STATUS_DECODE_FATAL;
    }
}

const char * meaning(lcs_status status) {
    switch (status) {
        case LCS_STATUS_NO_KV_SLOT:     return "too few free cells";
        case LCS_STATUS_ABORTED:        return "cancelled";
        case LCS_STATUS_INVALID_BATCH:  return "llama.cpp refused the batch";
        case LCS_STATUS_ALLOC_FAILED:   return "memory ran out";
        case LCS_STATUS_COMPUTE_FAILED: return "the graph failed";
        default:                        return "llama.cpp gave an unknown status";
    }
}

// One llama_decode worth of tokens; arrays of n entries.
struct piece {
    int32_t           n;
    const int32_t *   tokens;
    const int32_t *   pos;
    const int32_t *   n_seq_id;
    int32_t * const * seq_ids;
    const int8_t *    want;
    int32_t           n_want;
};

class decoding {
public:
    decoding(lcs_context & ctx, int32_t n_tokens) : ctx_(ctx) { result_.n_tokens = n_tokens; }

    const lcs_decode_result & result() const { return result_; }

    void commit(int32_t n) { result_.committed += n; }

    void mark_dirty(int32_t seq_id) {
        uint64_t &     word = result_.dirty[seq_id / 64];
        const uint64_t bit = uint64_t{1} << (seq_id % 64);
        result_.n_dirty += (word & bit) == 0;
        word |= bit;
    }

    void mark_all_dirty() {
        for (uint32_t s = 0; s < ctx_.info.n_seq_max; ++s) {
            mark_dirty(static_cast<int32_t>(s));
        }
    }

    // A sticky cancel that came before this batch: nothing of it is computed.
    void take_cancel() {
        if (ctx_.cancel.exchange(false, std::memory_order_relaxed)) {
            ctx_.rows.clear();
            result_.raw_status = 2;
            fail(LCS_STATUS_ABORTED, text(LCS_STATUS_ABORTED));
        }
    }

    // Runs llama_decode, again where that may find room then. Returns its raw status; an exception makes the context
    // fatal.
    int32_t run(const piece & p) {
        const int32_t raw = run_once(p);
        return raw == 1 && free_masked_cells(ctx_) ? run_once(p) : raw;
    }

    [[noreturn]] void fatal(const std::string & cause) {
        mark_all_dirty();
        fail_fatal(ctx_, cause);
    }

    // Throws for a raw status that is not 0, after the caller has counted what is committed and dirty.
    [[noreturn]] void fail_status(int32_t raw) {
        const lcs_status status = status_of(raw);
        if (status == LCS_STATUS_DECODE_FATAL) {
            fatal(std::string(meaning(status)) + ", " + std::to_string(raw));
        }
        fail(status, text(status));
    }

private:
    int32_t run_once(const piece & p) {
        fault_point();
        llama_batch batch{};
        batch.n_tokens = p.n;
        // llama_batch is not const-correct; llama_decode copies it and writes nothing.
        batch.token = const_cast<int32_t *>(p.tokens);
        batch.pos = const_cast<int32_t *>(p.pos);
        batch.n_seq_id = const_cast<int32_t *>(p.n_seq_id);
        batch.seq_id = const_cast<int32_t **>(p.seq_ids);
        batch.logits = const_cast<int8_t *>(p.want);
        int32_t raw = 0;
        ctx_.injected_status = 0;
        ctx_.abort_armed = true;
        try {
            raw = llama_decode(ctx_.ctx.get(), batch);
            if (ctx_.perf) {
                llama_synchronize(ctx_.ctx.get()); // or upstream counts this call and the next as one
            }
        } catch (const std::exception & e) {
            ctx_.abort_armed = false;
            fatal(e.what());
        } catch (...) {
            ctx_.abort_armed = false;
            fatal("an unknown exception");
        }
        ctx_.abort_armed = false;
        if (ctx_.injected_status == INT32_MIN) {
            fatal("an exception, injected");
        }
        if (ctx_.injected_status != 0) {
            raw = ctx_.injected_status;
        }
        result_.raw_status = raw;
        if (raw == 2) {
            ctx_.cancel.store(false, std::memory_order_relaxed); // seen
        }
        if (raw == 0) {
            const int64_t row = ctx_.model->info.n_vocab + (ctx_.info.embeddings ? ctx_.model->info.n_embd_out : 0);
            const auto    rows = static_cast<uint64_t>(std::max<int64_t>(p.n_want, ctx_.info.n_seq_max));
            ctx_.output_floats = std::max(ctx_.output_floats, rows * static_cast<uint64_t>(row));
        }
        return raw;
    }

    std::string text(lcs_status status) const {
        return std::string(meaning(status)) + ": " + std::to_string(result_.committed) + " of " +
               std::to_string(result_.n_tokens) + " tokens are resident";
    }

    lcs_context &     ctx_;
    lcs_decode_result result_{};
};

// Runs the body with a decoding whose result reaches the caller whatever happens after it has begun.
template <class F>
void with_result(decoding & d, lcs_decode_result * result_out, F && body) {
    try {
        body();
    } catch (...) {
        if (result_out != nullptr) {
            *result_out = d.result();
        }
        throw;
    }
    if (result_out != nullptr) {
        *result_out = d.result();
    }
}

void require_tokens(const lcs_context & ctx, const int32_t * tokens, int32_t n) {
    require(tokens, "tokens");
    if (n < 1) {
        fail(LCS_STATUS_ARG, "n_tokens " + std::to_string(n) + " is less than 1", "n_tokens", "1", std::to_string(n));
    }
    const auto n_vocab = static_cast<uint32_t>(ctx.model->info.n_vocab);
    for (int32_t i = 0; i < n; ++i) {
        if (static_cast<uint32_t>(tokens[i]) >= n_vocab) {
            fail(LCS_STATUS_RANGE,
                 "token " + std::to_string(tokens[i]) + " at index " + std::to_string(i) + " is outside 0.." +
                         std::to_string(n_vocab - 1),
                 "token", "0.." + std::to_string(n_vocab - 1), std::to_string(tokens[i]));
        }
    }
}

int32_t next_position(const lcs_context & ctx, int32_t seq_id) {
    const llama_memory_t memory = ctx.memory();
    return memory == nullptr ? 0 : llama_memory_seq_pos_max(memory, seq_id) + 1;
}

// A first position that llama.cpp would refuse, or accept and go wrong on. next is the sequence's last + 1.
void require_follows(const lcs_context & ctx, int32_t pos, int32_t next) {
    const bool follows = next == 0 ? pos >= 0 : ctx.positions_may_jump ? pos >= next : pos == next;
    if (!follows) {
        fail(LCS_STATUS_INVALID_BATCH,
             "position " + std::to_string(pos) + " does not follow the sequence's last, " + std::to_string(next - 1),
             "pos", std::to_string(next), std::to_string(pos));
    }
}

void require_positions_end(const lcs_context & ctx, int64_t end) {
    if (end > ctx.n_pos_max) {
        fail(LCS_STATUS_RANGE,
             "position " + std::to_string(end - 1) + " is outside 0.." + std::to_string(ctx.n_pos_max - 1), "pos",
             std::to_string(ctx.n_pos_max - 1), std::to_string(end - 1));
    }
}

void require_batch(const char * field, int64_t value, int64_t limit) {
    if (value > limit) {
        fail(LCS_STATUS_BATCH_TOO_LARGE,
             std::string(field) + " " + std::to_string(value) + " exceeds " + std::to_string(limit), field,
             std::to_string(limit), std::to_string(value));
    }
}

// Before rows are replaced: keep the copies a reader may look at, and refuse what would move the output buffer.
void release_rows(lcs_context & ctx, int64_t n_want) {
    if (ctx.n_holders > 0) {
        const int64_t row = ctx.model->info.n_vocab + (ctx.info.embeddings ? ctx.model->info.n_embd_out : 0);
        if (static_cast<uint64_t>(row * std::max<int64_t>(n_want, ctx.info.n_seq_max)) > ctx.output_floats) {
            fail(LCS_STATUS_BUSY, "a held row would have to move to make room for " + std::to_string(n_want) + " rows");
        }
        if (!ctx.rows.saved_logits.empty() || !ctx.rows.saved_embeddings.empty()) {
            ctx.retired_rows.push_back(std::exchange(ctx.rows, {}));
        }
    }
}

// Copies the rows of the batch that was just decoded, before the next one overwrites them.
void save_rows(lcs_context & ctx, int32_t begin, int32_t end) {
    decode_rows & rows = ctx.rows;
    const auto    n_vocab = static_cast<size_t>(ctx.model->info.n_vocab);
    const auto    n_embd = static_cast<size_t>(ctx.model->info.n_embd_out);
    for (int32_t i = begin; i < end; ++i) {
        if (rows.wanted[static_cast<size_t>(i)] == 0) {
            continue;
        }
        const float * logits = llama_get_logits_ith(ctx.ctx.get(), i - begin);
        if (logits == nullptr) {
            fail(LCS_STATUS_INTERNAL, "llama.cpp has no logits for token " + std::to_string(i));
        }
        rows.saved_row[static_cast<size_t>(i)] = static_cast<int32_t>(rows.saved_logits.size() / n_vocab);
        rows.saved_logits.insert(rows.saved_logits.end(), logits, logits + n_vocab);
        if (ctx.info.embeddings) {
            const float * embedding = llama_get_embeddings_ith(ctx.ctx.get(), i - begin);
            if (embedding == nullptr) {
                fail(LCS_STATUS_INTERNAL, "llama.cpp has no embedding for token " + std::to_string(i));
            }
            rows.saved_embeddings.insert(rows.saved_embeddings.end(), embedding, embedding + n_embd);
        }
    }
}

// What the rollback slots of a sequence hold now: the tokens of its last ubatch but one.
void note_rollback(lcs_context & ctx, int32_t seq_id, int32_t n_last_batch) {
    if (ctx.info.n_rs_seq > 0) {
        const auto n_ubatch = ctx.info.n_ubatch;
        const auto last = n_last_batch == 0 ? 0 : (static_cast<uint32_t>(n_last_batch) - 1) % n_ubatch + 1;
        ctx.rollback_tokens[static_cast<size_t>(seq_id)] = last == 0 ? 0 : std::min(last - 1, ctx.info.n_rs_seq);
        ctx.rollback_pending[static_cast<size_t>(seq_id)] = false;
    }
}

void decode_one_sequence(
        lcs_context & ctx, decoding & d, const int32_t * tokens, int32_t n, int32_t seq_id, int32_t pos) {
    decode_rows & rows = ctx.rows;
    for (int32_t begin = 0; begin < n;) {
        // The longest next batch within n_batch tokens and n_outputs_max rows.
        int32_t n_want = 0;
        int32_t end = begin;
        const int32_t last = static_cast<int32_t>(std::min<int64_t>(n, int64_t{begin} + ctx.info.n_batch));
        for (; end < last; ++end) {
            const bool want = rows.wanted[static_cast<size_t>(end)] != 0;
            if (want && n_want == static_cast<int32_t>(ctx.info.n_outputs_max)) {
                break;
            }
            n_want += want;
        }
        const int32_t size = end - begin;
        for (int32_t i = 0; i < size; ++i) {
            ctx.pos[static_cast<size_t>(i)] = pos + begin + i;
            ctx.want[static_cast<size_t>(i)] = static_cast<int8_t>(rows.wanted[static_cast<size_t>(begin + i)]);
        }
        d.take_cancel();
        const int32_t raw = d.run({size, tokens + begin, ctx.pos.data(), ctx.n_seq_id.data(), ctx.seq_ids.data(),
                                   ctx.want.data(), n_want});
        if (raw == 0) {
            d.commit(size);
            rows.live_begin = begin;
            if (end < n) {
                save_rows(ctx, begin, end);
            } else {
                rows.n_tokens = n;
                note_rollback(ctx, seq_id, size);
            }
            begin = end;
            continue;
        }
        if (raw != 1 && raw != -1) {
            if (ctx.recurrent()) {
                // A failed graph may leave the state rows of other sequences unmoved too.
                d.mark_all_dirty();
            } else if (ctx.memory() != nullptr) {
                const int32_t reached = llama_memory_seq_pos_max(ctx.memory(), seq_id) + 1 - (pos + begin);
                d.commit(std::clamp(reached, 0, size));
            }
        }
        note_rollback(ctx, seq_id, 0);
        d.fail_status(raw);
    }
}

} // namespace

void flush_updates(lcs_context & ctx) {
    if (!ctx.update_pending) {
        return;
    }
    ctx.abort_armed = false;
    fault_point();
    const std::string before = log_last_line();
    try {
        ctx.ctx->memory_update(false);
    } catch (const std::exception & e) {
        fail_fatal(ctx, e.what());
    }
    // Its result does not tell a failure from nothing to do; its log does.
    if (const std::string & log = log_last_line(); log != before && log.find("failed to") != std::string::npos) {
        fail_fatal(ctx, log);
    }
    ctx.update_pending = false;
}

const float * logits_row(lcs_context & ctx, int32_t row) {
    const decode_rows & rows = ctx.rows;
    const int32_t       i = row < 0 ? rows.n_tokens + row : row;
    if (i < 0 || i >= rows.n_tokens) {
        fail(LCS_STATUS_RANGE,
             "row " + std::to_string(row) + " is outside the last decode of " + std::to_string(rows.n_tokens) +
                     " tokens",
             "row", std::to_string(rows.n_tokens), std::to_string(row));
    }
    if (rows.wanted[static_cast<size_t>(i)] == 0) {
        fail(LCS_STATUS_RANGE, "row " + std::to_string(row) + " was not asked for", "row", "a row asked for",
             std::to_string(row));
    }
    if (i < rows.live_begin) {
        const auto n_vocab = static_cast<size_t>(ctx.model->info.n_vocab);
        return rows.saved_logits.data() + static_cast<size_t>(rows.saved_row[static_cast<size_t>(i)]) * n_vocab;
    }
    const float * logits = llama_get_logits_ith(ctx.ctx.get(), i - rows.live_begin);
    if (logits == nullptr) {
        fail(LCS_STATUS_INTERNAL, "llama.cpp has no logits for row " + std::to_string(row));
    }
    return logits;
}

namespace {

const float * embeddings_row(lcs_context & ctx, int32_t row) {
    if (!ctx.info.embeddings) {
        fail(LCS_STATUS_UNSUPPORTED, "embeddings are off in this context", "embeddings");
    }
    if (ctx.info.pooling != LLAMA_POOLING_TYPE_NONE) {
        fail(LCS_STATUS_UNSUPPORTED, "a pooling context has one embedding a sequence, none a token", "embeddings");
    }
    const float * logits = logits_row(ctx, row); // judges the row
    static_cast<void>(logits);
    const decode_rows & rows = ctx.rows;
    const int32_t       i = row < 0 ? rows.n_tokens + row : row;
    if (i < rows.live_begin) {
        const auto n_embd = static_cast<size_t>(ctx.model->info.n_embd_out);
        return rows.saved_embeddings.data() + static_cast<size_t>(rows.saved_row[static_cast<size_t>(i)]) * n_embd;
    }
    const float * embedding = llama_get_embeddings_ith(ctx.ctx.get(), i - rows.live_begin);
    if (embedding == nullptr) {
        fail(LCS_STATUS_INTERNAL, "llama.cpp has no embedding for row " + std::to_string(row));
    }
    return embedding;
}

} // namespace

} // namespace lcs

extern "C" {

lcs_status lcs_context_decode(
        lcs_context * ctx, const int32_t * tokens, int32_t n_tokens, int32_t seq_id, int32_t pos,
        int32_t logits, const uint8_t * mask, lcs_decode_result * result_out) {
    return lcs::guard([&] {
        const lcs::entered_context entered(ctx);
        lcs::require_tokens(*ctx, tokens, n_tokens);
        lcs::require_seq(*ctx, "seq_id", seq_id);
        lcs::require_range("pos", pos, -1, INT32_MAX);
        lcs::require_range("logits", logits, LCS_LOGITS_LAST, LCS_LOGITS_MASK, LCS_STATUS_ARG);
        if ((logits == LCS_LOGITS_MASK) != (mask != nullptr)) {
            lcs::fail(LCS_STATUS_ARG, "a mask goes with LCS_LOGITS_MASK, and only with it", "mask");
        }
        const int32_t next = lcs::next_position(*ctx, seq_id);
        if (pos == -1) {
            pos = next;
        } else {
            lcs::require_follows(*ctx, pos, next);
        }
        lcs::require_positions_end(*ctx, int64_t{pos} + n_tokens);
        const bool every_row = ctx->info.embeddings || ctx->memory() == nullptr;
        if (!ctx->can_cut) {
            lcs::require_batch("n_tokens", n_tokens, ctx->info.n_ubatch);
            lcs::require_batch("n_outputs", every_row ? n_tokens : 1, ctx->info.n_outputs_max);
        }

        const auto n = static_cast<size_t>(n_tokens);
        const auto n_piece = std::min(n, static_cast<size_t>(ctx->info.n_batch));
        // Built beside the old rows, which stay readable if memory runs out here.
        std::vector<uint8_t> wanted(n, every_row || logits == LCS_LOGITS_ALL);
        if (logits == LCS_LOGITS_LAST) {
            wanted[n - 1] = 1;
        } else if (mask != nullptr && !every_row) {
            std::transform(mask, mask + n, wanted.begin(), [](uint8_t m) { return static_cast<uint8_t>(m != 0); });
        }
        const auto n_want = std::count(wanted.begin(), wanted.end(), uint8_t{1});
        lcs::release_rows(*ctx, std::min<int64_t>(n_want, ctx->info.n_outputs_max));
        lcs::fault_point();
        ctx->pos.resize(n_piece);
        ctx->want.resize(n_piece);
        ctx->n_seq_id.assign(n_piece, 1);
        ctx->seq_id.assign(1, seq_id);
        ctx->seq_ids.assign(n_piece, ctx->seq_id.data());

        lcs::decoding d(*ctx, n_tokens);
        lcs::with_result(d, result_out, [&] {
            lcs::flush_updates(*ctx);
            lcs::decode_rows & rows = ctx->rows;
            rows.clear();
            rows.wanted = std::move(wanted);
            rows.saved_row.assign(n > n_piece || n_want > ctx->info.n_outputs_max ? n : 0, -1);
            rows.saved_logits.clear();
            rows.saved_embeddings.clear();
            lcs::decode_one_sequence(*ctx, d, tokens, n_tokens, seq_id, pos);
        });
    });
}

lcs_status lcs_context_decode_batch(lcs_context * ctx, const lcs_batch * batch, lcs_decode_result * result_out) {
    return lcs::guard([&] {
        const lcs::entered_context entered(ctx);
        lcs::require(batch, "batch");
        lcs::require_tokens(*ctx, batch->tokens, batch->n_tokens);
        lcs::require(batch->pos, "pos");
        lcs::require(batch->seq_ids, "seq_ids");
        const auto n = static_cast<size_t>(batch->n_tokens);
        const bool every_row = ctx->info.embeddings || ctx->memory() == nullptr;
        lcs::require_batch("n_tokens", batch->n_tokens, ctx->can_cut ? ctx->info.n_batch : ctx->info.n_ubatch);

        std::vector<uint8_t> wanted(n, every_row);
        if (batch->logits != nullptr && !every_row) {
            std::transform(batch->logits, batch->logits + n, wanted.begin(),
                           [](uint8_t m) { return static_cast<uint8_t>(m != 0); });
        }
        const auto n_want = std::count(wanted.begin(), wanted.end(), uint8_t{1});
        lcs::require_batch("n_outputs", n_want, ctx->info.n_outputs_max);

        // Sequences: in range, no id twice for one token, positions rising by one from each sequence's last.
        struct use {
            int32_t next;
            int32_t begin;
            int32_t n = 0;
            bool    shared = false;
        };
        std::vector<std::pair<int32_t, use>> uses; // by sequence; a handful
        const auto use_of = [&](int32_t seq_id) -> use & {
            for (auto & [id, u] : uses) {
                if (id == seq_id) {
                    return u;
                }
            }
            const int32_t next = lcs::next_position(*ctx, seq_id);
            return uses.emplace_back(seq_id, use{next, next}).second;
        };
        size_t n_ids = 0;
        for (size_t i = 0; i < n; ++i) {
            const int32_t own = batch->n_seq_id == nullptr ? 1 : batch->n_seq_id[i];
            lcs::require_range("n_seq_id", own, 1, ctx->info.n_seq_max);
            if (own > 1 && (ctx->info.n_stream > 1 || ctx->recurrent())) {
                lcs::fail(LCS_STATUS_UNSUPPORTED,
                          "a token of several sequences needs kv_unified and a memory without recurrent layers",
                          "shared token");
            }
            lcs::require_range("pos", batch->pos[i], 0, INT32_MAX - 1);
            lcs::require_positions_end(*ctx, int64_t{batch->pos[i]} + 1);
            std::bitset<256> seen;
            for (int32_t s = 0; s < own; ++s) {
                const int32_t seq_id = batch->seq_ids[n_ids + static_cast<size_t>(s)];
                lcs::require_seq(*ctx, "seq_id", seq_id);
                if (seen.test(static_cast<size_t>(seq_id))) {
                    lcs::fail(LCS_STATUS_ARG,
                              "token " + std::to_string(i) + " names sequence " + std::to_string(seq_id) + " twice");
                }
                seen.set(static_cast<size_t>(seq_id));
                use & u = use_of(seq_id);
                lcs::require_follows(*ctx, batch->pos[i], u.next);
                if (u.n == 0) {
                    u.begin = batch->pos[i];
                }
                u.next = batch->pos[i] + 1;
                u.n += 1;
                u.shared = u.shared || own > 1;
            }
            n_ids += static_cast<size_t>(own);
        }

        lcs::release_rows(*ctx, n_want);
        lcs::fault_point();
        ctx->seq_id.assign(batch->seq_ids, batch->seq_ids + n_ids);
        ctx->n_seq_id.resize(n);
        ctx->seq_ids.resize(n);
        ctx->want.resize(n);
        for (size_t i = 0, at = 0; i < n; ++i) {
            ctx->n_seq_id[i] = batch->n_seq_id == nullptr ? 1 : batch->n_seq_id[i];
            ctx->seq_ids[i] = ctx->seq_id.data() + at;
            ctx->want[i] = static_cast<int8_t>(wanted[i]);
            at += static_cast<size_t>(ctx->n_seq_id[i]);
        }

        lcs::decoding d(*ctx, batch->n_tokens);
        lcs::with_result(d, result_out, [&] {
            lcs::flush_updates(*ctx);
            d.take_cancel();
            const int32_t raw = d.run({batch->n_tokens, batch->tokens, batch->pos, ctx->n_seq_id.data(),
                                       ctx->seq_ids.data(), ctx->want.data(), static_cast<int32_t>(n_want)});
            if (raw == -1) {
                d.fail_status(raw);
            }
            lcs::decode_rows & rows = ctx->rows;
            rows.clear();
            rows.saved_logits.clear();
            rows.saved_embeddings.clear();
            for (const auto & [seq_id, u] : uses) {
                // With several sequences the last ubatch of each is not known here.
                lcs::note_rollback(*ctx, seq_id, raw == 0 && uses.size() == 1 ? u.n : 0);
            }
            if (raw == 0) {
                d.commit(batch->n_tokens);
                rows.n_tokens = batch->n_tokens;
                rows.live_begin = 0;
                rows.wanted = std::move(wanted);
                return;
            }
            if (raw != 1 && ctx->recurrent()) {
                d.mark_all_dirty();
            } else if (raw != 1 && ctx->memory() != nullptr) {
                for (const auto & [seq_id, u] : uses) {
                    if (u.shared) {
                        // Cells of a failed graph stay with positions but without data for all but one owner.
                        d.mark_dirty(seq_id);
                    } else {
                        d.commit(std::clamp(llama_memory_seq_pos_max(ctx->memory(), seq_id) + 1 - u.begin, 0, u.n));
                    }
                }
            }
            d.fail_status(raw);
        });
    });
}

lcs_status lcs_context_logits(lcs_context * ctx, int32_t row, const float ** row_out) {
    return lcs::guard([&] {
        const lcs::entered_context entered(ctx);
        lcs::require(row_out, "row_out");
        *row_out = lcs::logits_row(*ctx, row);
    });
}

lcs_status lcs_context_embeddings(lcs_context * ctx, int32_t row, const float ** row_out) {
    return lcs::guard([&] {
        const lcs::entered_context entered(ctx);
        lcs::require(row_out, "row_out");
        *row_out = lcs::embeddings_row(*ctx, row);
    });
}

lcs_status lcs_context_embeddings_seq(lcs_context * ctx, int32_t seq_id, const float ** row_out) {
    return lcs::guard([&] {
        const lcs::entered_context entered(ctx);
        lcs::require(row_out, "row_out");
        lcs::require_seq(*ctx, "seq_id", seq_id);
        if (!ctx->info.embeddings || ctx->info.pooling == LLAMA_POOLING_TYPE_NONE) {
            lcs::fail(LCS_STATUS_UNSUPPORTED, "this context does not pool embeddings", "pooling");
        }
        if (ctx->rows.n_tokens == 0) {
            lcs::fail(LCS_STATUS_RANGE, "there has been no decode", "seq_id");
        }
        const float * row = llama_get_embeddings_seq(ctx->ctx.get(), seq_id);
        if (row == nullptr) {
            lcs::fail(LCS_STATUS_RANGE, "sequence " + std::to_string(seq_id) + " was not in the last decode", "seq_id");
        }
        *row_out = row;
    });
}

lcs_status lcs_context_hold_rows(lcs_context * ctx, int32_t by) {
    return lcs::guard([&] {
        const lcs::entered entered(ctx, "context");
        lcs::require_range("by", by, -1, 1);
        lcs::require_range("holders", int64_t{ctx->n_holders} + by, 0, INT32_MAX);
        ctx->n_holders += by;
        if (ctx->n_holders == 0) {
            ctx->retired_rows.clear();
        }
    });
}

} // extern "C"
