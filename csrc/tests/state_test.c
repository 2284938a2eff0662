/* State blobs: exact round trips for every memory kind, and refusal of everything else. */
#include "check.h"

enum { HEADER = 136 };

typedef struct options {
    uint32_t n_ctx;
    uint32_t n_seq_max;
    int32_t  type;
    bool     swa_full;
    float    rope_freq_base;
} options;

static lcs_context * make(lcs_model * model, options o) {
    lcs_context_params p;
    lcs_context *      ctx = NULL;
    lcs_context_params_init(&p);
    p.n_ctx = o.n_ctx;
    p.n_batch = 64;
    p.n_ubatch = 16;
    p.n_seq_max = o.n_seq_max;
    p.n_threads = 1;
    p.type_k = o.type;
    p.type_v = o.type;
    p.flash_attn = o.type == LCS_TYPE_F16 ? LCS_FLASH_ATTN_OFF : LCS_FLASH_ATTN_ON;
    p.swa_full = o.swa_full;
    p.rope_freq_base = o.rope_freq_base;
    CHECK_OK(lcs_context_init(model, &p, &ctx));
    return ctx;
}

static void feed(lcs_context * ctx, int32_t seq_id, int32_t from, int32_t to) {
    int32_t tokens[512];
    for (int32_t i = from; i < to; ++i) {
        tokens[i - from] = (i * 53 + 7) % 900 + 5;
    }
    CHECK_OK(lcs_context_decode(ctx, tokens, to - from, seq_id, -1, LCS_LOGITS_LAST, NULL, NULL));
}

typedef struct blob {
    unsigned char * data;
    size_t          n;
} blob;

static blob save(lcs_context * ctx, int32_t seq_id, bool partial) {
    blob   b = {NULL, 0};
    size_t needed = 0;
    CHECK_OK(lcs_state_bytes(ctx, seq_id, partial, &needed));
    CHECK_STATUS(lcs_state_save(ctx, seq_id, partial, NULL, 0, &b.n), LCS_STATUS_BUFFER);
    CHECK(b.n == needed);
    b.data = malloc(b.n);
    CHECK_STATUS(lcs_state_save(ctx, seq_id, partial, b.data, b.n - 1, &needed), LCS_STATUS_BUFFER);
    CHECK_OK(lcs_state_save(ctx, seq_id, partial, b.data, b.n, &needed));
    CHECK(needed == b.n);
    return b;
}

/* bitwise: false where a windowed cache places cells anew. */
static void test_a_restored_sequence_goes_on_as_if_it_had_never_left(lcs_model * model, options o, bool bitwise) {
    const int32_t n_vocab = n_vocab_of(model);
    const int32_t lengths[] = {1, 15, 16, 17, 100, 400}; /* 400: past the 256 cells of a window */
    for (size_t i = 0; i < sizeof lengths / sizeof lengths[0]; ++i) {
        const int32_t n = lengths[i];
        lcs_context * straight = make(model, o);
        lcs_context * other = make(model, o);
        feed(straight, 0, 0, n);
        const blob taken = save(straight, 0, false);
        feed(straight, 0, n, n + 5);
        feed(other, o.n_seq_max - 1, 300, 340); /* what was there is dropped */
        CHECK_OK(lcs_state_load(other, (int32_t) o.n_seq_max - 1, false, taken.data, taken.n));
        CHECK(pos_max(other, (int32_t) o.n_seq_max - 1) == n - 1);
        const float * row = NULL;
        CHECK_STATUS(lcs_context_logits(other, -1, &row), LCS_STATUS_RANGE); /* logits are not part of a state */
        feed(other, (int32_t) o.n_seq_max - 1, n, n + 5);
        if (bitwise) {
            check_same_logits(straight, other, n_vocab);
        } else {
            const float * x = NULL;
            const float * y = NULL;
            CHECK_OK(lcs_context_logits(straight, -1, &x));
            CHECK_OK(lcs_context_logits(other, -1, &y));
            CHECK(lcs_argmax(x, n_vocab) == lcs_argmax(y, n_vocab));
        }
        free(taken.data);
        lcs_context_free(straight);
        lcs_context_free(other);
    }
}

static void test_a_whole_context_round_trip(lcs_model * model, options o) {
    const int32_t n_vocab = n_vocab_of(model);
    lcs_context * a = make(model, o);
    lcs_context * b = make(model, o);
    feed(a, 0, 0, 20);
    feed(a, 1, 50, 61);
    const blob taken = save(a, -1, false);
    feed(b, 0, 100, 110);
    CHECK_OK(lcs_state_load(b, -1, false, taken.data, taken.n));
    CHECK(pos_max(b, 0) == 19 && pos_max(b, 1) == 10);
    for (int32_t s = 0; s < 2; ++s) {
        feed(a, s, 200, 204);
        feed(b, s, 200, 204);
        check_same_logits(a, b, n_vocab);
    }
    free(taken.data);
    lcs_context_free(a);
    lcs_context_free(b);
}

static void test_a_checkpoint_brings_back_what_cannot_be_cut(
        lcs_model * model, options o, bool bitwise, bool resident_needed) {
    const int32_t n_vocab = n_vocab_of(model);
    lcs_context * ctx = make(model, o);
    lcs_context * cold = make(model, o);
    bool          removed = false;
    feed(ctx, 0, 0, 64);
    const blob partial = save(ctx, 0, true);
    const blob whole = save(ctx, 0, false);
    CHECK(partial.n <= whole.n);
    feed(ctx, 0, 64, 400);
    CHECK_OK(lcs_state_load(ctx, 0, true, partial.data, partial.n));
    CHECK(pos_max(ctx, 0) == 63);
    CHECK_OK(lcs_context_seq_rm(ctx, 0, 64, -1, &removed)); /* nothing is left there */
    CHECK(removed && pos_max(ctx, 0) == 63);
    feed(ctx, 0, 500, 510);
    feed(cold, 0, 0, 64);
    feed(cold, 0, 500, 510);
    if (bitwise) {
        check_same_logits(ctx, cold, n_vocab);
    }
    /* Of use only while the rest is resident: judged before anything changes. */
    lcs_context * empty = make(model, o);
    if (resident_needed) {
        CHECK_STATUS(lcs_state_load(empty, 0, true, partial.data, partial.n), LCS_STATUS_STATE_MISMATCH);
        feed(empty, 0, 0, 63);
        CHECK_STATUS(lcs_state_load(empty, 0, true, partial.data, partial.n), LCS_STATUS_STATE_MISMATCH);
        CHECK(pos_max(empty, 0) == 62);
    }
    lcs_context_free(empty);
    /* The flag is part of what a blob is. */
    CHECK_STATUS(lcs_state_load(ctx, 0, false, partial.data, partial.n), LCS_STATUS_STATE_MISMATCH);
    CHECK_STATUS(lcs_state_load(ctx, 0, true, whole.data, whole.n), LCS_STATUS_STATE_MISMATCH);
    free(partial.data);
    free(whole.data);
    lcs_context_free(ctx);
    lcs_context_free(cold);
}

static void refused(lcs_context * ctx, int32_t seq_id, const blob * b, lcs_status status, const char * field) {
    lcs_error_info info;
    CHECK_STATUS(lcs_state_load(ctx, seq_id, false, b->data, b->n), status);
    lcs_last_error(&info);
    if (strcmp(info.field, field) != 0) {
        fprintf(stderr, "field \"%s\", expected \"%s\"\n", info.field, field);
        exit(1);
    }
}

static void test_damage_is_found_before_llama_sees_it(lcs_model * model, options o) {
    lcs_context * ctx = make(model, o);
    feed(ctx, 0, 0, 20);
    blob           taken = save(ctx, 0, false);
    const size_t   n = taken.n;
    unsigned int   seed = 1;
    feed(ctx, 0, 20, 25);
    for (size_t cut = 0; cut < n; cut += cut < HEADER + 64 ? 1 : n / 50) {
        taken.n = cut;
        refused(ctx, 0, &taken, LCS_STATUS_STATE_CORRUPT, "");
    }
    taken.n = n;
    for (int i = 0; i < 4000; ++i) {
        seed = seed * 1103515245u + 12345u;
        const size_t        at = i < HEADER ? (size_t) i : (seed >> 4) % n;
        const unsigned char flip = (unsigned char) (1u << (seed >> 28) % 8);
        taken.data[at] ^= flip;
        refused(ctx, 0, &taken, LCS_STATUS_STATE_CORRUPT, "");
        taken.data[at] ^= flip;
    }
    CHECK(pos_max(ctx, 0) == 24); /* nothing was lost */
    CHECK_OK(lcs_state_load(ctx, 0, false, taken.data, n));
    CHECK(pos_max(ctx, 0) == 19);
    CHECK_STATUS(lcs_state_load(ctx, 0, false, NULL, 10), LCS_STATUS_ARG);
    CHECK_STATUS(lcs_state_load(ctx, 0, false, NULL, 0), LCS_STATUS_STATE_CORRUPT);
    free(taken.data);
    lcs_context_free(ctx);
}

static void test_foreign_states_are_refused_by_name(lcs_model * llama, lcs_model * spm) {
    const options base = {512, 2, LCS_TYPE_F16, false, 0};
    lcs_context * ctx = make(llama, base);
    feed(ctx, 0, 0, 20);
    const blob seq = save(ctx, 0, false);
    const blob whole = save(ctx, -1, false);
    refused(ctx, -1, &seq, LCS_STATUS_STATE_MISMATCH, "kind");
    refused(ctx, 0, &whole, LCS_STATUS_STATE_MISMATCH, "kind");
    CHECK_STATUS(lcs_state_load(ctx, -1, true, whole.data, whole.n), LCS_STATUS_ARG);
    CHECK_STATUS(lcs_state_load(ctx, 2, false, seq.data, seq.n), LCS_STATUS_RANGE);
    CHECK_STATUS(lcs_state_load(ctx, -2, false, seq.data, seq.n), LCS_STATUS_RANGE);
    CHECK(pos_max(ctx, 0) == 19);

    options o = base;
    o.type = LCS_TYPE_Q8_0;
    lcs_context * quantised = make(llama, o);
    refused(quantised, 0, &seq, LCS_STATUS_STATE_MISMATCH, "type_k");
    o = base;
    o.rope_freq_base = 12345;
    lcs_context * rope = make(llama, o);
    refused(rope, 0, &seq, LCS_STATUS_STATE_MISMATCH, "rope_freq_base");
    o = base;
    o.n_seq_max = 1;
    o.n_ctx = 256;
    lcs_context * streams = make(llama, o);
    refused(streams, 0, &seq, LCS_STATUS_STATE_MISMATCH, "n_stream");
    lcs_context * other = make(spm, base);
    refused(other, 0, &seq, LCS_STATUS_STATE_MISMATCH, "model");

    /* A state of more cells than the destination has. */
    o = base;
    o.n_ctx = 1024;
    lcs_context * large = make(llama, o);
    feed(large, 0, 0, 300);
    const blob big = save(large, 0, false);
    refused(ctx, 1, &big, LCS_STATUS_NO_KV_SLOT, "n_cells");
    CHECK(pos_max(ctx, 1) == -1 && pos_max(ctx, 0) == 19);
    /* Another context size is fine. */
    CHECK_OK(lcs_state_load(large, 1, false, seq.data, seq.n));
    CHECK(pos_max(large, 1) == 19);

    free(seq.data);
    free(whole.data);
    free(big.data);
    lcs_context_free(ctx);
    lcs_context_free(quantised);
    lcs_context_free(rope);
    lcs_context_free(streams);
    lcs_context_free(other);
    lcs_context_free(large);
}

static void test_an_empty_sequence_is_a_state_too(lcs_model * model) {
    lcs_context * ctx = make(model, (options){512, 2, LCS_TYPE_F16, false, 0});
    const blob    empty = save(ctx, 0, false);
    feed(ctx, 1, 0, 10);
    CHECK_OK(lcs_state_load(ctx, 1, false, empty.data, empty.n));
    CHECK(pos_max(ctx, 1) == -1);
    free(empty.data);
    lcs_context_free(ctx);
}

static void test_a_copied_stream_is_saved_as_copied(lcs_model * model) {
    const int32_t n_vocab = n_vocab_of(model);
    const options o = {512, 2, LCS_TYPE_F16, false, 0};
    lcs_context * ctx = make(model, o);
    lcs_context * other = make(model, o);
    feed(ctx, 0, 0, 20);
    feed(ctx, 1, 100, 120); /* what a save before the deferred copy would read */
    CHECK_OK(lcs_context_seq_cp(ctx, 0, 1, 0, -1));
    const blob taken = save(ctx, 1, false);
    CHECK_OK(lcs_state_load(other, 0, false, taken.data, taken.n));
    feed(ctx, 0, 20, 25);
    feed(other, 0, 20, 25);
    check_same_logits(ctx, other, n_vocab);
    free(taken.data);
    lcs_context_free(ctx);
    lcs_context_free(other);
}

static void test_each_failing_step_is_clean(lcs_model * model) {
    lcs_context * ctx = make(model, (options){512, 2, LCS_TYPE_F16, false, 0});
    feed(ctx, 0, 0, 20);
    const blob taken = save(ctx, 0, false);
    for (int64_t n = 1;; ++n) {
        size_t written = 0;
        feed(ctx, 1, 50, 60);
        lcs_fault_arm(n);
        const lcs_status saved = lcs_state_save(ctx, 0, false, taken.data, taken.n, &written);
        const lcs_status loaded = saved ? saved : lcs_state_load(ctx, 1, false, taken.data, taken.n);
        const bool       fired = lcs_fault_fired();
        lcs_fault_arm(0);
        CHECK(loaded == (fired ? LCS_STATUS_NOMEM : LCS_STATUS_OK));
        CHECK(pos_max(ctx, 0) == 19);
        if (!fired) {
            CHECK(n > 2 && pos_max(ctx, 1) == 19);
            break;
        }
        CHECK(pos_max(ctx, 1) == (saved ? 10 * (int32_t) n - 1 : -1)); /* untouched, or empty and told so */
        CHECK_OK(lcs_state_save(ctx, 0, false, taken.data, taken.n, &written));
    }
    free(taken.data);
    lcs_context_free(ctx);
}

static void test_arguments_are_judged(lcs_model * model) {
    lcs_context * ctx = make(model, (options){512, 2, LCS_TYPE_F16, false, 0});
    char          buf[8];
    size_t        n = 0;
    CHECK_STATUS(lcs_state_bytes(NULL, 0, false, &n), LCS_STATUS_ARG);
    CHECK_STATUS(lcs_state_bytes(ctx, 0, false, NULL), LCS_STATUS_ARG);
    CHECK_STATUS(lcs_state_bytes(ctx, 2, false, &n), LCS_STATUS_RANGE);
    CHECK_STATUS(lcs_state_bytes(ctx, -2, false, &n), LCS_STATUS_RANGE);
    CHECK_STATUS(lcs_state_bytes(ctx, 256, false, &n), LCS_STATUS_RANGE);
    CHECK_STATUS(lcs_state_bytes(ctx, -1, true, &n), LCS_STATUS_ARG);
    CHECK_STATUS(lcs_state_save(NULL, 0, false, buf, 8, &n), LCS_STATUS_ARG);
    CHECK_STATUS(lcs_state_save(ctx, 0, false, buf, 8, NULL), LCS_STATUS_ARG);
    CHECK_STATUS(lcs_state_save(ctx, 0, false, buf, 8, &n), LCS_STATUS_BUFFER);
    CHECK_STATUS(lcs_state_save(ctx, 0, false, NULL, SIZE_MAX, &n), LCS_STATUS_ARG);
    CHECK_STATUS(lcs_state_load(NULL, 0, false, buf, 8), LCS_STATUS_ARG);
    CHECK(lcs_hash("abc", 3) == 0x78af5f94892f3950ull); /* XXH3-64 of "abc", seed 0 */
    CHECK(lcs_hash(NULL, 0) == lcs_hash("", 0));
    lcs_context_free(ctx);
}

int main(int argc, char ** argv) {
    lcs_model *   llama = load_model(fixture(argc, argv, "tiny-llama.gguf"));
    lcs_model *   spm = load_model(fixture(argc, argv, "tiny-spm.gguf"));
    lcs_model *   swa = load_model(fixture(argc, argv, "tiny-swa.gguf"));
    lcs_model *   mamba = load_model(fixture(argc, argv, "tiny-mamba.gguf"));
    lcs_model *   hybrid = load_model(fixture(argc, argv, "tiny-hybrid.gguf"));
    const options two = {1024, 2, LCS_TYPE_F16, false, 0};
    const options q8 = {1024, 2, LCS_TYPE_Q8_0, false, 0};
    const options full = {1024, 2, LCS_TYPE_F16, true, 0};
    test_arguments_are_judged(llama);
    test_a_restored_sequence_goes_on_as_if_it_had_never_left(llama, two, true);
    test_a_restored_sequence_goes_on_as_if_it_had_never_left(llama, q8, true);
    test_a_restored_sequence_goes_on_as_if_it_had_never_left(swa, two, false);
    test_a_restored_sequence_goes_on_as_if_it_had_never_left(swa, full, false);
    test_a_restored_sequence_goes_on_as_if_it_had_never_left(mamba, two, true);
    test_a_restored_sequence_goes_on_as_if_it_had_never_left(hybrid, two, true);
    test_a_whole_context_round_trip(llama, two);
    test_a_whole_context_round_trip(mamba, two);
    test_a_whole_context_round_trip(hybrid, two);
    test_a_checkpoint_brings_back_what_cannot_be_cut(mamba, two, true, false);
    test_a_checkpoint_brings_back_what_cannot_be_cut(hybrid, two, true, true);
    test_a_checkpoint_brings_back_what_cannot_be_cut(swa, two, false, true);
    test_damage_is_found_before_llama_sees_it(llama, (options){512, 2, LCS_TYPE_F16, false, 0});
    test_damage_is_found_before_llama_sees_it(mamba, (options){512, 2, LCS_TYPE_F16, false, 0});
    test_foreign_states_are_refused_by_name(llama, spm);
    test_an_empty_sequence_is_a_state_too(llama);
    test_a_copied_stream_is_saved_as_copied(llama);
    test_each_failing_step_is_clean(llama);
    lcs_model_free(llama);
    lcs_model_free(spm);
    lcs_model_free(swa);
    lcs_model_free(mamba);
    lcs_model_free(hybrid);
    check_nothing_alive();
    return 0;
}
