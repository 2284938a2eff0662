/* Threads: cancel from beside, a second caller, one model under many contexts, and the log queue. Runs under TSan. */
#include "check.h"

#include <pthread.h>
#include <stdatomic.h>
#include <time.h>

static lcs_context * make(lcs_model * model) {
    lcs_context_params p;
    lcs_context *      ctx = NULL;
    lcs_context_params_init(&p);
    p.n_ctx = 2048;
    p.n_batch = 256;
    p.n_ubatch = 64;
    p.n_threads = 2;
    CHECK_OK(lcs_context_init(model, &p, &ctx));
    return ctx;
}

static const int32_t * prompt(void) {
    static int32_t tokens[2048];
    for (int32_t i = 0; i < 2048; ++i) {
        tokens[i] = (i * 31 + 3) % 900 + 5;
    }
    return tokens;
}

static void nap(long us) {
    const struct timespec t = {0, us * 1000};
    nanosleep(&t, NULL);
}

typedef struct shared {
    lcs_model *   model;
    lcs_context * ctx;
    atomic_int    running;
    atomic_int    done;
    atomic_int    busy;
    long          delay_us;
} shared;

static void * canceller(void * data) {
    shared * s = data;
    while (!atomic_load(&s->running)) {
        nap(10);
    }
    nap(s->delay_us);
    CHECK_OK(lcs_context_cancel(s->ctx));
    return NULL;
}

static void test_a_cancel_from_another_thread_ends_a_decode(lcs_model * model) {
    lcs_context *   straight = make(model);
    const int32_t * tokens = prompt();
    lcs_model_info  info;
    CHECK_OK(lcs_model_get_info(model, &info));
    CHECK_OK(lcs_context_decode(straight, tokens, 1024, 0, -1, LCS_LOGITS_LAST, NULL, NULL));
    const float * expected = NULL;
    CHECK_OK(lcs_context_logits(straight, -1, &expected));
    for (long delay = 0; delay < 20000; delay = delay * 2 + 500) {
        shared            s = {.model = model, .ctx = make(model), .delay_us = delay};
        lcs_decode_result r;
        pthread_t         thread;
        CHECK(pthread_create(&thread, NULL, canceller, &s) == 0);
        atomic_store(&s.running, 1);
        const lcs_status status = lcs_context_decode(s.ctx, tokens, 1024, 0, -1, LCS_LOGITS_LAST, NULL, &r);
        CHECK(pthread_join(thread, NULL) == 0);
        CHECK(status == LCS_STATUS_OK || status == LCS_STATUS_ABORTED);
        CHECK(r.committed % 64 == 0 && r.n_dirty == 0);
        if (status == LCS_STATUS_OK) {
            /* It came too late and waits for the next call. */
            CHECK_STATUS(lcs_context_decode(s.ctx, tokens, 1, 0, -1, LCS_LOGITS_LAST, NULL, NULL), LCS_STATUS_ABORTED);
        } else {
            CHECK_OK(lcs_context_decode(s.ctx, tokens + r.committed, 1024 - r.committed, 0, -1, LCS_LOGITS_LAST, NULL,
                                        NULL));
            const float * row = NULL;
            CHECK_OK(lcs_context_logits(s.ctx, -1, &row));
            CHECK(memcmp(row, expected, sizeof(float) * (size_t) info.n_vocab) == 0);
        }
        lcs_context_free(s.ctx);
    }
    lcs_context_free(straight);
}

static void * intruder(void * data) {
    shared * s = data;
    while (!atomic_load(&s->running)) {
        nap(10);
    }
    while (!atomic_load(&s->done)) {
        const int32_t    token = 1;
        int32_t          lo = 0;
        int32_t          hi = 0;
        const lcs_status status = lcs_context_decode(s->ctx, &token, 1, 0, 1 << 20, LCS_LOGITS_LAST, NULL, NULL);
        /* Between two calls of the other thread it may get in, and is refused for its position. */
        CHECK(status == LCS_STATUS_BUSY || status == LCS_STATUS_INVALID_BATCH);
        atomic_fetch_add(&s->busy, status == LCS_STATUS_BUSY);
        const lcs_status looked = lcs_context_seq_pos(s->ctx, 0, &lo, &hi);
        CHECK(looked == LCS_STATUS_BUSY || looked == LCS_STATUS_OK);
        nap(100);
    }
    return NULL;
}

static void test_a_second_caller_is_busy_and_disturbs_nothing(lcs_model * model) {
    shared          s = {.model = model, .ctx = make(model)};
    const int32_t * tokens = prompt();
    pthread_t       threads[3];
    for (int i = 0; i < 3; ++i) {
        CHECK(pthread_create(&threads[i], NULL, intruder, &s) == 0);
        nap(1000);
    }
    CHECK_OK(lcs_context_decode(s.ctx, tokens, 1, 0, -1, LCS_LOGITS_LAST, NULL, NULL));
    atomic_store(&s.running, 1);
    for (int i = 0; i < 6; ++i) {
        /* An intruder may be inside for a moment: then this thread is the second caller. */
        lcs_status status;
        do {
            status = lcs_context_decode(s.ctx, tokens, 256, 0, -1, LCS_LOGITS_LAST, NULL, NULL);
        } while (status == LCS_STATUS_BUSY);
        CHECK(status == LCS_STATUS_OK);
    }
    atomic_store(&s.done, 1);
    for (int i = 0; i < 3; ++i) {
        CHECK(pthread_join(threads[i], NULL) == 0);
    }
    CHECK(atomic_load(&s.busy) > 0);
    lcs_context_free(s.ctx);
}

static void * worker(void * data) {
    shared *      s = data;
    lcs_context * ctx = make(s->model);
    for (int i = 0; i < 4; ++i) {
        int32_t tokens[64];
        size_t  n = 0;
        CHECK_OK(lcs_vocab_tokenize(s->model, "one model under many threads", 28, false, true, tokens, 64, &n));
        CHECK_OK(lcs_context_decode(ctx, tokens, (int32_t) n, 0, -1, LCS_LOGITS_LAST, NULL, NULL));
        const int32_t bad = -1;
        CHECK_STATUS(lcs_context_decode(ctx, &bad, 1, 0, -1, LCS_LOGITS_LAST, NULL, NULL), LCS_STATUS_RANGE);
        lcs_error_info info;
        lcs_last_error(&info);
        CHECK(info.status == LCS_STATUS_RANGE); /* errors are each thread's own */
        lcs_log_level level;
        lcs_string *  line = NULL;
        while (lcs_log_pending() > 0) {
            CHECK_OK(lcs_log_next(&level, &line));
            lcs_string_free(line);
            line = NULL;
        }
    }
    lcs_context_free(ctx);
    return NULL;
}

static void test_one_model_serves_many_threads(lcs_model * model) {
    shared    s = {.model = model};
    pthread_t threads[4];
    lcs_log_set_level(LCS_LOG_LEVEL_DEBUG);
    for (int i = 0; i < 4; ++i) {
        CHECK(pthread_create(&threads[i], NULL, worker, &s) == 0);
    }
    for (int i = 0; i < 4; ++i) {
        CHECK(pthread_join(threads[i], NULL) == 0);
    }
    lcs_log_set_level(LCS_LOG_LEVEL_WARN);
}

static void test_log_lines_are_kept_and_bounded(const char * path) {
    lcs_log_level level;
    lcs_string *  line = NULL;
    int           n = 0;
    lcs_log_set_level(LCS_LOG_LEVEL_DEBUG);
    lcs_model_free(load_model(path));
    CHECK(lcs_log_pending() > 0);
    for (;; ++n) {
        CHECK_OK(lcs_log_next(&level, &line));
        if (line == NULL) {
            break;
        }
        CHECK(level >= LCS_LOG_LEVEL_DEBUG && level <= LCS_LOG_LEVEL_ERROR && lcs_string_bytes(line) > 0);
        CHECK(strchr(lcs_string_data(line), '\n') == NULL);
        lcs_string_free(line);
    }
    CHECK(n > 0 && n <= 1024 && lcs_log_pending() == 0);
    lcs_log_set_level(LCS_LOG_LEVEL_NONE);
    lcs_model_free(load_model(path));
    CHECK(lcs_log_pending() == 0);
    lcs_log_set_level(LCS_LOG_LEVEL_WARN);
    CHECK_STATUS(lcs_log_next(NULL, &line), LCS_STATUS_ARG);
    CHECK_STATUS(lcs_log_next(&level, NULL), LCS_STATUS_ARG);
    CHECK(lcs_string_bytes(NULL) == 0 && strcmp(lcs_string_data(NULL), "") == 0);
    lcs_string_free(NULL);
}

int main(int argc, char ** argv) {
    const char * path = fixture(argc, argv, "tiny-llama.gguf");
    lcs_model *  model = load_model(path);
    test_a_cancel_from_another_thread_ends_a_decode(model);
    test_a_second_caller_is_busy_and_disturbs_nothing(model);
    test_one_model_serves_many_threads(model);
    lcs_model_free(model);
    test_log_lines_are_kept_and_bounded(path);
    check_nothing_alive();
    return 0;
}
