/* Decoding: pieces, rows, positions, statuses, and what each failure leaves behind. Oracle: the same tokens decoded in
 * a context that met no failure. */
#include "check.h"

#include <math.h>

enum { N_CTX = 512, N_BATCH = 64, N_UBATCH = 16 };

static lcs_context * make(lcs_model * model, uint32_t n_seq_max, bool unified) {
    lcs_context_params p;
    lcs_context *      ctx = NULL;
    lcs_context_params_init(&p);
    p.n_ctx = N_CTX * (unified ? 1 : n_seq_max);
    p.n_batch = N_BATCH;
    p.n_ubatch = N_UBATCH;
    p.n_seq_max = n_seq_max;
    p.kv_unified = unified;
    p.n_threads = 1;
    CHECK_OK(lcs_context_init(model, &p, &ctx));
    return ctx;
}

static const int32_t * prompt(int32_t n) {
    static int32_t tokens[4096];
    CHECK(n <= 4096);
    for (int32_t i = 0; i < 4096; ++i) {
        tokens[i] = (int32_t) ((1103515245u * (uint32_t) i + 12345u) >> 8) % 1000 + 5;
    }
    return tokens;
}

static void test_bad_arguments_change_nothing(lcs_model * model) {
    lcs_context *     ctx = make(model, 2, false);
    const int32_t *   tokens = prompt(8);
    const int32_t     n_vocab = n_vocab_of(model);
    const float *     row = NULL;
    lcs_decode_result r;
    uint8_t           mask[4] = {0, 1, 0, 1};

    CHECK_STATUS(lcs_context_logits(ctx, -1, &row), LCS_STATUS_RANGE); /* no decode yet */
    CHECK_OK(lcs_context_decode(ctx, tokens, 4, 0, -1, LCS_LOGITS_MASK, mask, &r));
    CHECK(r.committed == 4 && r.n_tokens == 4 && r.raw_status == 0 && r.n_dirty == 0);
    CHECK_OK(lcs_context_logits(ctx, -1, &row));
    CHECK_OK(lcs_context_logits(ctx, 1, &row));
    CHECK_STATUS(lcs_context_logits(ctx, 0, &row), LCS_STATUS_RANGE);
    CHECK_STATUS(lcs_context_logits(ctx, -2, &row), LCS_STATUS_RANGE);
    CHECK_STATUS(lcs_context_logits(ctx, 4, &row), LCS_STATUS_RANGE);
    CHECK_STATUS(lcs_context_logits(ctx, -5, &row), LCS_STATUS_RANGE);
    CHECK_STATUS(lcs_context_logits(ctx, INT32_MIN, &row), LCS_STATUS_RANGE);
    CHECK_STATUS(lcs_context_logits(ctx, INT32_MAX, &row), LCS_STATUS_RANGE);
    CHECK_STATUS(lcs_context_logits(ctx, -1, NULL), LCS_STATUS_ARG);
    CHECK_STATUS(lcs_context_embeddings(ctx, -1, &row), LCS_STATUS_UNSUPPORTED);
    CHECK_STATUS(lcs_context_embeddings_seq(ctx, 0, &row), LCS_STATUS_UNSUPPORTED);

    const int32_t over[2] = {1, n_vocab};
    const int32_t under[2] = {-1, 1};
    CHECK_STATUS(lcs_context_decode(NULL, tokens, 1, 0, -1, LCS_LOGITS_LAST, NULL, NULL), LCS_STATUS_ARG);
    CHECK_STATUS(lcs_context_decode(ctx, NULL, 1, 0, -1, LCS_LOGITS_LAST, NULL, NULL), LCS_STATUS_ARG);
    CHECK_STATUS(lcs_context_decode(ctx, tokens, 0, 0, -1, LCS_LOGITS_LAST, NULL, NULL), LCS_STATUS_ARG);
    CHECK_STATUS(lcs_context_decode(ctx, tokens, -1, 0, -1, LCS_LOGITS_LAST, NULL, NULL), LCS_STATUS_ARG);
    CHECK_STATUS(lcs_context_decode(ctx, over, 2, 0, -1, LCS_LOGITS_LAST, NULL, NULL), LCS_STATUS_RANGE);
    CHECK_STATUS(lcs_context_decode(ctx, under, 2, 0, -1, LCS_LOGITS_LAST, NULL, NULL), LCS_STATUS_RANGE);
    CHECK_STATUS(lcs_context_decode(ctx, tokens, 1, 2, -1, LCS_LOGITS_LAST, NULL, NULL), LCS_STATUS_RANGE);
    CHECK_STATUS(lcs_context_decode(ctx, tokens, 1, -1, -1, LCS_LOGITS_LAST, NULL, NULL), LCS_STATUS_RANGE);
    CHECK_STATUS(lcs_context_decode(ctx, tokens, 1, 0, -2, LCS_LOGITS_LAST, NULL, NULL), LCS_STATUS_RANGE);
    CHECK_STATUS(lcs_context_decode(ctx, tokens, 1, 0, -1, 4, NULL, NULL), LCS_STATUS_ARG);
    CHECK_STATUS(lcs_context_decode(ctx, tokens, 1, 0, -1, LCS_LOGITS_MASK, NULL, NULL), LCS_STATUS_ARG);
    CHECK_STATUS(lcs_context_decode(ctx, tokens, 1, 0, -1, LCS_LOGITS_LAST, mask, NULL), LCS_STATUS_ARG);
    CHECK_STATUS(lcs_context_decode(ctx, tokens, 1, 0, 3, LCS_LOGITS_LAST, NULL, NULL), LCS_STATUS_INVALID_BATCH);
    CHECK_STATUS(lcs_context_decode(ctx, tokens, 1, 0, 5, LCS_LOGITS_LAST, NULL, NULL), LCS_STATUS_INVALID_BATCH);
    CHECK_STATUS(lcs_context_decode(ctx, tokens, 2, 1, INT32_MAX, LCS_LOGITS_LAST, NULL, NULL), LCS_STATUS_RANGE);
    /* The rows of the last good decode are still there. */
    CHECK_OK(lcs_context_logits(ctx, 1, &row));
    CHECK(pos_max(ctx, 0) == 3 && pos_max(ctx, 1) == -1);
    CHECK_OK(lcs_context_decode(ctx, tokens, 1, 0, 4, LCS_LOGITS_LAST, NULL, NULL));
    lcs_context_free(ctx);
}

static void test_pieces_equal_one_batch_after_the_other(lcs_model * model) {
    const int32_t n_vocab = n_vocab_of(model);
    const int32_t sizes[] = {1, N_UBATCH - 1, N_UBATCH, N_UBATCH + 1, N_BATCH - 1, N_BATCH, N_BATCH + 1, 2 * N_BATCH + 7};
    for (size_t k = 0; k < sizeof sizes / sizeof sizes[0]; ++k) {
        lcs_context *     cut = make(model, 1, false);
        lcs_context *     byhand = make(model, 1, false);
        const int32_t *   tokens = prompt(sizes[k]);
        lcs_decode_result r;
        CHECK_OK(lcs_context_decode(cut, tokens, sizes[k], 0, -1, LCS_LOGITS_LAST, NULL, &r));
        CHECK(r.committed == sizes[k]);
        for (int32_t i = 0; i < sizes[k]; i += N_BATCH) {
            const int32_t n = sizes[k] - i < N_BATCH ? sizes[k] - i : N_BATCH;
            CHECK_OK(lcs_context_decode(byhand, tokens + i, n, 0, i, LCS_LOGITS_LAST, NULL, NULL));
        }
        check_same_logits(cut, byhand, n_vocab);
        CHECK(pos_max(cut, 0) == sizes[k] - 1);
        lcs_context_free(cut);
        lcs_context_free(byhand);
    }
}

static void test_every_row_asked_for_is_there_across_pieces(lcs_model * model) {
    enum { N = N_BATCH + 33 };
    const int32_t   n_vocab = n_vocab_of(model);
    const int32_t * tokens = prompt(N);
    lcs_context *   all = make(model, 1, false);
    lcs_context *   one = make(model, 1, false);
    CHECK_OK(lcs_context_decode(all, tokens, N, 0, -1, LCS_LOGITS_ALL, NULL, NULL));
    CHECK(lcs_context_decode(one, tokens, N, 0, -1, LCS_LOGITS_NONE, NULL, NULL) == LCS_STATUS_OK);
    const float * none = NULL;
    CHECK_STATUS(lcs_context_logits(one, -1, &none), LCS_STATUS_RANGE);
    CHECK_OK(lcs_context_clear(one, true));
    /* Oracle: each row against decoding token by token. Other kernels, so not the same bits, and how far apart depends on
     * the CPU; but the row before is ten times as far. */
    float * before = calloc((size_t) n_vocab, sizeof *before);
    for (int32_t i = 0; i < N; ++i) {
        const float * a = NULL;
        const float * b = NULL;
        CHECK_OK(lcs_context_decode(one, tokens + i, 1, 0, -1, LCS_LOGITS_LAST, NULL, NULL));
        CHECK_OK(lcs_context_logits(all, i, &a));
        CHECK_OK(lcs_context_logits(one, 0, &b));
        float largest = 0;
        float to_before = 0;
        for (int32_t t = 0; t < n_vocab; ++t) {
            largest = fmaxf(largest, fabsf(a[t] - b[t]));
            to_before = fmaxf(to_before, fabsf(a[t] - before[t]));
            before[t] = b[t];
        }
        CHECK(largest < 0.25f && largest * 10 < to_before);
        CHECK_OK(lcs_context_logits(all, i - N, &b));
        CHECK(a == b);
    }
    free(before);
    lcs_context_free(all);
    lcs_context_free(one);
}

static void test_a_full_context_is_said_and_stays_usable(lcs_model * model) {
    lcs_context *     ctx = make(model, 1, false);
    const int32_t *   tokens = prompt(N_CTX + 1);
    const float *     row = NULL;
    lcs_decode_result r;
    CHECK_STATUS(lcs_context_decode(ctx, tokens, N_CTX + 1, 0, -1, LCS_LOGITS_LAST, NULL, &r), LCS_STATUS_NO_KV_SLOT);
    CHECK(r.raw_status == 1 && r.committed == N_CTX && r.n_dirty == 0 && pos_max(ctx, 0) == N_CTX - 1);
    CHECK_STATUS(lcs_context_logits(ctx, -1, &row), LCS_STATUS_RANGE);
    /* Full to the last cell is fine. */
    bool removed = false;
    CHECK_OK(lcs_context_seq_rm(ctx, 0, N_CTX - 1, -1, &removed));
    CHECK(removed);
    CHECK_OK(lcs_context_decode(ctx, tokens, 1, 0, N_CTX - 1, LCS_LOGITS_LAST, NULL, &r));
    CHECK_STATUS(lcs_context_decode(ctx, tokens, 1, 0, -1, LCS_LOGITS_LAST, NULL, &r), LCS_STATUS_NO_KV_SLOT);
    CHECK(r.committed == 0);
    lcs_context_free(ctx);
}

static void test_a_cancel_is_sticky_until_seen_once(lcs_model * model) {
    lcs_context *     ctx = make(model, 1, false);
    const int32_t *   tokens = prompt(N_BATCH);
    lcs_decode_result r;
    CHECK_OK(lcs_context_cancel(ctx));
    CHECK_OK(lcs_context_cancel(ctx));
    CHECK_STATUS(lcs_context_decode(ctx, tokens, 4, 0, -1, LCS_LOGITS_LAST, NULL, &r), LCS_STATUS_ABORTED);
    CHECK(r.raw_status == 2 && r.committed == 0 && r.n_dirty == 0 && pos_max(ctx, 0) == -1);
    CHECK_OK(lcs_context_decode(ctx, tokens, 4, 0, -1, LCS_LOGITS_LAST, NULL, &r));
    lcs_context_cancel_signal(ctx);
    CHECK_STATUS(lcs_context_decode(ctx, tokens, 4, 0, -1, LCS_LOGITS_LAST, NULL, &r), LCS_STATUS_ABORTED);
    lcs_context_free(ctx);
}

/* Stops the graph at every k-th node of a prefill, for each failing status, and goes on from what is said to be
 * resident: equal to a run that met nothing. */
static void test_every_partial_failure_is_told_truly(lcs_model * model, bool recurrent) {
    enum { N = 3 * N_UBATCH + 5, BEFORE = N_UBATCH };
    const int32_t   n_vocab = n_vocab_of(model);
    const int32_t * tokens = prompt(BEFORE + N + 1);
    const int32_t   statuses[] = {2, -2, -3};
    const lcs_status expected[] = {LCS_STATUS_ABORTED, LCS_STATUS_ALLOC_FAILED, LCS_STATUS_COMPUTE_FAILED};
    for (size_t k = 0; k < 3; ++k) {
        int32_t seen = -1;
        int     stops = 0;
        for (int64_t node = 1;; node += 37) {
            lcs_context *     ctx = make(model, 1, false);
            lcs_decode_result r;
            CHECK_OK(lcs_context_decode(ctx, tokens, BEFORE, 0, -1, LCS_LOGITS_LAST, NULL, NULL));
            lcs_fault_arm_decode(statuses[k], node);
            const lcs_status status = lcs_context_decode(ctx, tokens + BEFORE, N, 0, -1, LCS_LOGITS_LAST, NULL, &r);
            const bool       fired = lcs_fault_fired();
            lcs_fault_arm_decode(0, 0);
            if (!fired) {
                CHECK(status == LCS_STATUS_OK && stops > 3);
                lcs_context_free(ctx);
                break;
            }
            ++stops;
            CHECK(status == expected[k] && r.raw_status == statuses[k]);
            if (recurrent) {
                CHECK(r.committed == 0 && r.n_dirty == 1 && r.dirty[0] == 1);
                bool removed = false;
                CHECK_OK(lcs_context_seq_rm(ctx, 0, -1, -1, &removed));
                CHECK(removed);
                CHECK_OK(lcs_context_decode(ctx, tokens, BEFORE, 0, -1, LCS_LOGITS_LAST, NULL, NULL));
            } else {
                CHECK(r.n_dirty == 0 && r.committed % N_UBATCH == 0 && r.committed < N && r.committed >= seen);
                CHECK(pos_max(ctx, 0) == BEFORE + r.committed - 1);
                seen = r.committed;
            }
            /* Go on in the same ubatches as the straight run. */
            lcs_context * straight = make(model, 1, false);
            CHECK_OK(lcs_context_decode(straight, tokens, BEFORE, 0, -1, LCS_LOGITS_LAST, NULL, NULL));
            CHECK_OK(lcs_context_decode(straight, tokens + BEFORE, N, 0, -1, LCS_LOGITS_LAST, NULL, NULL));
            CHECK_OK(lcs_context_decode(ctx, tokens + BEFORE + r.committed, N - r.committed, 0, -1, LCS_LOGITS_LAST,
                                        NULL, NULL));
            check_same_logits(ctx, straight, n_vocab);
            lcs_context_free(straight);
            lcs_context_free(ctx);
        }
        CHECK(recurrent || seen == 3 * N_UBATCH); /* the last ubatch was among the failed ones */
    }
}

static void test_an_exception_makes_the_context_fatal(lcs_model * model) {
    const int32_t * tokens = prompt(8);
    const int32_t   statuses[] = {INT32_MIN, -7, 3};
    for (size_t k = 0; k < 3; ++k) {
        lcs_context *     ctx = make(model, 2, false);
        lcs_decode_result r;
        lcs_context_info  info;
        const float *     row = NULL;
        size_t            n = 0;
        CHECK_OK(lcs_context_decode(ctx, tokens, 4, 0, -1, LCS_LOGITS_LAST, NULL, NULL));
        lcs_fault_arm_decode(statuses[k], 3);
        CHECK_STATUS(lcs_context_decode(ctx, tokens, 4, 0, -1, LCS_LOGITS_LAST, NULL, &r), LCS_STATUS_DECODE_FATAL);
        CHECK(lcs_fault_fired() && r.n_dirty == 2 && r.dirty[0] == 3);
        CHECK(statuses[k] == INT32_MIN || r.raw_status == statuses[k]);
        CHECK_STATUS(lcs_context_decode(ctx, tokens, 4, 0, -1, LCS_LOGITS_LAST, NULL, &r), LCS_STATUS_DECODE_FATAL);
        CHECK_STATUS(lcs_context_logits(ctx, -1, &row), LCS_STATUS_DECODE_FATAL);
        CHECK_STATUS(lcs_context_clear(ctx, true), LCS_STATUS_DECODE_FATAL);
        CHECK_STATUS(lcs_state_bytes(ctx, 0, false, &n), LCS_STATUS_DECODE_FATAL);
        CHECK_OK(lcs_context_get_info(ctx, &info));
        CHECK(info.fatal);
        lcs_context_free(ctx);
    }
}

static void test_every_failing_step_of_a_decode_is_clean(lcs_model * model) {
    const int32_t   n_vocab = n_vocab_of(model);
    const int32_t * tokens = prompt(2 * N_BATCH);
    lcs_context *   straight = make(model, 1, false);
    CHECK_OK(lcs_context_decode(straight, tokens, 2 * N_BATCH, 0, -1, LCS_LOGITS_LAST, NULL, NULL));
    for (int64_t n = 1;; ++n) {
        lcs_context *     ctx = make(model, 1, false);
        lcs_decode_result r = {0};
        lcs_fault_arm(n);
        const lcs_status status = lcs_context_decode(ctx, tokens, 2 * N_BATCH, 0, -1, LCS_LOGITS_LAST, NULL, &r);
        const bool       fired = lcs_fault_fired();
        lcs_fault_arm(0);
        CHECK(status == (fired ? LCS_STATUS_NOMEM : LCS_STATUS_OK));
        if (fired) {
            CHECK(pos_max(ctx, 0) == r.committed - 1);
            CHECK_OK(lcs_context_decode(ctx, tokens + r.committed, 2 * N_BATCH - r.committed, 0, -1, LCS_LOGITS_LAST,
                                        NULL, NULL));
        }
        check_same_logits(ctx, straight, n_vocab);
        lcs_context_free(ctx);
        if (!fired) {
            CHECK(n > 2);
            break;
        }
    }
    lcs_context_free(straight);
}

static void test_batches_of_several_sequences(lcs_model * model) {
    const int32_t     n_vocab = n_vocab_of(model);
    const int32_t *   tokens = prompt(8);
    lcs_context *     both = make(model, 3, false);
    lcs_context *     alone = make(model, 3, false);
    lcs_decode_result r;
    const int32_t     batch_tokens[6] = {tokens[0], tokens[1], tokens[2], tokens[3], tokens[4], tokens[5]};
    const int32_t     pos[6] = {0, 0, 1, 1, 2, 2};
    const int32_t     seq[6] = {0, 1, 0, 1, 0, 1};
    const uint8_t     want[6] = {0, 0, 0, 0, 1, 1};
    lcs_batch         batch = {6, batch_tokens, pos, NULL, seq, want};
    CHECK_OK(lcs_context_decode_batch(both, &batch, &r));
    CHECK(r.committed == 6 && r.n_dirty == 0 && pos_max(both, 0) == 2 && pos_max(both, 1) == 2);
    for (int32_t s = 0; s < 2; ++s) {
        const int32_t own[3] = {batch_tokens[s], batch_tokens[2 + s], batch_tokens[4 + s]};
        const float * a = NULL;
        const float * b = NULL;
        CHECK_OK(lcs_context_decode(alone, own, 3, s, -1, LCS_LOGITS_LAST, NULL, NULL));
        CHECK_OK(lcs_context_logits(both, 4 + s, &a));
        CHECK_OK(lcs_context_logits(alone, -1, &b));
        float largest = 0;
        for (int32_t t = 0; t < n_vocab; ++t) {
            largest = fabsf(a[t] - b[t]) > largest ? fabsf(a[t] - b[t]) : largest;
        }
        CHECK(largest < 0.05f);
    }

    lcs_batch bad = batch;
    bad.n_tokens = 0;
    CHECK_STATUS(lcs_context_decode_batch(both, &bad, &r), LCS_STATUS_ARG);
    CHECK_STATUS(lcs_context_decode_batch(both, NULL, &r), LCS_STATUS_ARG);
    bad = batch;
    bad.pos = NULL;
    CHECK_STATUS(lcs_context_decode_batch(both, &bad, &r), LCS_STATUS_ARG);
    bad = batch;
    bad.seq_ids = NULL;
    CHECK_STATUS(lcs_context_decode_batch(both, &bad, &r), LCS_STATUS_ARG);
    CHECK_STATUS(lcs_context_decode_batch(both, &batch, &r), LCS_STATUS_INVALID_BATCH); /* positions again */

    const int32_t p3[2] = {3, 3};
    const int32_t s0[2] = {0, 0};
    const int32_t two[1] = {2};
    const int32_t both_ids[2] = {0, 2};
    const int32_t over[1] = {3};
    const int32_t p_neg[1] = {-1};
    lcs_batch     twice = {2, tokens, p3, NULL, s0, NULL}; /* one position twice */
    CHECK_STATUS(lcs_context_decode_batch(both, &twice, &r), LCS_STATUS_INVALID_BATCH);
    lcs_batch shared = {1, tokens, p3, two, both_ids, NULL};
    CHECK_STATUS(lcs_context_decode_batch(both, &shared, &r), LCS_STATUS_UNSUPPORTED); /* per-sequence streams */
    lcs_batch range = {1, tokens, p3, NULL, over, NULL};
    CHECK_STATUS(lcs_context_decode_batch(both, &range, &r), LCS_STATUS_RANGE);
    lcs_batch negative = {1, tokens, p_neg, NULL, s0, NULL};
    CHECK_STATUS(lcs_context_decode_batch(both, &negative, &r), LCS_STATUS_RANGE);
    const int32_t zero[1] = {0};
    const int32_t four[1] = {4};
    lcs_batch     none = {1, tokens, p3, zero, s0, NULL};
    CHECK_STATUS(lcs_context_decode_batch(both, &none, &r), LCS_STATUS_RANGE);
    lcs_batch many = {1, tokens, p3, four, s0, NULL};
    CHECK_STATUS(lcs_context_decode_batch(both, &many, &r), LCS_STATUS_RANGE);

    int32_t long_pos[N_BATCH + 1];
    int32_t long_seq[N_BATCH + 1];
    uint8_t long_want[N_BATCH + 1];
    for (int32_t i = 0; i <= N_BATCH; ++i) {
        long_pos[i] = i;
        long_seq[i] = 2;
        long_want[i] = i < 33;
    }
    lcs_batch too_long = {N_BATCH + 1, prompt(N_BATCH + 1), long_pos, NULL, long_seq, NULL};
    CHECK_STATUS(lcs_context_decode_batch(both, &too_long, &r), LCS_STATUS_BATCH_TOO_LARGE);
    lcs_batch too_many_rows = {N_BATCH, prompt(N_BATCH), long_pos, NULL, long_seq, long_want};
    CHECK_STATUS(lcs_context_decode_batch(both, &too_many_rows, &r), LCS_STATUS_BATCH_TOO_LARGE);
    long_want[32] = 0;
    CHECK_OK(lcs_context_decode_batch(both, &too_many_rows, &r));
    CHECK(pos_max(both, 0) == 2 && pos_max(both, 1) == 2 && pos_max(both, 2) == N_BATCH - 1);
    lcs_context_free(both);
    lcs_context_free(alone);
}

static void test_a_shared_token_is_dirty_after_a_failure(lcs_model * model) {
    const int32_t *   tokens = prompt(8);
    lcs_context *     ctx = make(model, 3, true);
    lcs_decode_result r;
    const int32_t     pos[3] = {0, 1, 0};
    const int32_t     n_ids[3] = {2, 2, 1};
    const int32_t     ids[5] = {0, 1, 0, 1, 2};
    lcs_batch         batch = {3, tokens, pos, n_ids, ids, NULL};
    lcs_fault_arm_decode(-3, 2);
    CHECK_STATUS(lcs_context_decode_batch(ctx, &batch, &r), LCS_STATUS_COMPUTE_FAILED);
    CHECK(r.n_dirty == 2 && r.dirty[0] == 3);
    for (int32_t s = 0; s < 3; ++s) {
        bool removed = false;
        CHECK_OK(lcs_context_seq_rm(ctx, s, -1, -1, &removed));
        CHECK(pos_max(ctx, s) == -1);
    }
    CHECK_OK(lcs_context_decode_batch(ctx, &batch, &r));
    CHECK(pos_max(ctx, 0) == 1 && pos_max(ctx, 1) == 1 && pos_max(ctx, 2) == 0);
    const int32_t same[2] = {1, 1};
    const int32_t two[1] = {2};
    const int32_t p2[1] = {2};
    lcs_batch     twice = {1, tokens, p2, two, same, NULL};
    CHECK_STATUS(lcs_context_decode_batch(ctx, &twice, &r), LCS_STATUS_ARG);
    lcs_context_free(ctx);
}

static void test_held_rows_stay_in_place(lcs_model * model) {
    const int32_t * tokens = prompt(N_BATCH + 8);
    lcs_context *   ctx = make(model, 1, false);
    const float *   row = NULL;
    const float *   again = NULL;
    CHECK_OK(lcs_context_decode(ctx, tokens, 4, 0, -1, LCS_LOGITS_LAST, NULL, NULL));
    CHECK_OK(lcs_context_logits(ctx, -1, &row));
    CHECK_OK(lcs_context_hold_rows(ctx, 1));
    CHECK_OK(lcs_context_decode(ctx, tokens, 4, 0, -1, LCS_LOGITS_LAST, NULL, NULL));
    CHECK_OK(lcs_context_logits(ctx, -1, &again));
    CHECK(row == again); /* replaced in place */
    CHECK_STATUS(lcs_context_decode(ctx, tokens, 4, 0, -1, LCS_LOGITS_ALL, NULL, NULL), LCS_STATUS_BUSY);
    CHECK(pos_max(ctx, 0) == 7 && isfinite(row[0]));
    CHECK_OK(lcs_context_hold_rows(ctx, -1));
    CHECK_OK(lcs_context_decode(ctx, tokens, N_BATCH + 8, 0, -1, LCS_LOGITS_ALL, NULL, NULL));
    CHECK_OK(lcs_context_logits(ctx, 0, &row)); /* a copied row */
    CHECK_OK(lcs_context_hold_rows(ctx, 1));
    CHECK_OK(lcs_context_decode(ctx, tokens, 4, 0, -1, LCS_LOGITS_LAST, NULL, NULL));
    CHECK(isfinite(row[0]) && isfinite(row[100])); /* still readable: ASan would tell */
    CHECK_OK(lcs_context_hold_rows(ctx, -1));
    lcs_context_free(ctx);
}

static void test_embeddings_can_be_switched(lcs_model * model) {
    const int32_t * tokens = prompt(40);
    lcs_context *   ctx = make(model, 1, false);
    const float *   row = NULL;
    CHECK_OK(lcs_context_decode(ctx, tokens, 4, 0, -1, LCS_LOGITS_LAST, NULL, NULL));
    CHECK_OK(lcs_context_set_embeddings(ctx, true));
    CHECK_STATUS(lcs_context_logits(ctx, -1, &row), LCS_STATUS_RANGE);
    /* Every token gives a row now: more than n_outputs_max are decoded in pieces. */
    CHECK_OK(lcs_context_decode(ctx, tokens, 40, 0, -1, LCS_LOGITS_LAST, NULL, NULL));
    for (int32_t i = 0; i < 40; ++i) {
        CHECK_OK(lcs_context_embeddings(ctx, i, &row));
        CHECK(isfinite(row[0]));
        CHECK_OK(lcs_context_logits(ctx, i, &row));
    }
    CHECK_STATUS(lcs_context_embeddings_seq(ctx, 0, &row), LCS_STATUS_UNSUPPORTED);
    CHECK_OK(lcs_context_set_embeddings(ctx, false));
    CHECK_OK(lcs_context_decode(ctx, tokens, 4, 0, -1, LCS_LOGITS_LAST, NULL, NULL));
    CHECK_STATUS(lcs_context_embeddings(ctx, -1, &row), LCS_STATUS_UNSUPPORTED);
    lcs_context_free(ctx);
}

int main(int argc, char ** argv) {
    lcs_model * llama = load_model(fixture(argc, argv, "tiny-llama.gguf"));
    test_bad_arguments_change_nothing(llama);
    test_pieces_equal_one_batch_after_the_other(llama);
    test_every_row_asked_for_is_there_across_pieces(llama);
    test_a_full_context_is_said_and_stays_usable(llama);
    test_a_cancel_is_sticky_until_seen_once(llama);
    test_an_exception_makes_the_context_fatal(llama);
    test_every_failing_step_of_a_decode_is_clean(llama);
    test_batches_of_several_sequences(llama);
    test_a_shared_token_is_dirty_after_a_failure(llama);
    test_held_rows_stay_in_place(llama);
    test_embeddings_can_be_switched(llama);
    test_every_partial_failure_is_told_truly(llama, false);
    lcs_model_free(llama);

    const char * const names[] = {"tiny-swa.gguf", "tiny-mamba.gguf", "tiny-hybrid.gguf"};
    for (size_t i = 0; i < 3; ++i) {
        lcs_model * model = load_model(fixture(argc, argv, names[i]));
        test_pieces_equal_one_batch_after_the_other(model);
        test_every_partial_failure_is_told_truly(model, i > 0);
        lcs_model_free(model);
    }
    check_nothing_alive();
    return 0;
}
