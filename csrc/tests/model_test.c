/* Models: the load with its parameters, what a model says of itself, and every file that must be refused with a reason
 * instead of ending the process. Oracles: the numbers in tests/tiny.py, and the same model loaded another way. */
#include "damage.h"

#include <math.h>

static lcs_model_info info_of(const lcs_model * model) {
    lcs_model_info info;
    CHECK_OK(lcs_model_get_info(model, &info));
    return info;
}

static lcs_model * load_with(const char * path, lcs_model_params params) {
    lcs_model * model = NULL;
    CHECK_OK(lcs_model_load(path, &params, &model));
    return model;
}

static lcs_model_params defaults(void) {
    lcs_model_params params;
    lcs_model_params_init(&params);
    return params;
}

/* The refusal, whose message must hold this text. */
static void check_refused(const char * path, const char * expected) {
    lcs_model *    model = NULL;
    lcs_header *   header = NULL;
    lcs_error_info error;
    const lcs_status status = lcs_model_load(path, NULL, &model);
    lcs_last_error(&error);
    if (status != LCS_STATUS_LOAD || model != NULL || strstr(error.message, expected) == NULL) {
        fprintf(stderr, "%s: %s \"%s\", expected LOAD with \"%s\"\n", path, lcs_status_name(status), error.message,
                expected);
        exit(1);
    }
    CHECK(strchr(error.message, '\n') == NULL);

    /* The header alone is judged by the same reader; of what llama.cpp refuses, only the vocabulary is not looked at. */
    char message[256];
    snprintf(message, sizeof message, "%s", error.message);
    const lcs_status alone = lcs_header_read(path, NULL, &header);
    if (alone == LCS_STATUS_LOAD) {
        lcs_last_error(&error);
        CHECK(strncmp(error.message, message, sizeof message - 1) == 0);
    } else {
        CHECK(alone == LCS_STATUS_OK);
    }
    lcs_header_free(header);
}

static void check_refused_bytes(bytes b, const char * expected) {
    check_refused(write_header("damaged.gguf", b), expected);
    free(b.data);
}

static void test_a_model_says_what_it_is(int argc, char ** argv) {
    static const struct {
        const char * file;
        const char * architecture;
        int32_t      n_layer;
        int32_t      n_ctx_train;
        int32_t      n_swa;
        int32_t      n_vocab;
        int32_t      vocab_type;
        int32_t      kind;
    } MODELS[] = {
        {"tiny-llama.gguf", "llama", 3, 8192, 0, 50259, 2, LCS_MEMORY_KIND_ATTENTION},
        {"tiny-spm.gguf", "llama", 3, 8192, 0, 32000, 1, LCS_MEMORY_KIND_ATTENTION},
        {"tiny-swa.gguf", "gemma3", 4, 8192, 32, 32000, 1, LCS_MEMORY_KIND_SWA},
        {"tiny-mamba.gguf", "mamba", 3, 8192, 0, 50257, 2, LCS_MEMORY_KIND_RECURRENT},
        {"tiny-hybrid.gguf", "lfm2", 5, 8192, 0, 50257, 2, LCS_MEMORY_KIND_HYBRID},
        {"tiny-bert.gguf", "bert", 2, 512, 0, 30522, 3, LCS_MEMORY_KIND_NONE},
    };
    for (size_t i = 0; i < sizeof MODELS / sizeof *MODELS; ++i) {
        lcs_model_params params = defaults();
        const char *     path = fixture(argc, argv, MODELS[i].file);
        lcs_model *      model = load_model(path);
        lcs_model_info   info = info_of(model);
        CHECK(strcmp(lcs_model_architecture(model), MODELS[i].architecture) == 0);
        CHECK(strncmp(lcs_model_description(model), MODELS[i].architecture, strlen(MODELS[i].architecture)) == 0);
        CHECK(info.n_layer == MODELS[i].n_layer && info.n_layer_nextn == 0);
        CHECK(info.n_ctx_train == MODELS[i].n_ctx_train && info.n_swa == MODELS[i].n_swa);
        CHECK(info.n_vocab == MODELS[i].n_vocab && info.vocab_type == MODELS[i].vocab_type);
        CHECK(info.memory_kind == MODELS[i].kind);
        CHECK(info.n_embd == 128 && info.n_embd_out == 128);
        CHECK(info.n_params > 0 && info.n_bytes > 0);
        CHECK(info.has_decoder && !info.has_encoder && !info.is_diffusion && !info.vocab_only);
        CHECK(info.rope_freq_scale_train == 1.0f);

        params.vocab_only = true;
        lcs_model *    words = load_with(path, params);
        lcs_model_info same = info_of(words);
        CHECK(same.vocab_only && same.memory_kind == LCS_MEMORY_KIND_NONE);
        CHECK(same.n_params == info.n_params && same.n_bytes == info.n_bytes);
        CHECK(same.n_vocab == info.n_vocab && same.vocab_type == info.vocab_type);
        CHECK(same.n_ctx_train == info.n_ctx_train && same.n_embd == info.n_embd && same.n_embd_out == info.n_embd_out);
        CHECK(same.n_layer == info.n_layer && same.n_layer_nextn == info.n_layer_nextn);
        CHECK(same.n_head == info.n_head && same.n_head_kv == info.n_head_kv && same.n_swa == info.n_swa);
        CHECK(same.rope_freq_scale_train == info.rope_freq_scale_train);
        CHECK(strcmp(lcs_model_architecture(words), MODELS[i].architecture) == 0);
        CHECK(lcs_model_description(words)[0] != '\0');
        CHECK(lcs_model_meta_count(words) == lcs_model_meta_count(model));
        lcs_model_free(words);
        lcs_model_free(model);
    }
}

static const char * meta(const lcs_model * model, const char * wanted) {
    for (int32_t i = 0; i < lcs_model_meta_count(model); ++i) {
        const char * key = NULL;
        const char * value = NULL;
        CHECK_OK(lcs_model_meta_at(model, i, &key, &value));
        if (strcmp(key, wanted) == 0) {
            return value;
        }
    }
    return NULL;
}

static void test_metadata_is_text_without_arrays(const char * path) {
    lcs_model *  model = load_model(path);
    const char * key = NULL;
    const char * value = NULL;
    CHECK(strcmp(meta(model, "general.architecture"), "llama") == 0);
    CHECK(strcmp(meta(model, "llama.block_count"), "3") == 0);
    CHECK(strcmp(meta(model, "llama.rope.freq_base"), "10000.000000") == 0);
    CHECK(meta(model, "tokenizer.ggml.tokens") == NULL && meta(model, "nothing") == NULL);
    CHECK(strstr(meta(model, "tokenizer.chat_template"), "<|im_start|>") != NULL);
    CHECK_STATUS(lcs_model_meta_at(model, -1, &key, &value), LCS_STATUS_RANGE);
    CHECK_STATUS(lcs_model_meta_at(model, lcs_model_meta_count(model), &key, &value), LCS_STATUS_RANGE);
    CHECK_STATUS(lcs_model_meta_at(model, 0, NULL, &value), LCS_STATUS_ARG);
    CHECK_STATUS(lcs_model_meta_at(model, 0, &key, NULL), LCS_STATUS_ARG);
    CHECK(key == NULL && value == NULL);
    CHECK(strcmp(lcs_model_chat_template(model, NULL), meta(model, "tokenizer.chat_template")) == 0);
    CHECK(lcs_model_chat_template(model, "tool_use") == NULL);
    lcs_model_free(model);
}

static void test_a_model_without_a_template_has_none(const char * path) {
    lcs_model * model = load_model(path);
    CHECK(lcs_model_chat_template(model, NULL) == NULL);
    lcs_model_free(model);
}

static void test_null_is_an_argument_error(const char * path) {
    lcs_model *    model = NULL;
    lcs_model_info info;
    const char *   key = NULL;
    CHECK_STATUS(lcs_model_load(NULL, NULL, &model), LCS_STATUS_ARG);
    CHECK_STATUS(lcs_model_load(path, NULL, NULL), LCS_STATUS_ARG);
    CHECK_STATUS(lcs_model_get_info(NULL, &info), LCS_STATUS_ARG);
    CHECK_STATUS(lcs_model_meta_at(NULL, 0, &key, &key), LCS_STATUS_ARG);
    CHECK(model == NULL);
    CHECK(lcs_model_description(NULL)[0] == '\0' && lcs_model_architecture(NULL)[0] == '\0');
    CHECK(lcs_model_chat_template(NULL, NULL) == NULL && lcs_model_meta_count(NULL) == 0);
    lcs_model_free(NULL);
    lcs_model_params_init(NULL);
    model = load_model(path);
    CHECK_STATUS(lcs_model_get_info(model, NULL), LCS_STATUS_ARG);
    lcs_model_free(model);
}

static void test_a_wrong_parameter_is_named(const char * path) {
    static const char * const UNKNOWN[] = {"CUDA77"};
    static const char * const CPU[] = {"CPU"};
    static const char * const HOLE[] = {NULL};
    static const float        NOT_A_NUMBER[] = {NAN};
    static const float        NEGATIVE[] = {1.0f, -1.0f};
    static const float        MANY[100] = {1.0f};
    lcs_model *               model = NULL;
    lcs_model_params          p;
    lcs_error_info            error;
#define CHECK_PARAM(change, expected)                                     \
    do {                                                                  \
        p = defaults();                                                   \
        change;                                                           \
        CHECK_STATUS(lcs_model_load(path, &p, &model), expected);         \
        CHECK(model == NULL);                                             \
        lcs_last_error(&error);                                           \
        CHECK(error.message[0] != '\0');                                  \
    } while (0)
    CHECK_PARAM(p.split_mode = -1, LCS_STATUS_RANGE);
    CHECK_PARAM(p.split_mode = 4, LCS_STATUS_RANGE);
    CHECK(strcmp(error.field, "split_mode") == 0 && strcmp(error.actual, "4") == 0);
    CHECK_PARAM(p.main_gpu = -1, LCS_STATUS_RANGE);
    CHECK_PARAM(p.main_gpu = 1000, LCS_STATUS_RANGE);
    CHECK_PARAM((p.devices = UNKNOWN, p.n_devices = 1), LCS_STATUS_ARG);
    CHECK(strcmp(error.field, "devices") == 0 && strcmp(error.actual, "CUDA77") == 0);
    CHECK_PARAM((p.devices = CPU, p.n_devices = 1), LCS_STATUS_ARG);
    CHECK_PARAM((p.devices = HOLE, p.n_devices = 1), LCS_STATUS_ARG);
    CHECK_PARAM((p.devices = UNKNOWN, p.n_devices = 1000), LCS_STATUS_RANGE);
    CHECK_PARAM((p.devices = UNKNOWN, p.n_devices = 1, p.split_mode = LCS_SPLIT_MODE_NONE, p.main_gpu = 1),
                LCS_STATUS_RANGE);
    CHECK_PARAM(p.n_devices = 1, LCS_STATUS_ARG);
    CHECK_PARAM((p.tensor_split = NOT_A_NUMBER, p.n_tensor_split = 1), LCS_STATUS_ARG);
    CHECK_PARAM((p.tensor_split = NEGATIVE, p.n_tensor_split = 2), LCS_STATUS_ARG);
    CHECK_PARAM((p.tensor_split = MANY, p.n_tensor_split = 100), LCS_STATUS_RANGE);
    CHECK_PARAM(p.n_tensor_split = 1, LCS_STATUS_ARG);
    /* No device at all, to split over. */
    CHECK_PARAM((p.devices = UNKNOWN, p.n_devices = 0, p.split_mode = LCS_SPLIT_MODE_TENSOR), LCS_STATUS_LOAD);
}

static void test_every_way_of_loading_gives_the_same_model(const char * path) {
    static const float  SPLIT[] = {0.5f, 0.0f};
    const char * const  none[] = {NULL};
    const lcs_model_info expected = {0};
    lcs_model_info       first = expected;
    for (int way = 0; way < 64; ++way) {
        lcs_model_params p = defaults();
        p.use_mmap = (way & 1) != 0;
        p.use_mlock = (way & 2) != 0;
        p.check_tensors = (way & 4) != 0;
        p.use_extra_bufts = (way & 8) != 0;
        p.n_gpu_layers = (way & 16) != 0 ? 0 : -1;
        if ((way & 32) != 0) {
            p.tensor_split = SPLIT;
            p.n_tensor_split = 2;
            p.devices = none;
            p.load_mtp = true;
        }
        lcs_model *          model = load_with(path, p);
        const lcs_model_info info = info_of(model);
        if (way == 0) {
            first = info;
        }
        CHECK(info.n_params == first.n_params && info.n_bytes == first.n_bytes && info.n_layer == first.n_layer);
        lcs_model_free(model);
    }
}

typedef struct observed {
    int   calls;
    int   stop_at; /* call that says stop; 0: none */
    float last;
} observed;

static bool observe(float fraction, void * data) {
    observed * o = data;
    CHECK(fraction >= 0.0f && fraction <= 1.0f);
    CHECK(fraction >= o->last);
    o->last = fraction;
    return ++o->calls != o->stop_at;
}

static void test_progress_rises_to_one_and_can_stop_the_load(const char * path) {
    observed         whole = {0, 0, 0.0f};
    lcs_model_params p = defaults();
    p.progress = observe;
    p.progress_data = &whole;
    lcs_model_free(load_with(path, p));
    CHECK(whole.last == 1.0f && whole.calls > 10);
    for (int stop_at = 1; stop_at <= whole.calls; stop_at += stop_at == whole.calls - 1 ? 1 : whole.calls - 2) {
        observed    o = {0, stop_at, 0.0f};
        lcs_model * model = NULL;
        p.progress_data = &o;
        CHECK_STATUS(lcs_model_load(path, &p, &model), LCS_STATUS_CANCELLED);
        CHECK(model == NULL && o.calls == stop_at);
        check_nothing_alive();
    }
}

static void test_what_is_no_model_is_refused(const char * path) {
    bytes b = read_bytes(path);
    check_refused("/nonexistent/model.gguf", "no such file");
    check_refused("", "no such file");
    check_refused("/tmp", "is a folder");
    check_refused("/dev/null", "no regular file");
    check_refused("/dev/zero", "no regular file");
    CHECK(mkfifo(scratch("pipe"), 0600) == 0);
    check_refused(scratch("pipe"), "no regular file");
    check_refused(write_bytes("empty", "", 0), "is empty");
    check_refused(write_bytes("short", "GGU", 3), "truncated");
    check_refused(write_bytes("text", "Dear model, ...", 15), "no GGUF file");
    CHECK(chmod(write_bytes("closed", b.data, 64), 0) == 0);
    if (geteuid() != 0) {
        check_refused(scratch("closed"), "cannot be opened");
    }
    for (uint32_t version = 0; version < 6; ++version) {
        if (version < 2 || version > 3) {
            bytes wrong = copy_bytes(b);
            put_u32(wrong.data + 4, version);
            check_refused_bytes(wrong, "GGUF version");
        }
    }
    bytes swapped = copy_bytes(b);
    put_u32(swapped.data + 4, 3u << 24);
    check_refused_bytes(swapped, "byte order");
    for (int shift = 20; shift < 64; shift += 7) {
        bytes many = copy_bytes(b);
        put_u64(many.data + 8, UINT64_C(1) << shift);
        check_refused_bytes(many, shift < 22 ? "" : "tensors in");
        many = copy_bytes(b);
        put_u64(many.data + 16, UINT64_C(1) << shift);
        check_refused_bytes(many, shift < 22 ? "" : "keys in");
    }
    free(b.data);
}

static void test_a_file_cut_anywhere_is_refused(const char * path) {
    const bytes b = read_bytes(path);
    /* Every byte of the first keys, then each page, then the last bytes. */
    for (size_t n = 1; n < b.n; n += n < 600 ? 1 : n + 65536 < b.n ? 65521 : b.n - n > 16 ? b.n - n - 16 : 1) {
        check_refused(write_bytes("cut.gguf", b.data, n), "truncated");
    }
    free(b.data);
}

static void test_a_value_that_would_end_the_process_is_refused(const char * path) {
    const bytes good = read_bytes(path);
    bytes       b;
#define CHECK_DAMAGE(damage, expected) \
    do {                               \
        b = copy_bytes(good);          \
        damage;                        \
        check_refused_bytes(b, expected); \
    } while (0)
    CHECK_DAMAGE(put_u32(value_of(b, "llama.block_count"), 0), "llama.block_count 0 is outside 1..512");
    CHECK_DAMAGE(put_u32(value_of(b, "llama.block_count"), 513), "llama.block_count 513");
    CHECK_DAMAGE(put_u32(value_of(b, "llama.block_count"), 4), "blk.3.");
    CHECK_DAMAGE(put_u32(value_of(b, "llama.attention.head_count"), 0), "");
    CHECK_DAMAGE(put_u32(value_of(b, "llama.embedding_length"), 0), "");
    CHECK_DAMAGE(put_u32(value_of(b, "llama.embedding_length"), 127), "n_rot");
    CHECK_DAMAGE(put_u32(type_of(b, "llama.block_count"), 6), "wrong type");
    CHECK_DAMAGE(replace_all(b, "general.architecture", "general.architektur!"), "general.architecture is missing");
    CHECK_DAMAGE(put_u32(type_of(b, "llama.block_count"), 13), "unknown type 13");
    CHECK_DAMAGE(put_u32(type_of(b, "tokenizer.ggml.tokens") + 4, 9), "unknown type 9");
    CHECK_DAMAGE(put_u64(type_of(b, "tokenizer.ggml.token_type") + 8, UINT64_C(1) << 40), "claims");
    CHECK_DAMAGE(put_u64(elements_of(b, "tokenizer.ggml.tokens"), UINT64_C(1) << 62), "truncated");
    CHECK_DAMAGE(memcpy(elements_of(b, "tokenizer.ggml.tokens") + 8, "\"", 1), "of another");
    free(good.data);
}

static void test_keys_and_tensors_are_unique_and_named(const char * path) {
    const bytes good = read_bytes(path);
    bytes       b;
    CHECK_DAMAGE(replace_all(b, "llama.context_length", "llama.embedding_size"), "key not found");
    CHECK_DAMAGE(replace_all(b, "tokenizer.ggml.bos_token_id", "tokenizer.ggml.eos_token_id"), "twice");
    CHECK_DAMAGE(replace_all(b, "blk.1.attn_q.weight", "blk.0.attn_q.weight"), "twice");
    CHECK_DAMAGE(b.data[find_key(b, "general.name") + 8 + 7] = 0, "NUL");
    free(good.data);
}

static void test_keys_of_other_kinds_of_models_are_judged(const char * path) {
    static const struct {
        const char * key;
        uint32_t     value;
        const char * expected;
    } CASES[] = {
        {"general.alignment", 0, "power of two"},
        {"general.alignment", 24, "power of two"},
        {"general.alignment", 8, "multiple of 32"},
        {"general.alignment", 1u << 31, ""},
        {"llama.expert_count", 1025, "outside 0..1024"},
        {"llama.expert_count", 8, "uses 0 of 8 experts"},
        {"llama.expert_used_count", 2, "uses 2 of 0 experts"},
        {"llama.expert_group_count", 2, "groups of 0 experts"},
        {"llama.nextn_predict_layers", 4, "nextn_predict_layers 4"},
        {"llama.full_attention_interval", 0, "full_attention_interval 0"},
        {"llama.rope.scaling.type", 1, "wrong type"},
        {"split.count", 2, "wrong type"},
    };
    for (size_t i = 0; i < sizeof CASES / sizeof *CASES; ++i) {
        bytes b = read_bytes(path);
        insert_u32(&b, CASES[i].key, CASES[i].value);
        check_refused_bytes(b, CASES[i].expected);
    }
    bytes b = read_bytes(path); /* the insertion itself is no damage */
    insert_u32(&b, "llama.unheard_of", 7);
    lcs_model_free(load_model(write_bytes("inserted.gguf", b.data, b.n)));
    free(b.data);
}

static void test_a_scaling_that_llama_cpp_does_not_know_is_refused(const char * path) {
    const bytes  b = read_bytes(path);
    const size_t at = find_key(b, "general.name");
    bytes        grown = {malloc(b.n + 32), b.n + 32};
    CHECK(grown.data != NULL);
    /* "general.name" = "tiny-llama" becomes "llama.rope.scaling.type" = "ddd...", 32 bytes longer. */
    memcpy(grown.data, b.data, at);
    unsigned char * p = grown.data + at;
    const size_t    old = 8 + 12 + 4 + 8 + 10;
    put_u64(p, 23);
    memcpy(p + 8, "llama.rope.scaling.type", 23);
    put_u32(p + 31, GGUF_TEXT);
    put_u64(p + 35, old + 32 - 43);
    memset(p + 43, 'd', old + 32 - 43);
    memcpy(p + old + 32, b.data + at + old, b.n - at - old);
    check_refused_bytes(grown, "rope.scaling.type is \"ddd");
    free(b.data);
}

static void test_a_division_by_a_number_of_the_file_is_judged(const char * path) {
    static const struct {
        const char * architecture;
        const char * key;
    } CASES[] = {
        {"olmo2", "olmo2.attention.head_count"},
        {"rwkv6", "rwkv6.wkv.head_size"},
    };
    for (size_t i = 0; i < sizeof CASES / sizeof *CASES; ++i) {
        bytes b = read_bytes(path);
        replace_all(b, "llama", CASES[i].architecture);
        if (i == 0) {
            put_u32(value_of(b, CASES[i].key), 0);
        } else {
            insert_u32(&b, CASES[i].key, 0);
        }
        check_refused_bytes(b, CASES[i].key);
    }
}

static void test_an_assertion_in_llama_cpp_is_a_refusal(const char * path) {
    bytes b = read_bytes(path);
    replace_all(b, "llama", "jamba");
    insert_u32(&b, "jamba.ssm.conv_kernel", 4);
    insert_u32(&b, "jamba.ssm.inner_size", 100); /* it wants twice the embedding length */
    insert_u32(&b, "jamba.ssm.state_size", 16);
    insert_u32(&b, "jamba.ssm.time_step_rank", 16);
    check_refused_bytes(b, "d_inner");
}

static void test_a_broken_weight_is_found_when_asked_for(const char * path) {
    bytes            b = read_bytes(path);
    lcs_model *      model = NULL;
    lcs_model_params p = defaults();
    memset(b.data + b.n - 512, 0xff, 512); /* NaN in every float type */
    const char * damaged = write_bytes("nan.gguf", b.data, b.n);
    lcs_model_free(load_model(damaged));
    for (int mmap = 0; mmap < 2; ++mmap) {
        p.check_tensors = true;
        p.use_mmap = mmap != 0;
        CHECK_STATUS(lcs_model_load(damaged, &p, &model), LCS_STATUS_LOAD);
        CHECK(model == NULL);
    }
    free(b.data);
}

static void test_special_tokens_outside_the_vocabulary_are_ignored(const char * path) {
    bytes              b = read_bytes(path);
    lcs_vocab_specials specials;
    put_u32(value_of(b, "tokenizer.ggml.bos_token_id"), 50259);
    put_u32(value_of(b, "tokenizer.ggml.eos_token_id"), UINT32_MAX);
    lcs_model * model = load_model(write_bytes("specials.gguf", b.data, b.n));
    CHECK_OK(lcs_vocab_get_specials(model, &specials));
    CHECK(specials.bos >= -1 && specials.bos < 50259 && specials.eos >= -1 && specials.eos < 50259);
    lcs_model_free(model);
    free(b.data);
}

static void test_wordpiece_refuses_byte_tokens(const char * path) {
    bytes b = read_bytes(path);
    put_u32(elements_of(b, "tokenizer.ggml.token_type") + 4 * 1000, 6);
    check_refused_bytes(b, "byte token");
}

static void test_a_split_model_is_one_model(int argc, char ** argv) {
    const char * first = fixture(argc, argv, "tiny-split-00001-of-00002.gguf");
    const char * second = fixture(argc, argv, "tiny-split-00002-of-00002.gguf");
    lcs_model *  whole = load_model(fixture(argc, argv, "tiny-llama.gguf"));
    lcs_model *  parts = load_model(first);
    CHECK(info_of(parts).n_params == info_of(whole).n_params);
    CHECK(info_of(parts).n_bytes == info_of(whole).n_bytes);
    lcs_model_free(parts);
    lcs_model_free(whole);
    check_refused(second, "is part 2 of a split model");

    const bytes one = read_bytes(first);
    const bytes two = read_bytes(second);
    check_refused(write_bytes("other-name.gguf", one.data, one.n), "not named as the first");
    const char * path = write_bytes("s-00001-of-00002.gguf", one.data, one.n);
    check_refused(path, "part 2 of 2: no such file");
    write_bytes("s-00002-of-00002.gguf", two.data, two.n / 2);
    check_refused(path, "part 2 of 2: truncated");
    put_u32(type_of(two, "split.no"), 3); /* i16: as wide, but llama.cpp asserts on it */
    write_bytes("s-00002-of-00002.gguf", two.data, two.n);
    check_refused(path, "part 2 of 2: split.no is no u16");
    put_u32(type_of(two, "split.no"), 2);
    value_of(two, "split.no")[0] = 0;
    write_bytes("s-00002-of-00002.gguf", two.data, two.n);
    check_refused(path, "split.no is 0, expected 1");
    value_of(two, "split.no")[0] = 1;
    write_bytes("s-00002-of-00002.gguf", two.data, two.n);
    lcs_model_free(load_model(path));
    free(one.data);
    free(two.data);
}

static void use_in_the_child(lcs_model * model, const char * path) {
    lcs_model_info  info;
    lcs_live_counts live;
    const char *    text = NULL;
    CHECK_STATUS(lcs_model_get_info(model, &info), LCS_STATUS_FORKED);
    CHECK_STATUS(lcs_model_meta_at(model, 0, &text, &text), LCS_STATUS_FORKED);
    CHECK(lcs_model_description(model)[0] == '\0' && lcs_model_architecture(model)[0] == '\0');
    CHECK(lcs_model_meta_count(model) == 0 && lcs_model_chat_template(model, NULL) == NULL);
    lcs_model_free(model);
    lcs_live(&live);
    CHECK(live.models == 1); /* nothing was freed */
    lcs_model_free(load_model(path));
}

static void test_a_forked_child_may_only_load_anew(const char * path) {
    lcs_model * model = load_model(path);
    IN_CHILD(use_in_the_child(model, path));
    CHECK(info_of(model).n_layer == 3);
    lcs_model_free(model);
}

static void test_each_failing_step_of_a_load_is_clean(const char * path) {
    bool fired = true;
    int  n_steps = 0;
    for (int64_t n = 1; fired; ++n) {
        lcs_model * model = NULL;
        lcs_fault_arm(n);
        const lcs_status status = lcs_model_load(path, NULL, &model);
        fired = lcs_fault_fired();
        lcs_fault_arm(0);
        CHECK(status == (fired ? LCS_STATUS_NOMEM : LCS_STATUS_OK));
        CHECK((model == NULL) == fired);
        lcs_model_free(model);
        check_nothing_alive();
        n_steps += fired;
    }
    CHECK(n_steps >= 4);
}

int main(int argc, char ** argv) {
    char * llama = strdup(fixture(argc, argv, "tiny-llama.gguf"));
    char * bert = strdup(fixture(argc, argv, "tiny-bert.gguf"));
    test_a_model_says_what_it_is(argc, argv);
    test_metadata_is_text_without_arrays(llama);
    test_a_model_without_a_template_has_none(bert);
    test_null_is_an_argument_error(llama);
    test_a_wrong_parameter_is_named(llama);
    test_every_way_of_loading_gives_the_same_model(bert);
    test_progress_rises_to_one_and_can_stop_the_load(llama);
    test_what_is_no_model_is_refused(llama);
    test_a_file_cut_anywhere_is_refused(fixture(argc, argv, "tiny-lora.gguf"));
    test_a_value_that_would_end_the_process_is_refused(llama);
    test_keys_and_tensors_are_unique_and_named(llama);
    test_keys_of_other_kinds_of_models_are_judged(llama);
    test_a_scaling_that_llama_cpp_does_not_know_is_refused(llama);
    test_a_division_by_a_number_of_the_file_is_judged(llama);
    test_an_assertion_in_llama_cpp_is_a_refusal(llama);
    test_a_broken_weight_is_found_when_asked_for(llama);
    test_special_tokens_outside_the_vocabulary_are_ignored(llama);
    test_wordpiece_refuses_byte_tokens(bert);
    test_a_split_model_is_one_model(argc, argv);
    test_a_forked_child_may_only_load_anew(llama);
    test_each_failing_step_of_a_load_is_clean(llama);
    check_nothing_alive();
    remove_scratch();
    free(llama);
    free(bert);
    return 0;
}
