/* Contexts: parameters, resolved values, and what is refused before llama.cpp would assert on it. */
#include "check.h"

#include <math.h>
#include <sys/wait.h>
#include <unistd.h>

static lcs_context_params small(void) {
    lcs_context_params p;
    lcs_context_params_init(&p);
    p.n_ctx = 512;
    p.n_batch = 128;
    p.n_ubatch = 32;
    p.n_threads = 2;
    return p;
}

static void expect(lcs_model * model, const lcs_context_params * p, lcs_status status, const char * field) {
    lcs_context *  ctx = NULL;
    lcs_error_info info;
    CHECK_STATUS(lcs_context_init(model, p, &ctx), status);
    CHECK(ctx == NULL);
    lcs_last_error(&info);
    if (strcmp(info.field, field) != 0) {
        fprintf(stderr, "field \"%s\", expected \"%s\" (%s)\n", info.field, field, info.message);
        exit(1);
    }
}

#define EXPECT(status, field, change)         \
    do {                                      \
        lcs_context_params p = small();       \
        change;                               \
        expect(model, &p, status, field);     \
    } while (0)

static void test_parameters_are_judged(lcs_model * model) {
    EXPECT(LCS_STATUS_RANGE, "n_ctx", p.n_ctx = 0xffffffffu);
    EXPECT(LCS_STATUS_RANGE, "n_ctx", p.n_ctx = 0x7fffff01u);
    EXPECT(LCS_STATUS_RANGE, "n_batch", p.n_batch = 0);
    EXPECT(LCS_STATUS_RANGE, "n_ubatch", p.n_ubatch = 0);
    EXPECT(LCS_STATUS_RANGE, "n_seq_max", p.n_seq_max = 0);
    EXPECT(LCS_STATUS_RANGE, "n_seq_max", p.n_seq_max = 257);
    EXPECT(LCS_STATUS_ARG, "n_seq_max", p.n_seq_max = 129);
    EXPECT(LCS_STATUS_ARG, "n_outputs_max", p.n_seq_max = 4; p.n_outputs_max = 3);
    EXPECT(LCS_STATUS_RANGE, "n_threads", p.n_threads = 513);
    EXPECT(LCS_STATUS_RANGE, "n_threads_batch", p.n_threads_batch = 513);
    EXPECT(LCS_STATUS_RANGE, "poll", p.poll = 101);
    EXPECT(LCS_STATUS_ARG, "flash_attn", p.flash_attn = 2);
    EXPECT(LCS_STATUS_ARG, "pooling", p.pooling = 5);
    EXPECT(LCS_STATUS_ARG, "attention", p.attention = -2);
    EXPECT(LCS_STATUS_ARG, "rope_scaling", p.rope_scaling = 4);
    EXPECT(LCS_STATUS_ARG, "rope_freq_base", p.rope_freq_base = NAN);
    EXPECT(LCS_STATUS_ARG, "rope_freq_scale", p.rope_freq_scale = -1);
    EXPECT(LCS_STATUS_ARG, "yarn_ext_factor", p.yarn_ext_factor = INFINITY);
    EXPECT(LCS_STATUS_ARG, "type_k", p.type_k = 5);
    EXPECT(LCS_STATUS_ARG, "type_v", p.type_v = 16);
    EXPECT(LCS_STATUS_ARG, "type_v", p.type_v = LCS_TYPE_Q8_0);
    EXPECT(LCS_STATUS_ARG, "n_ubatch", p.n_ubatch = 8; p.n_rs_seq = 7);
    /* Half a terabyte of cells: refused by its size, not by the kernel's killer. */
    EXPECT(LCS_STATUS_NOMEM, "memory", p.n_ctx = 0x7fffff00u);
}

static void test_values_are_resolved(lcs_model * model) {
    lcs_context_params p = small();
    lcs_context_info   info;
    lcs_context *      ctx = NULL;
    p.n_ctx = 300;
    p.n_seq_max = 2;
    p.flash_attn = LCS_FLASH_ATTN_ON;
    p.type_k = LCS_TYPE_Q8_0;
    p.type_v = LCS_TYPE_Q4_0;
    CHECK_OK(lcs_context_init(model, &p, &ctx));
    CHECK_OK(lcs_context_get_info(ctx, &info));
    CHECK(info.n_ctx == 512 && info.n_ctx_seq == 256); /* padded to 256 a sequence */
    CHECK(info.n_batch == 128 && info.n_ubatch == 32 && info.n_seq_max == 2);
    CHECK(info.n_outputs_max == 32);
    CHECK(info.flash_attn == LCS_FLASH_ATTN_ON && info.type_k == LCS_TYPE_Q8_0 && info.type_v == LCS_TYPE_Q4_0);
    CHECK(info.memory_kind == LCS_MEMORY_KIND_ATTENTION && info.n_stream == 2 && !info.kv_unified);
    CHECK(info.can_shift && !info.embeddings && !info.fatal && info.n_threads == 2 && info.n_threads_batch == 2);
    lcs_context_free(ctx);

    p = small();
    p.n_batch = 100000; /* cut to n_ctx */
    p.kv_unified = true;
    p.n_seq_max = 4;
    p.n_threads = 0;
    CHECK_OK(lcs_context_init(model, &p, &ctx));
    CHECK_OK(lcs_context_get_info(ctx, &info));
    CHECK(info.n_batch == 512 && info.n_stream == 1 && info.n_ctx_seq == 512 && info.n_threads >= 1);
    lcs_context_free(ctx);

    CHECK_OK(lcs_context_init(model, NULL, &ctx)); /* defaults */
    CHECK_OK(lcs_context_get_info(ctx, &info));
    CHECK(info.n_ctx == 512 && info.flash_attn == LCS_FLASH_ATTN_OFF && info.type_k == LCS_TYPE_F16);
    lcs_context_free(ctx);
}

static void test_null_is_an_argument_error(lcs_model * model) {
    lcs_context_params p = small();
    lcs_context *      ctx = NULL;
    lcs_context_info   info;
    lcs_perf           perf;
    size_t             n = 0;
    CHECK_STATUS(lcs_context_init(NULL, &p, &ctx), LCS_STATUS_ARG);
    CHECK_STATUS(lcs_context_init(model, &p, NULL), LCS_STATUS_ARG);
    CHECK_STATUS(lcs_context_get_info(NULL, &info), LCS_STATUS_ARG);
    CHECK_STATUS(lcs_context_set_threads(NULL, 1, 1), LCS_STATUS_ARG);
    CHECK_STATUS(lcs_context_set_embeddings(NULL, true), LCS_STATUS_ARG);
    CHECK_STATUS(lcs_context_set_adapters(NULL, NULL, NULL, 0), LCS_STATUS_ARG);
    CHECK_STATUS(lcs_context_cancel(NULL), LCS_STATUS_ARG);
    CHECK_STATUS(lcs_context_get_perf(NULL, &perf), LCS_STATUS_ARG);
    CHECK_STATUS(lcs_context_reset_perf(NULL), LCS_STATUS_ARG);
    CHECK_STATUS(lcs_context_memory_use(NULL, NULL, 0, &n), LCS_STATUS_ARG);
    CHECK_STATUS(lcs_context_hold_rows(NULL, 1), LCS_STATUS_ARG);
    lcs_context_free(NULL);
    lcs_context_params_init(NULL);

    CHECK_OK(lcs_context_init(model, &p, &ctx));
    CHECK_STATUS(lcs_context_get_info(ctx, NULL), LCS_STATUS_ARG);
    CHECK_STATUS(lcs_context_get_perf(ctx, NULL), LCS_STATUS_ARG);
    CHECK_STATUS(lcs_context_memory_use(ctx, NULL, 0, NULL), LCS_STATUS_ARG);
    CHECK_STATUS(lcs_context_set_adapters(ctx, NULL, NULL, 1), LCS_STATUS_ARG);
    CHECK_STATUS(lcs_context_hold_rows(ctx, -1), LCS_STATUS_RANGE);
    CHECK_STATUS(lcs_context_hold_rows(ctx, 2), LCS_STATUS_RANGE);
    lcs_context_free(ctx);
}

static void test_threads_can_be_changed(lcs_model * model) {
    lcs_context_params p = small();
    lcs_context *      ctx = NULL;
    lcs_context_info   info;
    const int32_t      tokens[4] = {1, 2, 3, 4};
    CHECK_OK(lcs_context_init(model, &p, &ctx));
    CHECK_OK(lcs_context_decode(ctx, tokens, 4, 0, -1, LCS_LOGITS_LAST, NULL, NULL));
    CHECK_OK(lcs_context_set_threads(ctx, 1, 3));
    CHECK_OK(lcs_context_get_info(ctx, &info));
    CHECK(info.n_threads == 1 && info.n_threads_batch == 3);
    CHECK_OK(lcs_context_decode(ctx, tokens, 4, 0, -1, LCS_LOGITS_LAST, NULL, NULL));
    CHECK_OK(lcs_context_decode(ctx, tokens, 1, 0, -1, LCS_LOGITS_LAST, NULL, NULL));
    CHECK_STATUS(lcs_context_set_threads(ctx, 513, 1), LCS_STATUS_RANGE);
    CHECK_OK(lcs_context_get_info(ctx, &info));
    CHECK(info.n_threads == 1 && info.n_threads_batch == 3);
    lcs_context_free(ctx);
}

static void test_memory_use_and_counters(lcs_model * model) {
    lcs_context_params p = small();
    lcs_context *      ctx = NULL;
    lcs_memory_use     use[16];
    lcs_perf           perf;
    size_t             n = 0;
    uint64_t           context = 0;
    const int32_t      tokens[5] = {1, 2, 3, 4, 5};
    p.perf = true;
    CHECK_OK(lcs_context_init(model, &p, &ctx));
    CHECK_STATUS(lcs_context_memory_use(ctx, NULL, 0, &n), LCS_STATUS_BUFFER);
    CHECK(n >= 2 && n <= 16);
    CHECK_OK(lcs_context_memory_use(ctx, use, 16, &n));
    for (size_t i = 0; i < n; ++i) {
        context += use[i].context;
    }
    CHECK(context > 0 && strcmp(use[n - 1].name, "output") == 0 && use[n - 1].compute > 0);
    CHECK_OK(lcs_context_decode(ctx, tokens, 5, 0, -1, LCS_LOGITS_LAST, NULL, NULL));
    CHECK_OK(lcs_context_decode(ctx, tokens, 1, 0, -1, LCS_LOGITS_LAST, NULL, NULL));
    CHECK_OK(lcs_context_get_perf(ctx, &perf));
    CHECK(perf.n_prefill == 5 && perf.n_decode == 1 && perf.prefill_ms > 0 && perf.decode_ms > 0);
    CHECK_OK(lcs_context_reset_perf(ctx));
    CHECK_OK(lcs_context_get_perf(ctx, &perf));
    CHECK(perf.n_prefill == 0 && perf.n_decode == 0);
    lcs_context_free(ctx);
}

static void test_rows_nobody_asked_for_are_not_reserved(lcs_model * model) {
    lcs_context_params p = small();
    lcs_context *      ctx = NULL;
    lcs_memory_use     use[16];
    size_t             n = 0;
    uint64_t           few = 0;
    uint64_t           many = 0;
    lcs_model_info     info;
    CHECK_OK(lcs_model_get_info(model, &info));
    p.n_ctx = 1024;
    p.n_batch = 512;
    p.n_ubatch = 512;
    for (int every = 0; every < 2; ++every) {
        p.n_outputs_max = every ? 512 : 0;
        CHECK_OK(lcs_context_init(model, &p, &ctx));
        CHECK_OK(lcs_context_memory_use(ctx, use, 16, &n));
        for (size_t i = 0; i < n; ++i) {
            *(every ? &many : &few) += use[i].compute;
        }
        lcs_context_free(ctx);
    }
    /* 512 rows against 32, less what the graph can overlay with other tensors. */
    CHECK(many - few > (uint64_t) info.n_vocab * 4 * (512 - 32) / 2);
}

static void test_the_model_may_go_first(const char * path) {
    lcs_model *        model = load_model(path);
    lcs_context_params p = small();
    lcs_context *      ctx = NULL;
    const int32_t      tokens[2] = {1, 2};
    CHECK_OK(lcs_context_init(model, &p, &ctx));
    lcs_model_free(model);
    CHECK_OK(lcs_context_decode(ctx, tokens, 2, 0, -1, LCS_LOGITS_LAST, NULL, NULL));
    lcs_context_free(ctx);
}

static void test_a_forked_child_is_refused(lcs_model * model) {
    lcs_context_params p = small();
    lcs_context *      ctx = NULL;
    const int32_t      token = 1;
    int                status = 0;
    CHECK_OK(lcs_context_init(model, &p, &ctx));
    const pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        lcs_context_info info;
        const bool       refused =
                lcs_context_decode(ctx, &token, 1, 0, -1, LCS_LOGITS_LAST, NULL, NULL) == LCS_STATUS_FORKED &&
                lcs_context_get_info(ctx, &info) == LCS_STATUS_FORKED && lcs_context_cancel(ctx) == LCS_STATUS_FORKED;
        lcs_context_free(ctx); /* frees nothing */
        _exit(refused ? 0 : 1);
    }
    CHECK(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0);
    CHECK_OK(lcs_context_decode(ctx, &token, 1, 0, -1, LCS_LOGITS_LAST, NULL, NULL));
    lcs_context_free(ctx);
}

static void test_every_failing_step_of_making_one_is_clean(lcs_model * model) {
    lcs_context_params p = small();
    p.n_threads_batch = 1; /* two pools */
    for (int64_t n = 1;; ++n) {
        lcs_live_counts before;
        lcs_live_counts after;
        lcs_context *   ctx = NULL;
        lcs_live(&before);
        lcs_fault_arm(n);
        const lcs_status status = lcs_context_init(model, &p, &ctx);
        const bool       fired = lcs_fault_fired();
        lcs_fault_arm(0);
        if (!fired) {
            CHECK(status == LCS_STATUS_OK && n > 1);
            lcs_context_free(ctx);
            break;
        }
        lcs_live(&after);
        CHECK(status == LCS_STATUS_NOMEM && ctx == NULL && before.contexts == after.contexts);
    }
}

static void test_models_without_a_context_are_unsupported(const char * path) {
    lcs_model *        model = NULL;
    lcs_context *      ctx = NULL;
    lcs_model_params   mp;
    lcs_context_params p = small();
    lcs_model_params_init(&mp);
    mp.vocab_only = true;
    CHECK_OK(lcs_model_load(path, &mp, &model));
    CHECK_STATUS(lcs_context_init(model, &p, &ctx), LCS_STATUS_UNSUPPORTED);
    lcs_model_free(model);
}

static void test_an_embedding_model_has_no_memory(const char * path) {
    lcs_model *        model = load_model(path);
    lcs_context *      ctx = NULL;
    lcs_context_info   info;
    lcs_context_params p = small();
    const float *      row = NULL;
    int32_t            tokens[129];
    bool               removed = false;
    size_t             n = 0;
    for (int i = 0; i < 129; ++i) {
        tokens[i] = 100 + i;
    }
    p.embeddings = true;
    p.pooling = 1;
    CHECK_OK(lcs_context_init(model, &p, &ctx));
    CHECK_OK(lcs_context_get_info(ctx, &info));
    CHECK(info.memory_kind == LCS_MEMORY_KIND_NONE && info.pooling == 1);
    CHECK_STATUS(lcs_context_embeddings_seq(ctx, 0, &row), LCS_STATUS_RANGE); /* no decode yet */
    CHECK_OK(lcs_context_decode(ctx, tokens, 8, 0, -1, LCS_LOGITS_LAST, NULL, NULL));
    CHECK_OK(lcs_context_embeddings_seq(ctx, 0, &row));
    CHECK(isfinite(row[0]));
    CHECK_STATUS(lcs_context_embeddings(ctx, -1, &row), LCS_STATUS_UNSUPPORTED); /* pooled */
    /* A pooled batch cannot be cut. */
    CHECK_OK(lcs_context_decode(ctx, tokens, 128, 0, -1, LCS_LOGITS_LAST, NULL, NULL));
    CHECK_STATUS(lcs_context_decode(ctx, tokens, 129, 0, -1, LCS_LOGITS_LAST, NULL, NULL), LCS_STATUS_BATCH_TOO_LARGE);
    CHECK_STATUS(lcs_context_seq_rm(ctx, 0, 0, -1, &removed), LCS_STATUS_UNSUPPORTED);
    CHECK_STATUS(lcs_context_clear(ctx, true), LCS_STATUS_UNSUPPORTED);
    CHECK_STATUS(lcs_state_bytes(ctx, 0, false, &n), LCS_STATUS_UNSUPPORTED);
    lcs_context_free(ctx);
    lcs_model_free(model);
}

int main(int argc, char ** argv) {
    const char * path = fixture(argc, argv, "tiny-llama.gguf");
    lcs_model *  model = load_model(path);
    test_parameters_are_judged(model);
    test_values_are_resolved(model);
    test_null_is_an_argument_error(model);
    test_threads_can_be_changed(model);
    test_memory_use_and_counters(model);
    test_rows_nobody_asked_for_are_not_reserved(model);
    test_a_forked_child_is_refused(model);
    test_every_failing_step_of_making_one_is_clean(model);
    lcs_model_free(model);
    test_the_model_may_go_first(path);
    test_models_without_a_context_are_unsupported(path);
    test_an_embedding_model_has_no_memory(fixture(argc, argv, "tiny-bert.gguf"));
    check_nothing_alive();
    return 0;
}
