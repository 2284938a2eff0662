/* Samplers: every option against llama.cpp's own full chain, draws and seeds, grammars against llama.cpp's grammar,
 * lazy grammars, and what each error leaves behind. */
#include "check.h"

#include "gguf.h"
#include "llama.h"

#include <math.h>
#include <sys/wait.h>
#include <unistd.h>

static lcs_model *                g_model;
static const struct llama_vocab * g_vocab; /* of the same file, for the oracle */
static int32_t                    g_n_vocab;
static float *                    g_row;

static uint64_t g_random = 88172645463325252u;

static uint32_t random_bits(void) {
    g_random ^= g_random << 13;
    g_random ^= g_random >> 7;
    g_random ^= g_random << 17;
    return (uint32_t) (g_random >> 32);
}

static float random_unit(void) {
    return (float) (random_bits() >> 8) / 16777216.0f;
}

/* Bell-shaped, hardly two values equal, and some tokens likely enough to come again. */
static const float * random_row(void) {
    for (int32_t i = 0; i < g_n_vocab; ++i) {
        const uint32_t bits = random_bits();
        g_row[i] = (float) ((bits & 0x7FFF) + (bits >> 15 & 0x7FFF)) / 8192.0f - 4.0f + random_unit() * 1e-3f;
    }
    for (int i = 0; i < 12; ++i) {
        g_row[100 + random_bits() % 40] += 4.0f + 2.0f * random_unit();
    }
    return g_row;
}

static lcs_sampler_params defaults(void) {
    lcs_sampler_params p;
    lcs_sampler_params_init(&p);
    return p;
}

static lcs_sampler * make(const lcs_sampler_params * p) {
    lcs_sampler * s = NULL;
    CHECK_OK(lcs_sampler_init(g_model, p, &s));
    return s;
}

static int32_t sample(lcs_sampler * s, const float * row) {
    int32_t token = -1;
    CHECK_OK(lcs_sampler_sample_row(s, row, g_n_vocab, &token));
    CHECK(token >= 0 && token < g_n_vocab);
    return token;
}

static int32_t naive_argmax(const float * values, int32_t n) {
    int32_t best = -1;
    for (int32_t i = 0; i < n; ++i) {
        if (!isnan(values[i]) && (best < 0 || values[i] > values[best])) {
            best = i;
        }
    }
    return best;
}

static void test_argmax_is_the_first_of_the_largest_and_never_a_nan(void) {
    enum { N_MOST = 3000 };
    float * values = malloc(sizeof(float) * (N_MOST + 1));
    CHECK(lcs_argmax(NULL, 4) == -1 && lcs_argmax(values, 0) == -1 && lcs_argmax(values, -3) == -1);
    for (int32_t n = 1; n <= N_MOST; n += n < 300 ? 1 : 97) {
        float * at = values + n % 2; /* not aligned */
        for (int round = 0; round < 8; ++round) {
            for (int32_t i = 0; i < n; ++i) {
                at[i] = round < 2 ? random_unit() - 0.5f : (float) (random_bits() % 3) - 1.0f; /* many equals */
                if (round >= 4 && random_bits() % 4 == 0) {
                    at[i] = random_bits() % 2 == 0 ? NAN : -INFINITY;
                }
                if (round == 7 && random_bits() % 2 == 0) {
                    at[i] = random_bits() % 2 == 0 ? 0.0f : -0.0f;
                }
            }
            CHECK(lcs_argmax(at, n) == naive_argmax(at, n));
        }
        for (int32_t i = 0; i < n; ++i) {
            at[i] = -INFINITY;
        }
        CHECK(lcs_argmax(at, n) == 0);
        at[n / 2] = INFINITY;
        CHECK(lcs_argmax(at, n) == n / 2);
        for (int32_t i = 0; i < n; ++i) {
            at[i] = NAN;
        }
        CHECK(lcs_argmax(at, n) == -1);
        at[n - 1] = -INFINITY;
        CHECK(lcs_argmax(at, n) == n - 1);
    }
    free(values);
}

static void test_greedy_is_the_most_likely_token(void) {
    lcs_sampler_params p = defaults();
    lcs_sampler *      s = make(&p);
    uint32_t           seed = 1;
    CHECK_OK(lcs_sampler_seed(s, &seed));
    CHECK(seed == 0);
    for (int i = 0; i < 10; ++i) {
        const float * row = random_row();
        CHECK(sample(s, row) == naive_argmax(row, g_n_vocab));
    }
    lcs_sampler_free(s);
    p.temperature = -1;
    p.top_k = 3;
    p.mirostat = 2;
    p.seed = 7;
    s = make(&p);
    const float * row = random_row();
    CHECK(sample(s, row) == naive_argmax(row, g_n_vocab));
    /* Infinities of both signs are no NaN. */
    g_row[3] = INFINITY;
    g_row[4] = -INFINITY;
    CHECK(sample(s, row) == 3);
    lcs_sampler_free(s);
}

/* llama.cpp's own chain over the whole vocabulary. */
static struct llama_sampler * full_chain(const lcs_sampler_params * p) {
    struct llama_sampler * chain = llama_sampler_chain_init(llama_sampler_chain_default_params());
    llama_sampler_chain_add(chain, llama_sampler_init_logit_bias(g_n_vocab, (int32_t) p->n_logit_bias,
                                                                 (const llama_logit_bias *) p->logit_bias));
    llama_sampler_chain_add(chain, llama_sampler_init_penalties(g_n_vocab, p->penalty_last_n, p->penalty_repeat,
                                                                p->penalty_freq, p->penalty_present));
    llama_sampler_chain_add(chain, llama_sampler_init_dry(g_vocab, p->dry_multiplier, p->dry_base,
                                                          p->dry_allowed_length, p->dry_penalty_last_n,
                                                          (const char **) p->dry_breakers, p->n_dry_breakers));
    if (p->temperature <= 0) {
        llama_sampler_chain_add(chain, llama_sampler_init_greedy());
        return chain;
    }
    if (p->mirostat == 0) {
        llama_sampler_chain_add(chain, llama_sampler_init_top_n_sigma(p->top_n_sigma));
        llama_sampler_chain_add(chain, llama_sampler_init_top_k(p->top_k));
        llama_sampler_chain_add(chain, llama_sampler_init_typical(p->typical_p, p->min_keep));
        llama_sampler_chain_add(chain, llama_sampler_init_top_p(p->top_p, p->min_keep));
        llama_sampler_chain_add(chain, llama_sampler_init_min_p(p->min_p, p->min_keep));
        llama_sampler_chain_add(
            chain, llama_sampler_init_xtc(p->xtc_probability, p->xtc_threshold, p->min_keep, p->seed));
    }
    llama_sampler_chain_add(chain,
                            llama_sampler_init_temp_ext(p->temperature, p->dynatemp_range, p->dynatemp_exponent));
    if (p->mirostat == 1) {
        llama_sampler_chain_add(chain,
                                llama_sampler_init_mirostat(g_n_vocab, p->seed, p->mirostat_tau, p->mirostat_eta, 100));
    } else if (p->mirostat == 2) {
        llama_sampler_chain_add(chain, llama_sampler_init_mirostat_v2(p->seed, p->mirostat_tau, p->mirostat_eta));
    } else {
        llama_sampler_chain_add(chain, llama_sampler_init_dist(p->seed));
    }
    return chain;
}

static int32_t sample_full(struct llama_sampler * chain, const float * row) {
    llama_token_data * data = malloc(sizeof *data * (size_t) g_n_vocab);
    for (int32_t i = 0; i < g_n_vocab; ++i) {
        data[i] = (llama_token_data) {i, row[i], 0};
    }
    llama_token_data_array array = {data, (size_t) g_n_vocab, -1, false};
    llama_sampler_apply(chain, &array);
    CHECK(array.selected >= 0);
    const int32_t token = array.data[array.selected].id;
    llama_sampler_accept(chain, token);
    free(data);
    return token;
}

/* n_distinct: so many different tokens must come, or the comparison would say little. */
static void compare(const lcs_sampler_params * p, int n_rows, int n_distinct) {
    lcs_sampler *          s = make(p);
    lcs_sampler *          twin = NULL; /* taken in the middle */
    struct llama_sampler * chain = full_chain(p);
    int32_t                seen[16];
    int                    n_seen = 0;
    for (int i = 0; i < n_rows; ++i) {
        const float * row = random_row();
        const int32_t token = sample(s, row);
        const int32_t expected = sample_full(chain, row);
        CHECK(token == expected);
        CHECK(twin == NULL || sample(twin, row) == token);
        if (i == n_rows / 2) {
            CHECK_OK(lcs_sampler_clone(s, &twin));
        }
        bool known = false;
        for (int j = 0; j < n_seen; ++j) {
            known = known || seen[j] == token;
        }
        if (!known && n_seen < 16) {
            seen[n_seen++] = token;
        }
    }
    CHECK(n_seen >= n_distinct);
    llama_sampler_free(chain);
    lcs_sampler_free(twin);
    lcs_sampler_free(s);
}

static void test_every_option_chooses_as_the_full_chain_of_llama(void) {
    static const lcs_logit_bias bias[] = {{101, 2.5f}, {102, -INFINITY}, {103, -3.0f}, {101, 0.5f}, {40000, 9.0f}};
    static const char * const   breakers[] = {"\n", ":"};
    lcs_sampler_params          base = defaults();
    base.temperature = 0.8f;
    base.seed = 42;

    const int ks[] = {0, 1, 2, 40, 200, 8000};
    for (size_t i = 0; i < sizeof ks / sizeof ks[0]; ++i) {
        lcs_sampler_params p = base;
        p.top_k = ks[i];
        compare(&p, 16, ks[i] == 1 ? 1 : 4);
        p.top_p = 0.9f;
        p.min_p = 0.02f;
        compare(&p, 16, 1);
        p.logit_bias = bias;
        p.n_logit_bias = 5;
        p.penalty_repeat = 1.3f;
        p.penalty_freq = 0.2f;
        p.penalty_present = 0.4f;
        p.penalty_last_n = 16;
        compare(&p, 40, 3);
        p.dry_multiplier = 0.8f;
        p.dry_penalty_last_n = 64;
        p.dry_allowed_length = 1;
        p.dry_breakers = breakers;
        p.n_dry_breakers = i == 3 ? 2 : 0;
        compare(&p, 40, 3);
    }
    lcs_sampler_params p = base;
    p.top_k = 40;
    p.typical_p = 0.7f;
    compare(&p, 30, 3);
    p.typical_p = 1;
    p.xtc_probability = 0.5f;
    p.xtc_threshold = 0.05f;
    compare(&p, 40, 5);
    p.min_keep = 38;
    compare(&p, 30, 5);
    p.min_keep = 0;
    p.dynatemp_range = 0.5f;
    p.dynatemp_exponent = 1.3f;
    compare(&p, 30, 5);
    p = base;
    p.top_n_sigma = 1.5f;
    compare(&p, 15, 3);
    p.top_k = 20;
    compare(&p, 15, 3);
    p = base;
    p.min_keep = 5;
    p.top_k = 30;
    p.top_p = 0.01f;
    p.min_p = 0.9f;
    compare(&p, 30, 4);
    for (int kind = 1; kind <= 2; ++kind) {
        p = base;
        p.mirostat = kind;
        p.mirostat_tau = 3;
        p.mirostat_eta = 0.2f;
        p.top_k = 5; /* replaced */
        compare(&p, 30, 8);
    }
    /* Greedy after bias, penalties and DRY. */
    p = base;
    p.temperature = 0;
    p.logit_bias = bias;
    p.n_logit_bias = 5;
    compare(&p, 10, 1);
    p.penalty_last_n = 32;
    p.penalty_repeat = 1.5f;
    p.penalty_present = 1;
    compare(&p, 30, 5);
    p.dry_multiplier = 2;
    p.dry_penalty_last_n = 1000000;
    p.dry_allowed_length = 0;
    compare(&p, 30, 5);
}

static void test_ties_go_to_the_lower_token(void) {
    lcs_sampler_params p = defaults();
    lcs_logit_bias     bias = {30, 1.0f};
    for (int32_t i = 0; i < g_n_vocab; ++i) {
        g_row[i] = 0;
    }
    g_row[20] = 1;
    g_row[40] = 1;
    p.logit_bias = &bias;
    p.n_logit_bias = 1;
    lcs_sampler * s = make(&p);
    CHECK(sample(s, g_row) == 20);
    lcs_sampler_free(s);
    p.temperature = 1;
    p.top_k = 2;
    p.seed = 5;
    s = make(&p);
    for (int i = 0; i < 50; ++i) {
        const int32_t token = sample(s, g_row);
        CHECK(token == 20 || token == 30);
    }
    lcs_sampler_free(s);
}

static void test_a_top_k_of_the_whole_vocabulary_cuts_nothing(void) {
    lcs_sampler_params p = defaults();
    p.temperature = 1;
    p.seed = 6;
    lcs_sampler * off = make(&p);
    p.top_k = g_n_vocab;
    lcs_sampler * all = make(&p);
    p.top_k = INT32_MAX;
    lcs_sampler * more = make(&p);
    for (int i = 0; i < 5; ++i) {
        const int32_t token = sample(off, random_row());
        CHECK(sample(all, g_row) == token && sample(more, g_row) == token);
    }
    lcs_sampler_free(off);
    lcs_sampler_free(all);
    lcs_sampler_free(more);
}

static void test_a_temperature_next_to_nothing_is_greedy(void) {
    lcs_sampler_params p = defaults();
    p.temperature = 1e-40f;
    p.seed = 3;
    for (int kind = 0; kind < 3; ++kind) {
        p.top_k = kind == 1 ? 40 : 0;
        p.mirostat = kind == 2 ? 2 : 0;
        lcs_sampler * s = make(&p);
        for (int i = 0; i < 5; ++i) {
            const float * row = random_row();
            CHECK(sample(s, row) == naive_argmax(row, g_n_vocab));
        }
        lcs_sampler_free(s);
    }
}

/* With every probability but a few too small for a float, llama.cpp's typical sampler divides by their logarithms. */
static void test_typical_sampling_is_right_where_most_tokens_are_impossible(void) {
    lcs_sampler_params p = defaults();
    p.temperature = 1;
    p.seed = 8;
    p.typical_p = 0.5f;
    for (int32_t i = 0; i < g_n_vocab; ++i) {
        g_row[i] = i % 2 == 0 ? -500 : -INFINITY;
    }
    g_row[11] = 3; /* of 0.91: its surprise is the nearest to the entropy */
    g_row[12] = 0;
    g_row[13] = 0;
    lcs_sampler * s = make(&p);
    for (int i = 0; i < 40; ++i) {
        CHECK(sample(s, g_row) == 11);
    }
    lcs_sampler_free(s);
}

static void draw_16(lcs_sampler * s, int32_t * out) {
    g_random = 4711;
    for (int i = 0; i < 16; ++i) {
        out[i] = sample(s, random_row());
    }
}

/* Everything that draws, or remembers what was drawn. */
static lcs_sampler_params drawing(int mirostat) {
    lcs_sampler_params p = defaults();
    p.temperature = 1.5f;
    p.mirostat = mirostat;
    p.xtc_probability = 0.3f;
    p.xtc_threshold = 0.02f;
    p.penalty_last_n = 64;
    p.penalty_repeat = 1.2f;
    return p;
}

static void test_seeds_decide_and_reset_begins_again(void) {
    int32_t first[16];
    int32_t again[16];
    for (int kind = 0; kind <= 2; ++kind) {
        lcs_sampler_params p = drawing(kind);
        p.top_k = 60;
        p.dry_multiplier = 1;
        p.dry_penalty_last_n = 64;

        lcs_sampler * drawn = make(&p);
        uint32_t      seed = 0xFFFFFFFFu;
        CHECK_OK(lcs_sampler_seed(drawn, &seed));
        CHECK(seed != 0xFFFFFFFFu);
        draw_16(drawn, first);
        CHECK_OK(lcs_sampler_reset(drawn));
        draw_16(drawn, again);
        CHECK(memcmp(first, again, sizeof first) == 0);

        p.seed = seed;
        lcs_sampler * same = make(&p);
        draw_16(same, again);
        CHECK(memcmp(first, again, sizeof first) == 0);

        /* A clone goes on as the original does; reset, it begins where the original began. */
        lcs_sampler * clone = NULL;
        uint32_t      seed_of_clone = 0;
        CHECK_OK(lcs_sampler_clone(same, &clone));
        CHECK_OK(lcs_sampler_seed(clone, &seed_of_clone));
        CHECK(seed_of_clone == seed);
        draw_16(same, first);
        lcs_sampler_free(same);
        draw_16(clone, again);
        CHECK(memcmp(first, again, sizeof first) == 0);
        CHECK_OK(lcs_sampler_reset(clone));
        CHECK_OK(lcs_sampler_reset(drawn));
        draw_16(clone, first);
        draw_16(drawn, again);
        CHECK(memcmp(first, again, sizeof first) == 0);

        p.seed = seed == 0xFFFFFFFEu ? 1 : seed ^ 1;
        lcs_sampler * other = make(&p);
        draw_16(other, again);
        CHECK(memcmp(first, again, sizeof first) != 0);
        lcs_sampler_free(other);
        lcs_sampler_free(clone);
        lcs_sampler_free(drawn);
    }
}

static void test_saved_draws_go_on_in_another_sampler(void) {
    int32_t begin[16];
    int32_t first[16];
    int32_t again[16];
    for (int kind = 0; kind <= 2; ++kind) {
        lcs_sampler_params p = drawing(kind);
        p.seed = 7;
        lcs_sampler * s = make(&p);
        draw_16(s, begin);
        size_t n = 0;
        CHECK_STATUS(lcs_sampler_save_draws(s, NULL, 0, &n), LCS_STATUS_BUFFER);
        CHECK(n > 1000 && n < 20000);
        char *       saved = malloc(n);
        const size_t size = n;
        CHECK_STATUS(lcs_sampler_save_draws(s, saved, n - 1, &n), LCS_STATUS_BUFFER);
        CHECK_OK(lcs_sampler_save_draws(s, saved, n, &n));
        CHECK(n == size);
        draw_16(s, first);

        lcs_sampler * other = make(&p);
        for (int i = 0; i < 16; ++i) {
            CHECK_OK(lcs_sampler_accept(other, begin[i]));
        }
        /* What is cut or damaged changes nothing. */
        const size_t cuts[] = {0, 1, size / 2, size - 3, size - 6};
        for (size_t i = 0; i < sizeof cuts / sizeof *cuts; ++i) {
            CHECK_STATUS(lcs_sampler_load_draws(other, saved, cuts[i]), LCS_STATUS_STATE_CORRUPT);
        }
        char kept = saved[size / 3];
        saved[size / 3] = 'x';
        CHECK_STATUS(lcs_sampler_load_draws(other, saved, size), LCS_STATUS_STATE_CORRUPT);
        saved[size / 3] = kept;
        for (int64_t k = 1;; ++k) {
            lcs_fault_arm(k);
            const lcs_status status = lcs_sampler_load_draws(other, saved, size);
            const bool       fired = lcs_fault_fired();
            lcs_fault_arm(0);
            CHECK(status == (fired ? LCS_STATUS_NOMEM : LCS_STATUS_OK));
            if (!fired) {
                break;
            }
        }
        draw_16(other, again);
        CHECK(memcmp(first, again, sizeof first) == 0);
        CHECK_STATUS(lcs_sampler_save_draws(NULL, saved, size, &n), LCS_STATUS_ARG);
        CHECK_STATUS(lcs_sampler_save_draws(s, NULL, size, &n), LCS_STATUS_ARG);
        CHECK_STATUS(lcs_sampler_save_draws(s, saved, size, NULL), LCS_STATUS_ARG);
        CHECK_STATUS(lcs_sampler_load_draws(NULL, saved, size), LCS_STATUS_ARG);
        CHECK_STATUS(lcs_sampler_load_draws(s, NULL, size), LCS_STATUS_ARG);
        free(saved);
        lcs_sampler_free(other);
        lcs_sampler_free(s);
    }
}

static void test_accept_tells_the_history(void) {
    lcs_sampler_params p = defaults();
    p.penalty_last_n = 2;
    p.penalty_present = 100;
    lcs_sampler * s = make(&p);
    const float * row = random_row();
    const int32_t best = naive_argmax(row, g_n_vocab);
    CHECK_OK(lcs_sampler_accept(s, best));
    CHECK(sample(s, row) != best);
    CHECK_OK(lcs_sampler_accept(s, 1));
    CHECK(sample(s, row) == best); /* two tokens later it is forgotten */
    CHECK_STATUS(lcs_sampler_accept(s, -1), LCS_STATUS_RANGE);
    CHECK_STATUS(lcs_sampler_accept(s, g_n_vocab), LCS_STATUS_RANGE);
    CHECK_STATUS(lcs_sampler_accept(NULL, 0), LCS_STATUS_ARG);
    lcs_sampler_free(s);
}

static void test_rows_that_allow_nothing_are_refused_and_draw_nothing(void) {
    for (int kind = 0; kind < 6; ++kind) {
        lcs_sampler_params p = defaults();
        lcs_logit_bias     bias = {7, 1};
        p.seed = 9;
        p.temperature = kind <= 1 ? 0 : 1;
        p.top_k = kind == 2 ? 10 : 0;
        p.mirostat = kind >= 4 ? kind - 3 : 0;
        p.logit_bias = &bias;
        p.n_logit_bias = kind == 1 ? 1 : 0;
        lcs_sampler * s = make(&p);
        lcs_sampler * twin = make(&p);
        int32_t       token = -7;
        random_row();
        const int32_t places[] = {0, 7, g_n_vocab / 2, g_n_vocab - 1};
        for (int at = 0; at < 4; ++at) {
            const float value = g_row[places[at]];
            g_row[places[at]] = NAN;
            CHECK_STATUS(lcs_sampler_sample_row(s, g_row, g_n_vocab, &token), LCS_STATUS_INTERNAL);
            g_row[places[at]] = value;
        }
        CHECK(token == -7);
        CHECK(sample(s, g_row) == sample(twin, g_row));
        if (kind >= 2) {
            g_row[9] = INFINITY; /* no probability can be made of it */
            CHECK_STATUS(lcs_sampler_sample_row(s, g_row, g_n_vocab, &token), LCS_STATUS_INTERNAL);
        }
        for (int32_t i = 0; i < g_n_vocab; ++i) {
            g_row[i] = -INFINITY;
        }
        CHECK_STATUS(lcs_sampler_sample_row(s, g_row, g_n_vocab, &token), LCS_STATUS_INTERNAL);
        CHECK(token == -7);
        g_row[5] = -2;
        CHECK(sample(s, g_row) == 5);
        CHECK(sample(twin, g_row) == 5);
        CHECK(sample(s, random_row()) == sample(twin, g_row));
        lcs_sampler_free(s);
        lcs_sampler_free(twin);
    }
}

typedef struct bad_value {
    size_t     offset;
    double     value;
    bool       is_int;
    lcs_status status;
} bad_value;

#define BAD_FLOAT(field, value) {offsetof(lcs_sampler_params, field), value, false, LCS_STATUS_ARG}
#define BAD_INT(field, value) {offsetof(lcs_sampler_params, field), value, true, LCS_STATUS_RANGE}

static void test_values_outside_their_range_are_refused(void) {
    static const bad_value bad[] = {
        BAD_FLOAT(temperature, NAN),       BAD_FLOAT(temperature, INFINITY),     BAD_FLOAT(dynatemp_range, -0.1),
        BAD_FLOAT(dynatemp_exponent, NAN), BAD_FLOAT(dynatemp_exponent, -1),     BAD_FLOAT(top_p, 1.5),
        BAD_FLOAT(top_p, -0.1),            BAD_FLOAT(min_p, NAN),                BAD_FLOAT(min_p, 1.1),
        BAD_FLOAT(typical_p, -1),          BAD_FLOAT(top_n_sigma, NAN),          BAD_FLOAT(top_n_sigma, INFINITY),
        BAD_FLOAT(xtc_probability, 1.01),  BAD_FLOAT(xtc_threshold, -1),         BAD_FLOAT(penalty_repeat, 0),
        BAD_FLOAT(penalty_repeat, -1),     BAD_FLOAT(penalty_freq, NAN),         BAD_FLOAT(penalty_present, -INFINITY),
        BAD_FLOAT(dry_multiplier, -1),     BAD_FLOAT(dry_base, NAN),             BAD_FLOAT(mirostat_tau, -1),
        BAD_FLOAT(mirostat_eta, INFINITY), BAD_INT(penalty_last_n, -1),          BAD_INT(penalty_last_n, 1000001),
        BAD_INT(dry_penalty_last_n, -1),   BAD_INT(dry_penalty_last_n, 1000001), BAD_INT(dry_allowed_length, -1),
        BAD_INT(mirostat, 3),              BAD_INT(mirostat, -1),
    };
    lcs_sampler * s = NULL;
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; ++i) {
        lcs_sampler_params p = defaults();
        if (bad[i].is_int) {
            const int32_t value = (int32_t) bad[i].value;
            memcpy((char *) &p + bad[i].offset, &value, sizeof value);
        } else {
            const float value = (float) bad[i].value;
            memcpy((char *) &p + bad[i].offset, &value, sizeof value);
        }
        CHECK_STATUS(lcs_sampler_init(g_model, &p, &s), bad[i].status);
        CHECK(s == NULL);
    }
    lcs_sampler_params p = defaults();
    CHECK_STATUS(lcs_sampler_init(NULL, &p, &s), LCS_STATUS_ARG);
    CHECK_STATUS(lcs_sampler_init(g_model, NULL, &s), LCS_STATUS_ARG);
    CHECK_STATUS(lcs_sampler_init(g_model, &p, NULL), LCS_STATUS_ARG);

    lcs_logit_bias bias = {g_n_vocab, 1};
    p.logit_bias = &bias;
    p.n_logit_bias = 1;
    CHECK_STATUS(lcs_sampler_init(g_model, &p, &s), LCS_STATUS_RANGE);
    bias.token = -1;
    CHECK_STATUS(lcs_sampler_init(g_model, &p, &s), LCS_STATUS_RANGE);
    bias = (lcs_logit_bias) {1, NAN};
    CHECK_STATUS(lcs_sampler_init(g_model, &p, &s), LCS_STATUS_ARG);
    bias.bias = INFINITY;
    CHECK_STATUS(lcs_sampler_init(g_model, &p, &s), LCS_STATUS_ARG);
    p.logit_bias = NULL;
    CHECK_STATUS(lcs_sampler_init(g_model, &p, &s), LCS_STATUS_ARG);
    p.n_logit_bias = SIZE_MAX;
    CHECK_STATUS(lcs_sampler_init(g_model, &p, &s), LCS_STATUS_RANGE);

    const char * texts[] = {"x", NULL};
    p = defaults();
    p.n_dry_breakers = 2;
    CHECK_STATUS(lcs_sampler_init(g_model, &p, &s), LCS_STATUS_ARG);
    p.dry_breakers = texts;
    CHECK_STATUS(lcs_sampler_init(g_model, &p, &s), LCS_STATUS_ARG);
    texts[1] = "";
    CHECK_STATUS(lcs_sampler_init(g_model, &p, &s), LCS_STATUS_RANGE);
    texts[1] = "a breaker of more than forty bytes is refused";
    CHECK_STATUS(lcs_sampler_init(g_model, &p, &s), LCS_STATUS_RANGE);
    p = defaults();
    texts[1] = NULL;
    p.trigger_patterns = texts;
    p.n_trigger_patterns = 2;
    CHECK_STATUS(lcs_sampler_init(g_model, &p, &s), LCS_STATUS_ARG);
    p = defaults();
    const int32_t outside = g_n_vocab;
    p.trigger_tokens = &outside;
    p.n_trigger_tokens = 1;
    CHECK_STATUS(lcs_sampler_init(g_model, &p, &s), LCS_STATUS_RANGE);
    CHECK(s == NULL);

    p = defaults();
    s = make(&p);
    int32_t  token = -7;
    uint32_t seed = 0;
    random_row();
    CHECK_STATUS(lcs_sampler_sample_row(NULL, g_row, g_n_vocab, &token), LCS_STATUS_ARG);
    CHECK_STATUS(lcs_sampler_sample_row(s, NULL, g_n_vocab, &token), LCS_STATUS_ARG);
    CHECK_STATUS(lcs_sampler_sample_row(s, g_row, g_n_vocab, NULL), LCS_STATUS_ARG);
    CHECK_STATUS(lcs_sampler_sample_row(s, g_row, g_n_vocab - 1, &token), LCS_STATUS_RANGE);
    CHECK_STATUS(lcs_sampler_sample_row(s, g_row, -1, &token), LCS_STATUS_RANGE);
    CHECK_STATUS(lcs_sampler_sample(s, NULL, -1, &token), LCS_STATUS_ARG);
    CHECK_STATUS(lcs_sampler_clone(NULL, &s), LCS_STATUS_ARG);
    CHECK_STATUS(lcs_sampler_clone(s, NULL), LCS_STATUS_ARG);
    CHECK_STATUS(lcs_sampler_reset(NULL), LCS_STATUS_ARG);
    CHECK_STATUS(lcs_sampler_seed(NULL, &seed), LCS_STATUS_ARG);
    CHECK_STATUS(lcs_sampler_seed(s, NULL), LCS_STATUS_ARG);
    CHECK(token == -7);
    lcs_sampler_free(s);
    lcs_sampler_free(NULL);
    lcs_sampler_params_init(NULL);
}

static int32_t token_of(const char * text) {
    llama_token tokens[8];
    CHECK(llama_tokenize(g_vocab, text, (int32_t) strlen(text), tokens, 8, false, true) == 1);
    return tokens[0];
}

static void test_grammars_that_are_none_are_refused_with_their_place(void) {
    static const char * const bad[][2] = {
        {"", "no rule \"root\""},
        {"rood ::= \"a\"", "no rule \"root\""},
        {"root ::= other", "line 1, column 10: rule \"other\" is not defined"},
        {"root ::= \"a\"\nx := \"b\"", "line 2, column 3: ::= is expected"},
        {"::= \"a\"", "a rule name is expected"},
        {"root ::= \"a", "the text ends inside a literal"},
        {"root ::= \"\\q\"", "an escape"},
        {"root ::= \"\\", "an escape"},
        {"root ::= \"\\x4\"", "2 hexadecimal digits"},
        {"root ::= [a", "the text ends inside a literal"},
        {"root ::= []", "an empty character class"},
        {"root ::= [^]", "an empty character class"},
        {"root ::= (\"a\"", "a ( without its )"},
        {"root ::= (\"a\" $", ") is expected"},
        {"root ::= \"a\")", "a ) without its ("},
        {"root ::= *", "nothing to repeat before *"},
        {"root ::= \"\"+", "nothing to repeat before +"},
        {"root ::= \"a\"{3,2}", "a repetition from 3 to 2"},
        {"root ::= \"a\"{4097}", "a repetition count over 4096"},
        {"root ::= \"a\"{0,4097}", "a repetition count over 4096"},
        {"root ::= \"a\"{99999999999999999999}", "a repetition count over 4096"},
        {"root ::= \"a\"{,2}", "a repetition count is expected"},
        {"root ::= \"a\"{2", "} is expected"},
        {"root ::= root \"a\" | \"b\"", "rule \"root\" begins with itself"},
        {"root ::= a\na ::= b\nb ::= | \"x\" | a", "begins with itself"},
        {"root ::= \"\xFF\"", "not UTF-8"},
        {"root ::= \"a\" $", "the end of the line is expected"},
        {"root ::= <[99999999]>", "outside the vocabulary"},
        {"root ::= <[9999999999]>", "a token id over"},
        {"root ::= <[1>", "]> is expected"},
        {"root ::= <no such token>", "is not one token"},
        {"root ::= !\"a\"", "< is expected after !"},
        {"root ::= <abc", "a < without its >"},
    };
    lcs_sampler *      s = NULL;
    lcs_error_info     info;
    lcs_sampler_params p = defaults();
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; ++i) {
        p.grammar = bad[i][0];
        CHECK_STATUS(lcs_sampler_init(g_model, &p, &s), LCS_STATUS_GRAMMAR);
        lcs_last_error(&info);
        CHECK(strstr(info.message, bad[i][1]) != NULL);
    }
    /* Limits: text, nesting, and what repetitions write out. */
    const size_t n = (1u << 20) + 64;
    char *       text = malloc(n + 1);
    memset(text, '#', n);
    text[n] = '\0';
    memcpy(text, "root ::= \"a\"\n", 13);
    p.grammar = text;
    CHECK_STATUS(lcs_sampler_init(g_model, &p, &s), LCS_STATUS_GRAMMAR);
    text[1u << 20] = '\0';
    CHECK_OK(lcs_sampler_init(g_model, &p, &s));
    lcs_sampler_free(s);
    for (size_t n_nested = 256; n_nested <= 257; ++n_nested) {
        char * at = text + sprintf(text, "root ::= ");
        memset(at, '(', n_nested);
        at[n_nested] = '.';
        memset(at + n_nested + 1, ')', n_nested);
        at[2 * n_nested + 1] = '\0';
        CHECK_STATUS(lcs_sampler_init(g_model, &p, &s), n_nested == 256 ? LCS_STATUS_OK : LCS_STATUS_GRAMMAR);
        lcs_sampler_free(n_nested == 256 ? s : NULL);
    }
    char * at = text + sprintf(text, "root ::= ");
    memset(at, '(', 100000);
    at[100000] = '\0';
    CHECK_STATUS(lcs_sampler_init(g_model, &p, &s), LCS_STATUS_GRAMMAR);
    for (int i = 0; i < 400; ++i) {
        at += sprintf(at, "\"a\"{0,4096} ");
    }
    CHECK_STATUS(lcs_sampler_init(g_model, &p, &s), LCS_STATUS_GRAMMAR);
    free(text);
    p.grammar = "root ::= \"a\"\nother ::= \"b\"";
    p.grammar_root = "third";
    CHECK_STATUS(lcs_sampler_init(g_model, &p, &s), LCS_STATUS_GRAMMAR);
    p.grammar_root = "other";
    s = make(&p);
    CHECK_STATUS(lcs_sampler_accept(s, token_of("a")), LCS_STATUS_GRAMMAR);
    CHECK_OK(lcs_sampler_accept(s, token_of("b")));
    lcs_sampler_free(s);
}

/* The generation prompt of a chat stands before the first choice, and in its grammar. */
static void test_a_grammar_begins_behind_its_prefix_also_after_a_reset(void) {
    lcs_sampler_params p = defaults();
    p.grammar = "root ::= \"xy\" \"ab\"";
    p.grammar_prefix = "xya";
    lcs_sampler * s = make(&p);
    for (int i = 0; i < 2; ++i) {
        lcs_sampler * copy = NULL;
        CHECK_STATUS(lcs_sampler_accept(s, token_of("a")), LCS_STATUS_GRAMMAR);
        CHECK_OK(lcs_sampler_clone(s, &copy));
        CHECK_OK(lcs_sampler_accept(copy, token_of("b")));
        CHECK_OK(lcs_sampler_accept(copy, llama_vocab_eos(g_vocab)));
        lcs_sampler_free(copy);
        CHECK_OK(lcs_sampler_accept(s, token_of("b")));
        CHECK_OK(lcs_sampler_reset(s));
    }
    lcs_sampler_free(s);
    p.grammar_prefix = "";
    s = make(&p);
    CHECK_OK(lcs_sampler_accept(s, token_of("x")));
    lcs_sampler_free(s);
    const char * const wrong[] = {"a", "xyabc", "\xff"};
    for (size_t i = 0; i < sizeof wrong / sizeof wrong[0]; ++i) {
        p.grammar_prefix = wrong[i];
        CHECK_STATUS(lcs_sampler_init(g_model, &p, &s), LCS_STATUS_GRAMMAR);
    }
    p.grammar_prefix = "x";
    p.grammar_lazy = true;
    CHECK_STATUS(lcs_sampler_init(g_model, &p, &s), LCS_STATUS_ARG);
}

/* llama.cpp takes a count over 2,000 for any count. */
static void test_a_repetition_ends_at_its_count(void) {
    lcs_sampler_params p = defaults();
    p.grammar = "root ::= \"a\"{2,4096}";
    lcs_sampler * s = make(&p);
    const int32_t a = token_of("a");
    for (int i = 0; i < 4096; ++i) {
        CHECK_STATUS(lcs_sampler_accept(s, llama_vocab_eos(g_vocab)), i < 2 ? LCS_STATUS_GRAMMAR : LCS_STATUS_OK);
        CHECK_OK(lcs_sampler_accept(s, a));
    }
    CHECK_STATUS(lcs_sampler_accept(s, a), LCS_STATUS_GRAMMAR);
    CHECK_OK(lcs_sampler_accept(s, llama_vocab_eos(g_vocab)));
    lcs_sampler_free(s);
}

static void test_a_grammar_ends_where_it_may_and_a_refused_token_changes_nothing(void) {
    lcs_sampler_params p = defaults();
    p.grammar = "root ::= \"ab\" \"c\"?";
    lcs_sampler * s = make(&p);
    const int32_t eos = llama_vocab_eos(g_vocab);
    CHECK_STATUS(lcs_sampler_accept(s, eos), LCS_STATUS_GRAMMAR);
    CHECK_STATUS(lcs_sampler_accept(s, token_of("b")), LCS_STATUS_GRAMMAR);
    CHECK_OK(lcs_sampler_accept(s, token_of("a")));
    CHECK_STATUS(lcs_sampler_accept(s, token_of("a")), LCS_STATUS_GRAMMAR);
    CHECK_STATUS(lcs_sampler_accept(s, eos), LCS_STATUS_GRAMMAR);
    /* However likely the others are. */
    for (int32_t i = 0; i < g_n_vocab; ++i) {
        g_row[i] = 10;
    }
    g_row[token_of("b")] = -50;
    g_row[token_of("bc")] = -60;
    CHECK(sample(s, g_row) == token_of("b"));
    g_row[token_of("c")] = -5;
    g_row[eos] = -4;
    lcs_sampler * ended = NULL;
    CHECK_OK(lcs_sampler_clone(s, &ended));
    CHECK(llama_vocab_is_eog(g_vocab, sample(ended, g_row)));
    CHECK_OK(lcs_sampler_accept(ended, token_of("c"))); /* an end is no step of the grammar */
    CHECK_STATUS(lcs_sampler_accept(ended, token_of("c")), LCS_STATUS_GRAMMAR);
    lcs_sampler_free(ended);
    CHECK_OK(lcs_sampler_accept(s, token_of("c")));
    CHECK(llama_vocab_is_eog(g_vocab, sample(s, g_row)));
    CHECK_OK(lcs_sampler_reset(s));
    CHECK_OK(lcs_sampler_accept(s, token_of("ab")));
    lcs_sampler_free(s);

    /* Nothing to go on with: no character can follow; or the row forbids the one that could. */
    p.grammar = "root ::= \"a\" [\\U00110000]";
    p.temperature = 1;
    p.seed = 11;
    s = make(&p);
    lcs_sampler * twin = make(&p);
    CHECK_OK(lcs_sampler_accept(s, token_of("a")));
    int32_t token = -7;
    CHECK_STATUS(lcs_sampler_sample_row(s, g_row, g_n_vocab, &token), LCS_STATUS_GRAMMAR);
    CHECK(token == -7);
    for (int32_t i = 0; i < g_n_vocab; ++i) {
        g_row[i] = -INFINITY;
    }
    g_row[token_of("b")] = 1;
    CHECK_STATUS(lcs_sampler_sample_row(twin, g_row, g_n_vocab, &token), LCS_STATUS_INTERNAL);
    CHECK(token == -7);
    lcs_sampler_free(twin);
    lcs_sampler_free(s);
}

static bool is_utf8(const char * text, int32_t n) {
    for (int32_t i = 0; i < n;) {
        const unsigned char c = (unsigned char) text[i];
        const int more = c < 0x80 ? 0 : c < 0xC2 ? -1 : c < 0xE0 ? 1 : c < 0xF0 ? 2 : c < 0xF5 ? 3 : -1;
        if (more < 0 || i + more >= n) {
            return false;
        }
        for (int j = 1; j <= more; ++j) {
            if (((unsigned char) text[i + j] & 0xC0) != 0x80) {
                return false;
            }
        }
        i += 1 + more;
    }
    return true;
}

/* A refusal costs one more draw, as in llama.cpp, and nothing else. */
static void test_choices_under_a_grammar_are_those_of_llama(void) {
    lcs_sampler_params p = defaults();
    p.grammar = "root ::= ([a-z ] | \", \" [^a-z])+";
    p.temperature = 1;
    p.penalty_last_n = 8;
    p.penalty_repeat = 1.2f;
    p.seed = 21;
    const int ks[] = {0, 1, 50};
    for (int k = 0; k < 3; ++k) {
        p.top_k = ks[k];
        lcs_sampler *          s = make(&p);
        lcs_sampler *          twin = make(&p);
        struct llama_sampler * chain = full_chain(&p);
        struct llama_sampler * grammar = llama_sampler_init_grammar(g_vocab, p.grammar, "root");
        llama_token_data *     data = malloc(sizeof *data * (size_t) g_n_vocab);
        int                    n_refused = 0;
        for (int i = 0; i < 8; ++i) {
            random_row();
            for (int32_t token = 0; token < g_n_vocab; ++token) {
                char piece[512];
                if (!is_utf8(piece, llama_token_to_piece(g_vocab, token, piece, sizeof piece, 0, true))) {
                    g_row[token] = -INFINITY; /* llama.cpp reads these as if nothing were missing */
                }
            }
            int32_t expected = -1;
            for (int with_grammar = 0; with_grammar < 2; ++with_grammar) {
                for (int32_t token = 0; token < g_n_vocab; ++token) {
                    data[token] = (llama_token_data) {token, g_row[token], 0};
                }
                llama_token_data_array array = {data, (size_t) g_n_vocab, -1, false};
                if (with_grammar == 1) {
                    llama_sampler_apply(grammar, &array);
                    ++n_refused;
                }
                llama_sampler_apply(chain, &array);
                expected = array.data[array.selected].id;
                llama_token_data       one = {expected, 1, 0};
                llama_token_data_array asked = {&one, 1, -1, false};
                llama_sampler_apply(grammar, &asked);
                if (one.logit != -INFINITY) {
                    break;
                }
            }
            CHECK(sample(s, g_row) == expected);
            CHECK(sample(twin, g_row) == expected);
            if (llama_vocab_is_eog(g_vocab, expected)) {
                break;
            }
            llama_sampler_accept(grammar, expected);
            llama_sampler_accept(chain, expected);
        }
        CHECK(n_refused > 0);
        free(data);
        llama_sampler_free(grammar);
        llama_sampler_free(chain);
        lcs_sampler_free(s);
        lcs_sampler_free(twin);
    }
}

static const char JSON[] =
    "root ::= object\nvalue ::= object | array | string | number | (\"true\" | \"false\" | \"null\") ws\n"
    "object ::= \"{\" ws ( string \":\" ws value (\",\" ws string \":\" ws value)* )? \"}\" ws\n"
    "array ::= \"[\" ws ( value (\",\" ws value)* )? \"]\" ws\n"
    "string ::= \"\\\"\" ( [^\"\\\\\\x7F\\x00-\\x1F] | \"\\\\\" ([\"\\\\bfnrt] | \"u\" [0-9a-fA-F]{4}) )* \"\\\"\" ws\n"
    "number ::= (\"-\"? ([0-9] | [1-9] [0-9]{0,15})) (\".\" [0-9]+)? ws\nws ::= | \" \" | \"\\n\" [ \\t]{0,20}\n";

/* Choices, and tokens asked one by one, against what llama.cpp allows of the whole vocabulary at each step. */
static void follow_grammar(const char * text, int n_steps, uint32_t seed) {
    lcs_sampler_params p = defaults();
    p.grammar = text;
    lcs_sampler *          s = make(&p);
    struct llama_sampler * oracle = llama_sampler_init_grammar(g_vocab, text, "root");
    llama_token_data *     data = malloc(sizeof *data * (size_t) g_n_vocab);
    bool *                 utf8 = malloc(sizeof *utf8 * (size_t) g_n_vocab);
    CHECK(oracle != NULL);
    for (int32_t token = 0; token < g_n_vocab; ++token) {
        char piece[512];
        utf8[token] = is_utf8(piece, llama_token_to_piece(g_vocab, token, piece, sizeof piece, 0, true));
    }
    g_random = seed;
    for (int step = 0; step < n_steps; ++step) {
        for (int32_t token = 0; token < g_n_vocab; ++token) {
            data[token] = (llama_token_data) {token, 1, 0};
        }
        llama_token_data_array array = {data, (size_t) g_n_vocab, -1, false};
        llama_sampler_apply(oracle, &array);
        int32_t token = -1;
        for (int round = 0; round < 4; ++round) {
            lcs_sampler * asked = NULL;
            int32_t       best = -1;
            random_row();
            for (int32_t i = 0; i < g_n_vocab; ++i) {
                /* llama.cpp reads what is not UTF-8 as if nothing were missing. */
                g_row[i] = utf8[i] ? g_row[i] : -INFINITY;
                if (utf8[i] && data[i].logit != -INFINITY && (best < 0 || g_row[i] > g_row[best])) {
                    best = i;
                }
            }
            CHECK(best >= 0);
            CHECK_OK(lcs_sampler_clone(s, &asked));
            token = sample(asked, g_row);
            CHECK(token == best);
            lcs_sampler_free(asked);
        }
        for (int i = 0; i < 60; ++i) {
            int32_t some = (int32_t) (random_bits() % (uint32_t) g_n_vocab);
            while (i % 2 == 0 && (data[some].logit == -INFINITY || !utf8[some])) {
                some = (some + 1) % g_n_vocab;
            }
            if (!utf8[some]) {
                continue;
            }
            lcs_sampler * asked = NULL;
            CHECK_OK(lcs_sampler_clone(s, &asked));
            CHECK_STATUS(lcs_sampler_accept(asked, some),
                         data[some].logit != -INFINITY ? LCS_STATUS_OK : LCS_STATUS_GRAMMAR);
            lcs_sampler_free(asked);
        }
        CHECK_OK(lcs_sampler_accept(s, token));
        if (llama_vocab_is_eog(g_vocab, token)) {
            break;
        }
        llama_sampler_accept(oracle, token);
    }
    llama_sampler_free(oracle);
    lcs_sampler_free(s);
    free(utf8);
    free(data);
}

static void test_a_grammar_allows_what_llama_allows(void) {
    for (uint32_t seed = 1; seed <= 2; ++seed) {
        follow_grammar(JSON, 10, seed);
        follow_grammar("root ::= ([a-z]+ [ ,.]){3,9} | \"\\\"\" [^\"]* \"\\\"\" | [\\u4e00-\\u9fff]+", 6, seed);
    }
}

/* A character that two tokens share: the second half is asked of the grammar together with the first. */
static void test_a_character_may_be_cut_between_tokens(void) {
    int32_t bytes[256];
    for (int i = 0; i < 256; ++i) {
        bytes[i] = -1;
    }
    for (int32_t token = 0; token < g_n_vocab; ++token) {
        char piece[512];
        if (llama_token_to_piece(g_vocab, token, piece, sizeof piece, 0, true) == 1) {
            bytes[(unsigned char) piece[0]] = token;
        }
    }
    const int32_t lead = bytes[0xC3];
    const int32_t a_umlaut = bytes[0xA4];
    const int32_t o_umlaut = bytes[0xB6];
    CHECK(lead >= 0 && a_umlaut >= 0 && o_umlaut >= 0);
    lcs_sampler_params p = defaults();
    p.grammar = "root ::= [^\\u00e4] \"!\"";
    lcs_sampler * s = make(&p);
    CHECK_STATUS(lcs_sampler_accept(s, a_umlaut), LCS_STATUS_GRAMMAR);
    CHECK_OK(lcs_sampler_accept(s, lead));
    CHECK_STATUS(lcs_sampler_accept(s, a_umlaut), LCS_STATUS_GRAMMAR);
    CHECK_STATUS(lcs_sampler_accept(s, token_of("!")), LCS_STATUS_GRAMMAR);
    random_row();
    g_row[a_umlaut] = 99;
    g_row[token_of("!")] = 98;
    g_row[o_umlaut] = 97;
    CHECK(sample(s, g_row) == o_umlaut);
    CHECK(sample(s, g_row) == token_of("!"));
    lcs_sampler_free(s);
    p.grammar = "root ::= [a-z\\u0400-\\u0410] \"!\"";
    s = make(&p);
    CHECK_STATUS(lcs_sampler_accept(s, lead), LCS_STATUS_GRAMMAR); /* nothing allowed begins so */
    lcs_sampler_free(s);
}

static void test_tokens_may_be_named_in_a_grammar(void) {
    lcs_sampler_params p = defaults();
    p.grammar = "root ::= <[1000]> !<[1001]> <|im_start|> \"x\"";
    lcs_sampler * s = make(&p);
    CHECK_STATUS(lcs_sampler_accept(s, 1001), LCS_STATUS_GRAMMAR);
    CHECK_OK(lcs_sampler_accept(s, 1000));
    CHECK_STATUS(lcs_sampler_accept(s, 1001), LCS_STATUS_GRAMMAR);
    random_row();
    g_row[1001] = 99;
    g_row[1002] = 98;
    CHECK(sample(s, g_row) == 1002);
    CHECK(sample(s, g_row) == token_of("<|im_start|>"));
    CHECK(sample(s, g_row) == token_of("x"));
    lcs_sampler_free(s);
}

static void accept_all(lcs_sampler * s, const char * text) {
    for (; *text != '\0'; ++text) {
        const char one[2] = {*text, '\0'};
        CHECK_OK(lcs_sampler_accept(s, token_of(one)));
    }
}

static void test_a_lazy_grammar_waits_for_its_trigger(void) {
    const char * const words[] = {"<call>"};
    const char * const pattern[] = {"never[0-9]", "say(\\s+x)"};
    const char * const whole[] = {"^\\s*go$"};
    const int32_t      tokens[] = {token_of("T"), token_of("S")};
    const int32_t      eos = llama_vocab_eos(g_vocab);
    lcs_sampler_params p = defaults();
    p.grammar = "root ::= \"<call>\" [0-9]+ \"!\"";
    p.grammar_lazy = true;
    p.trigger_patterns = words;
    p.n_trigger_patterns = 1;
    lcs_sampler * s = make(&p);
    accept_all(s, "anything <cal at all: <call>");
    CHECK_STATUS(lcs_sampler_accept(s, token_of("a")), LCS_STATUS_GRAMMAR);
    CHECK_STATUS(lcs_sampler_accept(s, eos), LCS_STATUS_GRAMMAR);
    accept_all(s, "42!");
    CHECK_OK(lcs_sampler_accept(s, eos));
    CHECK_OK(lcs_sampler_reset(s));
    CHECK_OK(lcs_sampler_accept(s, eos)); /* before the trigger all is free */
    accept_all(s, "x<call");
    lcs_sampler * clone = NULL;
    CHECK_OK(lcs_sampler_clone(s, &clone));
    accept_all(clone, ">7");
    accept_all(s, "<call>8!");
    lcs_sampler_free(clone);
    lcs_sampler_free(s);

    p.grammar = "root ::= \" x\" \"y\"";
    p.trigger_patterns = pattern;
    p.n_trigger_patterns = 2;
    s = make(&p);
    accept_all(s, "I say x"); /* the grammar begins at the group */
    CHECK_STATUS(lcs_sampler_accept(s, token_of("x")), LCS_STATUS_GRAMMAR);
    accept_all(s, "y");
    /* What triggers must itself fit: two spaces do not, and the sampler is as it was. */
    CHECK_OK(lcs_sampler_reset(s));
    accept_all(s, "say  ");
    CHECK_STATUS(lcs_sampler_accept(s, token_of("x")), LCS_STATUS_GRAMMAR);
    accept_all(s, "z say xy");
    /* Though it be the likeliest, the next one is chosen. */
    CHECK_OK(lcs_sampler_reset(s));
    accept_all(s, "say  ");
    random_row();
    g_row[token_of("x")] = 99;
    g_row[token_of("w")] = 98;
    CHECK(sample(s, g_row) == token_of("w"));
    lcs_sampler_free(s);

    p.grammar = "root ::= \"  go\" \"!\"";
    p.trigger_patterns = whole;
    p.n_trigger_patterns = 1;
    s = make(&p);
    accept_all(s, "  go");
    CHECK_STATUS(lcs_sampler_accept(s, token_of("g")), LCS_STATUS_GRAMMAR);
    accept_all(s, "!");
    CHECK_OK(lcs_sampler_reset(s));
    accept_all(s, "no go");
    CHECK_OK(lcs_sampler_accept(s, token_of("g")));
    lcs_sampler_free(s);

    p.grammar = "root ::= [TS] \"1\"";
    p.trigger_patterns = NULL;
    p.n_trigger_patterns = 0;
    p.trigger_tokens = tokens;
    p.n_trigger_tokens = 2;
    s = make(&p);
    accept_all(s, "abcT1");
    CHECK_STATUS(lcs_sampler_accept(s, token_of("1")), LCS_STATUS_GRAMMAR);
    lcs_sampler_free(s);

    /* Patterns that are none, or too much. */
    char * long_pattern = malloc(5001);
    memset(long_pattern, 'a', 5000);
    long_pattern[5000] = '\0';
    char nested[140];
    memset(nested, '(', 65);
    nested[65] = 'a';
    memset(nested + 66, ')', 65);
    nested[131] = '\0';
    const char * const bad[] = {"(", "[a", "a{2,1}", "*", "", "(a)\\1", "(a{100}){100}", long_pattern, nested, "x\\"};
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; ++i) {
        p.trigger_patterns = &bad[i];
        p.n_trigger_patterns = 1;
        clone = NULL;
        CHECK_STATUS(lcs_sampler_init(g_model, &p, &clone), LCS_STATUS_GRAMMAR);
        CHECK(clone == NULL);
    }
    free(long_pattern);
}

/* A long answer before a tool call: an executor that recurses once a character would end the process. */
static void test_a_lazy_grammar_survives_a_long_output(void) {
    const char * const patterns[] = {"(?:^|<s>)( to=[^<]*?<m>)", "^(?:a|[^a])*?(<call>)$"};
    lcs_sampler_params p = defaults();
    p.grammar = "root ::= \"<call>\" [0-9]+";
    p.grammar_lazy = true;
    p.trigger_patterns = patterns;
    p.n_trigger_patterns = 2;
    lcs_sampler * s = make(&p);
    int32_t       longest = 0;
    int32_t       n_longest = 0;
    char          piece[1024];
    for (int32_t token = 0; token < g_n_vocab; ++token) {
        const int32_t n = llama_token_to_piece(g_vocab, token, piece, sizeof piece, 0, true);
        if (n > n_longest) {
            longest = token;
            n_longest = n;
        }
    }
    for (int32_t n = 0; n < 40000; n += n_longest) {
        CHECK_OK(lcs_sampler_accept(s, longest));
    }
    accept_all(s, "<call>1");
    CHECK_STATUS(lcs_sampler_accept(s, token_of("a")), LCS_STATUS_GRAMMAR);
    lcs_sampler_free(s);
}

static void test_each_failing_step_is_clean(void) {
    static const char * const breakers[] = {"\n"};
    const char * const        patterns[] = {"x(y)"};
    lcs_sampler_params        p = defaults();
    p.temperature = 1;
    p.seed = 5;
    p.top_n_sigma = 2;
    p.typical_p = 0.9f;
    p.top_p = 0.9f;
    p.min_p = 0.01f;
    p.dynatemp_range = 0.1f;
    p.penalty_last_n = 8;
    p.penalty_repeat = 1.1f;
    p.dry_multiplier = 1;
    p.dry_penalty_last_n = 8;
    p.dry_breakers = breakers;
    p.n_dry_breakers = 1;
    p.grammar = JSON;
    p.trigger_patterns = patterns;
    p.n_trigger_patterns = 1;
    lcs_live_counts before;
    lcs_live_counts after;
    lcs_live(&before);
    int n_faults = 0;
    for (int lazy = 0; lazy <= 1; ++lazy) {
        p.grammar_lazy = lazy == 1;
        lcs_sampler * s = NULL;
        for (int n = 1;; ++n) {
            lcs_fault_arm(n);
            const lcs_status status = lcs_sampler_init(g_model, &p, &s);
            const bool       fired = lcs_fault_fired();
            lcs_fault_arm(0);
            if (!fired) {
                CHECK(status == LCS_STATUS_OK);
                break;
            }
            ++n_faults;
            CHECK(status == LCS_STATUS_NOMEM && s == NULL);
            lcs_live(&after);
            CHECK(after.samplers == before.samplers);
        }
        lcs_sampler * twin = make(&p);
        const int32_t next = token_of(lazy ? "a" : "{");
        for (int what = 0; what < 4; ++what) {
            for (int n = 1;; ++n) {
                lcs_sampler * clone = NULL;
                int32_t       token = -7;
                random_row();
                lcs_fault_arm(n);
                const lcs_status status = what == 0   ? lcs_sampler_clone(s, &clone)
                                          : what == 1 ? lcs_sampler_accept(s, next)
                                          : what == 2 ? lcs_sampler_sample_row(s, g_row, g_n_vocab, &token)
                                                      : lcs_sampler_reset(s);
                const bool fired = lcs_fault_fired();
                lcs_fault_arm(0);
                CHECK(status == (fired ? LCS_STATUS_NOMEM : LCS_STATUS_OK));
                if (fired) {
                    ++n_faults;
                    CHECK(clone == NULL && token == -7);
                    continue;
                }
                /* The failures before have left no trace: a sampler that had none goes on alike. */
                if (what == 1) {
                    CHECK_OK(lcs_sampler_accept(twin, next));
                } else if (what == 2) {
                    CHECK(sample(twin, g_row) == token);
                } else if (what == 3) {
                    CHECK_OK(lcs_sampler_reset(twin));
                    CHECK(sample(twin, g_row) == sample(s, g_row));
                }
                lcs_sampler_free(clone);
                break;
            }
        }
        lcs_sampler_free(twin);
        lcs_sampler_free(s);
    }
    CHECK(n_faults > 20);
    lcs_live(&after);
    CHECK(after.samplers == before.samplers);
}

static void test_a_context_row_is_sampled_as_that_row(const char * other_path) {
    lcs_context_params cp;
    lcs_context *      ctx = NULL;
    lcs_context_params_init(&cp);
    cp.n_ctx = 256;
    cp.n_threads = 1;
    CHECK_OK(lcs_context_init(g_model, &cp, &ctx));
    lcs_sampler_params p = defaults();
    lcs_sampler *      s = make(&p);
    int32_t            token = -7;
    CHECK_STATUS(lcs_sampler_sample(s, ctx, -1, &token), LCS_STATUS_RANGE);
    const int32_t prompt[3] = {10, 20, 30};
    CHECK_OK(lcs_context_decode(ctx, prompt, 3, 0, -1, LCS_LOGITS_LAST, NULL, NULL));
    CHECK_STATUS(lcs_sampler_sample(s, ctx, 0, &token), LCS_STATUS_RANGE);
    CHECK_STATUS(lcs_sampler_sample(s, ctx, -1, NULL), LCS_STATUS_ARG);
    CHECK_STATUS(lcs_sampler_sample(NULL, ctx, -1, &token), LCS_STATUS_ARG);
    CHECK(token == -7);
    const float * row = NULL;
    CHECK_OK(lcs_context_logits(ctx, -1, &row));
    CHECK_OK(lcs_sampler_sample(s, ctx, -1, &token));
    CHECK(token == naive_argmax(row, g_n_vocab));
    lcs_sampler_free(s);

    lcs_model *   other = load_model(other_path);
    lcs_sampler * foreign = NULL;
    CHECK_OK(lcs_sampler_init(other, &p, &foreign));
    lcs_model_free(other);
    CHECK_STATUS(lcs_sampler_sample(foreign, ctx, -1, &token), LCS_STATUS_RANGE);
    lcs_context_free(ctx);
    lcs_sampler_free(foreign);
}

static void test_a_sampler_outlives_its_model_and_suppresses_its_tokens(const char * path, const char * out) {
    const struct gguf_init_params gp = {.no_alloc = true, .ctx = NULL};
    struct gguf_context *         from = gguf_init_from_file(path, gp);
    struct gguf_context *         to = gguf_init_empty();
    const int32_t                 suppressed[2] = {77, 78};
    CHECK(from != NULL && to != NULL);
    gguf_set_kv(to, from);
    gguf_set_arr_data(to, "tokenizer.ggml.suppress_tokens", GGUF_TYPE_INT32, suppressed, 2);
    CHECK(gguf_write_to_file(to, out, true));
    gguf_free(from);
    gguf_free(to);

    lcs_model_params mp;
    lcs_model *      model = NULL;
    lcs_model_params_init(&mp);
    mp.vocab_only = true;
    CHECK_OK(lcs_model_load(out, &mp, &model));
    lcs_sampler_params p = defaults();
    lcs_sampler *      s = NULL;
    CHECK_OK(lcs_sampler_init(model, &p, &s));
    lcs_model_free(model);
    random_row();
    g_row[77] = 50;
    g_row[78] = 49;
    g_row[79] = 48;
    CHECK(sample(s, g_row) == 79);
    lcs_sampler_free(s);
    remove(out);
}

static void test_a_forked_child_cannot_use_it(void) {
    lcs_sampler_params p = defaults();
    lcs_sampler *      s = make(&p);
    const pid_t        child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        int32_t       token = 0;
        uint32_t      seed = 0;
        lcs_sampler * clone = NULL;
        bool          good = lcs_sampler_sample_row(s, g_row, g_n_vocab, &token) == LCS_STATUS_FORKED;
        good = good && lcs_sampler_accept(s, 1) == LCS_STATUS_FORKED;
        good = good && lcs_sampler_clone(s, &clone) == LCS_STATUS_FORKED;
        good = good && lcs_sampler_reset(s) == LCS_STATUS_FORKED;
        good = good && lcs_sampler_seed(s, &seed) == LCS_STATUS_FORKED;
        good = good && lcs_sampler_init(g_model, &p, &clone) == LCS_STATUS_FORKED;
        lcs_sampler_free(s);
        _exit(good ? 0 : 1);
    }
    int status = 0;
    CHECK(waitpid(child, &status, 0) == child);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    lcs_sampler_free(s);
}

int main(int argc, char ** argv) {
    const char * path = fixture(argc, argv, "tiny-llama.gguf");
    g_model = load_model(path);
    struct llama_model_params mp = llama_model_default_params();
    mp.vocab_only = true;
    struct llama_model * llama = llama_model_load_from_file(path, mp);
    CHECK(llama != NULL);
    g_vocab = llama_model_get_vocab(llama);
    g_n_vocab = llama_vocab_n_tokens(g_vocab);
    g_row = malloc(sizeof(float) * (size_t) g_n_vocab);

    test_argmax_is_the_first_of_the_largest_and_never_a_nan();
    test_greedy_is_the_most_likely_token();
    test_every_option_chooses_as_the_full_chain_of_llama();
    test_ties_go_to_the_lower_token();
    test_a_top_k_of_the_whole_vocabulary_cuts_nothing();
    test_a_temperature_next_to_nothing_is_greedy();
    test_typical_sampling_is_right_where_most_tokens_are_impossible();
    test_seeds_decide_and_reset_begins_again();
    test_saved_draws_go_on_in_another_sampler();
    test_accept_tells_the_history();
    test_rows_that_allow_nothing_are_refused_and_draw_nothing();
    test_values_outside_their_range_are_refused();
    test_grammars_that_are_none_are_refused_with_their_place();
    test_a_grammar_begins_behind_its_prefix_also_after_a_reset();
    test_a_repetition_ends_at_its_count();
    test_a_grammar_ends_where_it_may_and_a_refused_token_changes_nothing();
    test_choices_under_a_grammar_are_those_of_llama();
    test_a_grammar_allows_what_llama_allows();
    test_a_character_may_be_cut_between_tokens();
    test_tokens_may_be_named_in_a_grammar();
    test_a_lazy_grammar_waits_for_its_trigger();
    test_a_lazy_grammar_survives_a_long_output();
    test_each_failing_step_is_clean();
    test_a_context_row_is_sampled_as_that_row(fixture(argc, argv, "tiny-spm.gguf"));
    test_a_sampler_outlives_its_model_and_suppresses_its_tokens(path, fixture(argc, argv, "sampler-test.gguf"));
    test_a_forked_child_cannot_use_it();

    free(g_row);
    llama_model_free(llama);
    lcs_model_free(g_model);
    check_nothing_alive();
    return 0;
}
