/* The C tests' few tools: CHECK, paths of the generated models, and the counts that must return to where they were. */
#ifndef LCS_TESTS_CHECK_H
#define LCS_TESTS_CHECK_H

#include "lcs.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define CHECK(condition)                                                                  \
    do {                                                                                  \
        if (!(condition)) {                                                               \
            fprintf(stderr, "%s:%d: failed: %s\n", __FILE__, __LINE__, #condition);       \
            exit(1);                                                                      \
        }                                                                                 \
    } while (0)

/* Expects a status; a failure prints what the shim said. */
#define CHECK_STATUS(call, expected)                                                                        \
    do {                                                                                                    \
        const lcs_status check_status_ = (call);                                                            \
        if (check_status_ != (expected)) {                                                                  \
            lcs_error_info check_info_;                                                                     \
            lcs_last_error(&check_info_);                                                                   \
            fprintf(stderr, "%s:%d: %s gave %s, expected %s: %s (log: %s)\n", __FILE__, __LINE__, #call,    \
                    lcs_status_name(check_status_), lcs_status_name(expected), check_info_.message,         \
                    check_info_.log);                                                                       \
            exit(1);                                                                                        \
        }                                                                                                   \
    } while (0)

#define CHECK_OK(call) CHECK_STATUS(call, LCS_STATUS_OK)

/* argv[1] of every test is the folder of generated models (tests/tiny.py). */
static inline const char * fixture(int argc, char ** argv, const char * name) {
    static char paths[8][4096];
    static int  next = 0;
    char *      path = paths[next++ % 8];
    CHECK(argc > 1);
    snprintf(path, sizeof paths[0], "%s/%s", argv[1], name);
    return path;
}

static inline lcs_model * load_model(const char * path) {
    lcs_model * model = NULL;
    CHECK_OK(lcs_model_load(path, NULL, &model));
    return model;
}

static inline int32_t n_vocab_of(const lcs_model * model) {
    lcs_model_info info;
    CHECK_OK(lcs_model_get_info(model, &info));
    return info.n_vocab;
}

/* Same pieces, same kernels: equal to the bit. */
static inline void check_same_logits(lcs_context * a, lcs_context * b, int32_t n_vocab) {
    const float * x = NULL;
    const float * y = NULL;
    CHECK_OK(lcs_context_logits(a, -1, &x));
    CHECK_OK(lcs_context_logits(b, -1, &y));
    CHECK(memcmp(x, y, sizeof(float) * (size_t) n_vocab) == 0);
}

static inline int32_t pos_max(lcs_context * ctx, int32_t seq_id) {
    int32_t lo = 0;
    int32_t hi = 0;
    CHECK_OK(lcs_context_seq_pos(ctx, seq_id, &lo, &hi));
    return hi;
}

static inline void check_nothing_alive(void) {
    lcs_live_counts live;
    lcs_live(&live);
    CHECK(live.models == 0 && live.headers == 0 && live.contexts == 0 && live.samplers == 0 && live.adapters == 0 &&
          live.chat_templates == 0 && live.strings == 0);
}

#endif
