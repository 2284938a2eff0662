/* Memory operations: what each kind can do, what is refused, and that what is left can be continued. Oracle: a context
 * that never held anything else. */
#include "check.h"

#include <math.h>

enum { N_UBATCH = 16 };

static lcs_context * make_of(lcs_model * model, uint32_t n_ctx, uint32_t n_seq_max, bool unified) {
    lcs_context_params p;
    lcs_context *      ctx = NULL;
    lcs_context_params_init(&p);
    p.n_ctx = n_ctx;
    p.n_batch = 64;
    p.n_ubatch = N_UBATCH;
    p.n_seq_max = n_seq_max;
    p.kv_unified = unified;
    p.n_threads = 1;
    CHECK_OK(lcs_context_init(model, &p, &ctx));
    return ctx;
}

static lcs_context * make(lcs_model * model, uint32_t n_seq_max, bool unified) {
    return make_of(model, 256 * (unified ? 1 : n_seq_max), n_seq_max, unified);
}

static void feed(lcs_context * ctx, int32_t seq_id, int32_t from, int32_t to) {
    int32_t tokens[256];
    for (int32_t i = from; i < to; ++i) {
        tokens[i - from] = (i * 37 + 11) % 900 + 5;
    }
    CHECK_OK(lcs_context_decode(ctx, tokens, to - from, seq_id, -1, LCS_LOGITS_LAST, NULL, NULL));
}

static void pos(lcs_context * ctx, int32_t seq_id, int32_t lo, int32_t hi) {
    int32_t a = 0;
    int32_t b = 0;
    CHECK_OK(lcs_context_seq_pos(ctx, seq_id, &a, &b));
    if (a != lo || b != hi) {
        fprintf(stderr, "sequence %d holds %d..%d, expected %d..%d\n", seq_id, a, b, lo, hi);
        exit(1);
    }
}

static bool rm(lcs_context * ctx, int32_t seq_id, int32_t p0, int32_t p1) {
    bool removed = false;
    CHECK_OK(lcs_context_seq_rm(ctx, seq_id, p0, p1, &removed));
    return removed;
}

/* Of cells in another order: sums differ in their last bits, and with them what is rounded into later cells. */
static void check_near_logits(lcs_context * ctx, lcs_context * cold, int32_t n_vocab, float bound) {
    const float * a = NULL;
    const float * b = NULL;
    float         largest = 0;
    CHECK_OK(lcs_context_logits(ctx, -1, &a));
    CHECK_OK(lcs_context_logits(cold, -1, &b));
    for (int32_t t = 0; t < n_vocab; ++t) {
        largest = fabsf(a[t] - b[t]) > largest ? fabsf(a[t] - b[t]) : largest;
    }
    CHECK(largest < bound);
}

static void test_arguments_are_judged(lcs_model * model) {
    lcs_context * ctx = make(model, 2, true);
    bool          removed = false;
    int32_t       a = 0;
    int32_t       b = 0;
    const int32_t bad[] = {-2, -1, 2, 255, 256, INT32_MAX, INT32_MIN};
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; ++i) {
        CHECK_STATUS(lcs_context_seq_rm(ctx, bad[i], 0, -1, &removed), LCS_STATUS_RANGE);
        CHECK_STATUS(lcs_context_seq_cp(ctx, bad[i], 0, 0, -1), LCS_STATUS_RANGE);
        CHECK_STATUS(lcs_context_seq_cp(ctx, 0, bad[i], 0, -1), LCS_STATUS_RANGE);
        CHECK_STATUS(lcs_context_seq_keep(ctx, bad[i]), LCS_STATUS_RANGE);
        CHECK_STATUS(lcs_context_seq_add(ctx, bad[i], 0, -1, 1), LCS_STATUS_RANGE);
        CHECK_STATUS(lcs_context_seq_pos(ctx, bad[i], &a, &b), LCS_STATUS_RANGE);
    }
    CHECK_STATUS(lcs_context_seq_rm(NULL, 0, 0, -1, &removed), LCS_STATUS_ARG);
    CHECK_STATUS(lcs_context_seq_rm(ctx, 0, 0, -1, NULL), LCS_STATUS_ARG);
    CHECK_STATUS(lcs_context_seq_cp(NULL, 0, 1, 0, -1), LCS_STATUS_ARG);
    CHECK_STATUS(lcs_context_seq_keep(NULL, 0), LCS_STATUS_ARG);
    CHECK_STATUS(lcs_context_seq_add(NULL, 0, 0, -1, 1), LCS_STATUS_ARG);
    CHECK_STATUS(lcs_context_seq_pos(NULL, 0, &a, &b), LCS_STATUS_ARG);
    CHECK_STATUS(lcs_context_seq_pos(ctx, 0, NULL, &b), LCS_STATUS_ARG);
    CHECK_STATUS(lcs_context_seq_pos(ctx, 0, &a, NULL), LCS_STATUS_ARG);
    CHECK_STATUS(lcs_context_clear(NULL, false), LCS_STATUS_ARG);
    feed(ctx, 0, 0, 10);
    CHECK_STATUS(lcs_context_seq_add(ctx, 0, 0, -1, INT32_MAX - 5), LCS_STATUS_RANGE);
    pos(ctx, 0, 0, 9);
    lcs_context_free(ctx);
}

static void test_a_cut_attention_sequence_goes_on_as_if_cold(lcs_model * model) {
    const int32_t n_vocab = n_vocab_of(model);
    lcs_context * cut = make(model, 1, false);
    lcs_context * cold = make(model, 1, false);
    pos(cut, 0, -1, -1);
    CHECK(rm(cut, 0, -1, -1)); /* nothing to remove */
    feed(cut, 0, 0, 48);
    CHECK(rm(cut, 0, 60, -1) && rm(cut, 0, 20, 20) && rm(cut, 0, 30, 20));
    pos(cut, 0, 0, 47);
    CHECK(rm(cut, 0, 2 * N_UBATCH, -1));
    pos(cut, 0, 0, 2 * N_UBATCH - 1);
    feed(cut, 0, 100, 110);
    feed(cold, 0, 0, 2 * N_UBATCH);
    feed(cold, 0, 100, 110);
    check_same_logits(cut, cold, n_vocab);
    CHECK_OK(lcs_context_clear(cut, true));
    pos(cut, 0, -1, -1);
    CHECK_OK(lcs_context_clear(cold, false));
    feed(cut, 0, 0, 5);
    feed(cold, 0, 0, 5);
    check_same_logits(cut, cold, n_vocab);
    lcs_context_free(cut);
    lcs_context_free(cold);
}

static void test_copies_and_keep(lcs_model * model, bool unified, bool recurrent) {
    const int32_t n_vocab = n_vocab_of(model);
    lcs_context * ctx = make(model, 4, unified);
    lcs_context * cold = make(model, 4, unified);
    feed(ctx, 0, 0, 20);
    feed(ctx, 1, 50, 60); /* replaced by the copy */
    CHECK_OK(lcs_context_seq_cp(ctx, 0, 0, 0, -1));
    CHECK_OK(lcs_context_seq_cp(ctx, 0, 1, -1, -1));
    CHECK_OK(lcs_context_seq_cp(ctx, 1, 2, 0, 20)); /* a chain; the whole, spelled out */
    feed(ctx, 2, 30, 40);
    feed(cold, 2, 0, 20);
    feed(cold, 2, 30, 40);
    if (!unified) {
        check_same_logits(ctx, cold, n_vocab); /* streams of their own: to the bit */
    }
    int32_t lo = 0;
    int32_t hi = 0;
    CHECK_OK(lcs_context_seq_pos(ctx, 0, &lo, &hi));
    CHECK(hi == 19);
    CHECK_OK(lcs_context_seq_pos(ctx, 2, &lo, &hi));
    CHECK(hi == 29);
    if (!unified || recurrent) {
        CHECK_STATUS(lcs_context_seq_cp(ctx, 0, 3, 0, 10), LCS_STATUS_UNSUPPORTED);
    } else {
        CHECK_OK(lcs_context_seq_cp(ctx, 0, 3, 0, 10));
        CHECK_OK(lcs_context_seq_pos(ctx, 3, &lo, &hi));
        CHECK(hi == 9);
    }
    CHECK_OK(lcs_context_seq_keep(ctx, 2));
    for (int32_t s = 0; s < 4; ++s) {
        CHECK_OK(lcs_context_seq_pos(ctx, s, &lo, &hi));
        CHECK(hi == (s == 2 ? 29 : -1)); /* also those in other streams */
    }
    CHECK_OK(lcs_context_seq_cp(ctx, 0, 2, 0, -1)); /* a copy of nothing */
    pos(ctx, 2, -1, -1);
    lcs_context_free(ctx);
    lcs_context_free(cold);
}

static void test_a_pending_copy_is_done_before_the_memory_is_cleared(lcs_model * model) {
    const int32_t n_vocab = n_vocab_of(model);
    lcs_context * ctx = make(model, 2, false);
    lcs_context * cold = make(model, 2, false);
    feed(ctx, 0, 0, 20);
    CHECK_OK(lcs_context_seq_cp(ctx, 0, 1, 0, -1));
    CHECK_OK(lcs_context_clear(ctx, true));
    feed(ctx, 1, 40, 60);
    feed(cold, 1, 40, 60);
    check_same_logits(ctx, cold, n_vocab);
    lcs_context_free(ctx);
    lcs_context_free(cold);
}

static void test_a_shift_moves_positions(lcs_model * model) {
    lcs_context * ctx = make(model, 1, false);
    feed(ctx, 0, 0, 30);
    CHECK(rm(ctx, 0, 5, 15));
    CHECK_OK(lcs_context_seq_add(ctx, 0, 15, -1, -10));
    pos(ctx, 0, 0, 19);
    CHECK_OK(lcs_context_seq_add(ctx, 0, 0, -1, 0));
    CHECK_OK(lcs_context_seq_add(ctx, 0, 40, -1, 5));
    pos(ctx, 0, 0, 19);
    /* A cancel meets the shift's graph disarmed: the shift is done once, the decode is refused. */
    CHECK_OK(lcs_context_cancel(ctx));
    const int32_t token = 9;
    CHECK_STATUS(lcs_context_decode(ctx, &token, 1, 0, -1, LCS_LOGITS_LAST, NULL, NULL), LCS_STATUS_ABORTED);
    CHECK_OK(lcs_context_decode(ctx, &token, 1, 0, -1, LCS_LOGITS_LAST, NULL, NULL));
    const float * row = NULL;
    CHECK_OK(lcs_context_logits(ctx, -1, &row));
    CHECK(isfinite(row[0]));
    pos(ctx, 0, 0, 20);
    lcs_context_free(ctx);

    lcs_context_params p;
    lcs_context_params_init(&p);
    p.n_ctx = 256;
    p.n_threads = 1;
    p.type_k = LCS_TYPE_Q8_0;
    p.flash_attn = LCS_FLASH_ATTN_ON;
    CHECK_OK(lcs_context_init(model, &p, &ctx));
    feed(ctx, 0, 0, 10);
    CHECK_STATUS(lcs_context_seq_add(ctx, 0, 0, -1, 5), LCS_STATUS_UNSUPPORTED); /* quantised K */
    lcs_context_free(ctx);
}

static void test_a_windowed_memory_tells_what_is_left(lcs_model * model) {
    lcs_context_params p;
    lcs_context *      ctx = NULL;
    int32_t            lo = 0;
    int32_t            hi = 0;
    lcs_context_params_init(&p);
    p.n_ctx = 1024;
    p.n_batch = 64;
    p.n_ubatch = N_UBATCH;
    p.n_threads = 1;
    CHECK_OK(lcs_context_init(model, &p, &ctx));
    for (int32_t i = 0; i < 600; i += 60) {
        feed(ctx, 0, i, i + 60);
    }
    CHECK_OK(lcs_context_seq_pos(ctx, 0, &lo, &hi));
    CHECK(hi == 599 && lo > 300); /* 256 cells serve a window of 32 */
    CHECK(rm(ctx, 0, 300, -1));   /* true, as llama.cpp has it ... */
    CHECK_OK(lcs_context_seq_pos(ctx, 0, &lo, &hi));
    CHECK(lo == -1); /* ... though nothing of the window is left */
    CHECK_STATUS(lcs_context_seq_add(ctx, 0, 0, -1, 5), LCS_STATUS_UNSUPPORTED);
    lcs_context_free(ctx);
}

/* What sequences share of a window is given up once none of them shows it. */
static void test_sequences_that_share_a_window_all_go_on(lcs_model * model) {
    enum { N = 200, N_SEQ = 4, N_MORE = 56 };
    const int32_t n_vocab = n_vocab_of(model);
    lcs_context * ctx = make_of(model, 1024, N_SEQ, true);
    lcs_context * cold = make(model, 1, true);
    feed(ctx, 0, 0, N);
    feed(cold, 0, 0, N);
    for (int32_t s = 1; s < N_SEQ; ++s) {
        CHECK_OK(lcs_context_seq_cp(ctx, 0, s, 0, -1));
    }
    for (int32_t at = N; at < N + N_MORE; ++at) {
        feed(cold, 0, at, at + 1);
        for (int32_t s = 0; s < N_SEQ; ++s) {
            feed(ctx, s, at, at + 1);
            check_near_logits(ctx, cold, n_vocab, 0.25f); /* they reach 60 */
        }
    }
    lcs_context_free(ctx);
    lcs_context_free(cold);
}

static void test_a_recurrent_memory_is_cut_whole_or_not_at_all(lcs_model * model) {
    const int32_t n_vocab = n_vocab_of(model);
    lcs_context * ctx = make(model, 2, false);
    lcs_context * cold = make(model, 2, false);
    feed(ctx, 0, 0, 20);
    CHECK(!rm(ctx, 0, 10, -1));
    CHECK(!rm(ctx, 0, 19, -1));
    CHECK(!rm(ctx, 0, 0, 10)); /* llama.cpp says true and does nothing */
    CHECK(!rm(ctx, 0, 5, 10));
    CHECK(rm(ctx, 0, 20, -1));
    feed(ctx, 0, 20, 25); /* nothing had changed */
    feed(cold, 0, 0, 20);
    feed(cold, 0, 20, 25);
    check_same_logits(ctx, cold, n_vocab);
    CHECK(rm(ctx, 0, 0, -1));
    pos(ctx, 0, -1, -1);
    feed(ctx, 0, 0, 20);
    CHECK_OK(lcs_context_clear(cold, true));
    feed(cold, 0, 0, 20);
    check_same_logits(ctx, cold, n_vocab);
    lcs_context_free(ctx);
    lcs_context_free(cold);
}

static void test_rollback_slots_hold_only_the_last_ubatch(lcs_model * model) {
    const int32_t      n_vocab = n_vocab_of(model);
    lcs_context_params p;
    lcs_context *      ctx = NULL;
    lcs_context_info   info;
    lcs_context_params_init(&p);
    p.n_ctx = 256;
    p.n_batch = 64;
    p.n_ubatch = N_UBATCH;
    p.n_rs_seq = 3;
    p.n_threads = 1;
    CHECK_OK(lcs_context_init(model, &p, &ctx));
    CHECK_OK(lcs_context_get_info(ctx, &info));
    CHECK(info.n_rs_seq == 3); /* lfm2 is on llama.cpp's list */
    feed(ctx, 0, 0, 20);       /* ubatches of 16 and 4 */
    CHECK(!rm(ctx, 0, 16, -1)); /* four back: more than there are slots */
    CHECK(rm(ctx, 0, 18, -1));
    CHECK(!rm(ctx, 0, 17, -1)); /* one pending at a time */
    size_t n = 0;
    CHECK_STATUS(lcs_state_bytes(ctx, 0, false, &n), LCS_STATUS_UNSUPPORTED);
    feed(ctx, 0, 18, 20);
    lcs_context * cold = NULL;
    CHECK_OK(lcs_context_init(model, &p, &cold));
    feed(cold, 0, 0, 20);
    check_near_logits(ctx, cold, n_vocab, 0.05f);
    feed(ctx, 0, 20, 21);
    CHECK(!rm(ctx, 0, 19, -1)); /* after one token the older slots are stale, though llama.cpp would take them */
    lcs_context_free(ctx);
    lcs_context_free(cold);
}

int main(int argc, char ** argv) {
    lcs_model * llama = load_model(fixture(argc, argv, "tiny-llama.gguf"));
    lcs_model * swa = load_model(fixture(argc, argv, "tiny-swa.gguf"));
    lcs_model * mamba = load_model(fixture(argc, argv, "tiny-mamba.gguf"));
    lcs_model * hybrid = load_model(fixture(argc, argv, "tiny-hybrid.gguf"));
    test_arguments_are_judged(llama);
    test_a_cut_attention_sequence_goes_on_as_if_cold(llama);
    test_copies_and_keep(llama, true, false);
    test_copies_and_keep(llama, false, false);
    test_copies_and_keep(swa, false, false);
    test_copies_and_keep(mamba, false, true);
    test_copies_and_keep(hybrid, false, true);
    test_copies_and_keep(hybrid, true, true);
    test_a_pending_copy_is_done_before_the_memory_is_cleared(llama);
    test_a_shift_moves_positions(llama);
    test_a_windowed_memory_tells_what_is_left(swa);
    test_sequences_that_share_a_window_all_go_on(swa);
    test_a_recurrent_memory_is_cut_whole_or_not_at_all(mamba);
    test_a_recurrent_memory_is_cut_whole_or_not_at_all(hybrid);
    test_rollback_slots_hold_only_the_last_ubatch(hybrid);
    lcs_model_free(llama);
    lcs_model_free(swa);
    lcs_model_free(mamba);
    lcs_model_free(hybrid);
    check_nothing_alive();
    return 0;
}
