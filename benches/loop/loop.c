/* Decodes and samples greedily, one token at a time. Prints the nanoseconds a token of each round, then the tokens of
 * the last: a line of numbers each. Arguments: model, n_tokens, n_rounds, n_threads. */
#include <lcs.h>

#include <stdio.h>
#include <stdlib.h>
#include <time.h>

static void must(lcs_status status) {
    if (status != LCS_STATUS_OK) {
        lcs_error_info error;
        lcs_last_error(&error);
        fprintf(stderr, "%s: %s\n", lcs_status_name(status), error.message);
        exit(1);
    }
}

static double now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return 1e9 * (double) t.tv_sec + (double) t.tv_nsec;
}

int main(int argc, char ** argv) {
    if (argc != 5) {
        fprintf(stderr, "usage: loop MODEL N_TOKENS N_ROUNDS N_THREADS\n");
        return 2;
    }
    const int n_tokens = atoi(argv[2]);
    const int n_rounds = atoi(argv[3]);
    int32_t * tokens = malloc((size_t) n_tokens * sizeof(int32_t));
    if (tokens == NULL) {
        return 1;
    }

    lcs_model_params   model_params;
    lcs_context_params context_params;
    lcs_sampler_params sampler_params;
    lcs_model *        model = NULL;
    lcs_context *      ctx = NULL;
    lcs_sampler *      sampler = NULL;
    lcs_model_params_init(&model_params);
    lcs_context_params_init(&context_params);
    lcs_sampler_params_init(&sampler_params);
    context_params.n_ctx = (uint32_t) n_tokens + 1;
    context_params.n_threads = atoi(argv[4]);
    must(lcs_model_load(argv[1], &model_params, &model));
    must(lcs_context_init(model, &context_params, &ctx));
    must(lcs_sampler_init(model, &sampler_params, &sampler));

    for (int round = 0; round < n_rounds; ++round) {
        int32_t token = 1;
        must(lcs_context_clear(ctx, false));
        const double begin = now_ns();
        for (int i = 0; i < n_tokens; ++i) {
            lcs_decode_result result;
            must(lcs_context_decode(ctx, &token, 1, 0, -1, LCS_LOGITS_LAST, NULL, &result));
            must(lcs_sampler_sample(sampler, ctx, -1, &token));
            tokens[i] = token;
        }
        printf("%.1f ", (now_ns() - begin) / n_tokens);
    }
    printf("\n");
    for (int i = 0; i < n_tokens; ++i) {
        printf("%d ", tokens[i]);
    }
    printf("\n");
    lcs_sampler_free(sampler);
    lcs_context_free(ctx);
    lcs_model_free(model);
    free(tokens);
    return 0;
}
