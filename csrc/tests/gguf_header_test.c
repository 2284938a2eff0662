/* Headers without their models. Oracles: the same file loaded, and the memory that a real context says it has. */
#include "damage.h"

static lcs_header * read_header(const char * path, const lcs_model_params * params) {
    lcs_header * header = NULL;
    CHECK_OK(lcs_header_read(path, params, &header));
    return header;
}

static lcs_header_info info_of(const lcs_header * header) {
    lcs_header_info info;
    CHECK_OK(lcs_header_get_info(header, &info));
    return info;
}

static void test_a_header_says_what_the_loaded_model_says(int argc, char ** argv) {
    static const char * const FILES[] = {"tiny-llama.gguf", "tiny-spm.gguf",    "tiny-swa.gguf",
                                         "tiny-mamba.gguf", "tiny-hybrid.gguf", "tiny-bert.gguf"};
    for (size_t i = 0; i < sizeof FILES / sizeof *FILES; ++i) {
        const char *          path = fixture(argc, argv, FILES[i]);
        lcs_model *           model = load_model(path);
        lcs_header *          header = read_header(path, NULL);
        const lcs_header_info info = info_of(header);
        lcs_model_info        loaded;
        CHECK_OK(lcs_model_get_info(model, &loaded));
        CHECK(memcmp(&info.model, &loaded, sizeof loaded) == 0);
        CHECK(strcmp(lcs_header_architecture(header), lcs_model_architecture(model)) == 0);
        CHECK(info.tokenizer[0] != '\0' && info.version == 3 && info.n_parts == 1);

        const int32_t n_meta = lcs_header_meta_count(header);
        CHECK(n_meta == lcs_model_meta_count(model) && n_meta > 5);
        for (int32_t k = 0; k < n_meta; ++k) {
            const char * texts[4];
            CHECK_OK(lcs_header_meta_at(header, k, &texts[0], &texts[1]));
            CHECK_OK(lcs_model_meta_at(model, k, &texts[2], &texts[3]));
            CHECK(strcmp(texts[0], texts[2]) == 0 && strcmp(texts[1], texts[3]) == 0);
        }
        uint64_t n_bytes = 0;
        int32_t  n_tensors = 0;
        for (int32_t k = 0; k < info.n_types; ++k) {
            lcs_header_type type;
            CHECK_OK(lcs_header_type_at(header, k, &type));
            CHECK(strcmp(type.name, "f16") == 0 || strcmp(type.name, "f32") == 0);
            n_bytes += type.n_bytes;
            n_tensors += type.n_tensors;
        }
        CHECK(n_bytes == info.model.n_bytes && n_tensors == info.n_tensors);
        const bytes file = read_bytes(path);
        CHECK(info.n_file_bytes == file.n && info.n_header_bytes + n_bytes <= info.n_file_bytes);
        free(file.data);
        CHECK(info.n_layer_all == loaded.n_layer + loaded.n_layer_nextn);
        lcs_header_free(header);
        lcs_model_free(model);
    }
}

/* What tests/tiny.py wrote. */
static void test_each_layer_says_what_it_keeps(int argc, char ** argv) {
    lcs_header *     header = read_header(fixture(argc, argv, "tiny-swa.gguf"), NULL);
    lcs_header_layer layer;
    for (int32_t i = 0; i < 4; ++i) {
        CHECK_OK(lcs_header_layer_at(header, i, &layer));
        CHECK(layer.windowed == (i % 2 == 0) && layer.n_embd_k == 64 && layer.n_embd_v == 64 && layer.n_state == 0);
        CHECK(layer.n_head == 2 && layer.n_head_kv == 1 && !layer.prediction);
    }
    lcs_header_free(header);

    header = read_header(fixture(argc, argv, "tiny-hybrid.gguf"), NULL);
    for (int32_t i = 0; i < 5; ++i) {
        const bool attends = i == 2 || i == 4;
        CHECK_OK(lcs_header_layer_at(header, i, &layer));
        CHECK((layer.n_embd_k > 0) == attends && (layer.n_state > 0) == !attends);
    }
    lcs_header_free(header);
}

static void check_same_use(const lcs_memory_use * a, size_t n_a, const lcs_memory_use * b, size_t n_b) {
    CHECK(n_a == n_b);
    for (size_t i = 0; i < n_a; ++i) { /* in no order */
        size_t k = 0;
        while (k < n_b && strcmp(a[i].name, b[k].name) != 0) {
            ++k;
        }
        CHECK(k < n_b);
        CHECK(a[i].model == b[k].model && a[i].context == b[k].context && a[i].compute == b[k].compute);
    }
}

/* Both refuse for the same reason, or both say the same bytes. */
static void check_measured(lcs_model * model, lcs_header * header, const lcs_context_params * params) {
    lcs_context *    ctx = NULL;
    lcs_memory_use   real[16];
    lcs_memory_use   dry[16];
    size_t           n_real = 0;
    size_t           n_dry = 0;
    lcs_error_info   error;
    char             message[256] = "";
    const lcs_status status = lcs_context_init(model, params, &ctx);
    lcs_last_error(&error);
    snprintf(message, sizeof message, "%s", error.message);
    const lcs_status measured = lcs_header_measure(header, params, dry, 16, &n_dry);
    CHECK(measured == status);
    if (status != LCS_STATUS_OK) {
        lcs_last_error(&error);
        CHECK(strcmp(message, error.message) == 0);
        return;
    }
    CHECK_OK(lcs_context_memory_use(ctx, real, 16, &n_real));
    check_same_use(real, n_real, dry, n_dry);
    lcs_context_free(ctx);
}

static void test_a_dry_run_says_what_a_real_context_has(int argc, char ** argv) {
    static const char * const FILES[] = {"tiny-llama.gguf", "tiny-swa.gguf", "tiny-mamba.gguf", "tiny-hybrid.gguf",
                                         "tiny-bert.gguf"};
    for (size_t i = 0; i < sizeof FILES / sizeof *FILES; ++i) {
        const char * path = fixture(argc, argv, FILES[i]);
        for (int way = 0; way < 4; ++way) {
            lcs_model_params load;
            lcs_model_params_init(&load);
            load.use_mmap = (way & 1) == 0;
            load.use_extra_bufts = (way & 2) == 0;
            lcs_model * model = NULL;
            CHECK_OK(lcs_model_load(path, &load, &model));
            lcs_header * header = read_header(path, &load);
            for (int shape = 0; shape < 64; ++shape) {
                lcs_context_params p;
                lcs_context_params_init(&p);
                p.n_ctx = (shape & 1) != 0 ? 700 : 256;
                p.n_seq_max = (shape & 2) != 0 ? 3 : 1;
                p.kv_unified = (shape & 4) != 0;
                p.swa_full = (shape & 8) != 0;
                p.type_k = p.type_v = (shape & 16) != 0 ? LCS_TYPE_Q8_0 : LCS_TYPE_F16;
                p.flash_attn = (shape & 32) != 0 ? LCS_FLASH_ATTN_ON : LCS_FLASH_ATTN_OFF; /* q8_0 refuses OFF */
                p.n_ubatch = (shape & 2) != 0 ? 32 : 512;
                check_measured(model, header, &p);
            }
            lcs_header_free(header);
            lcs_model_free(model);
        }
    }
}

static void test_what_cannot_be_measured_is_said(int argc, char ** argv) {
    const char *       llama = fixture(argc, argv, "tiny-llama.gguf");
    lcs_header *       header = read_header(llama, NULL);
    lcs_memory_use     uses[16];
    size_t             n = 0;
    lcs_context_params p;
    lcs_context_params_init(&p);
    CHECK_STATUS(lcs_header_measure(header, &p, uses, 0, &n), LCS_STATUS_BUFFER);
    CHECK(n >= 2);
    CHECK_STATUS(lcs_header_measure(header, &p, NULL, 16, &n), LCS_STATUS_ARG);
    CHECK_STATUS(lcs_header_measure(header, &p, uses, 16, NULL), LCS_STATUS_ARG);
    CHECK_STATUS(lcs_header_measure(NULL, &p, uses, 16, &n), LCS_STATUS_ARG);
    p.n_seq_max = 257;
    CHECK_STATUS(lcs_header_measure(header, &p, uses, 16, &n), LCS_STATUS_RANGE);
    /* Cells that cannot even be listed, and a cache that only a dry run can have. */
    lcs_context_params_init(&p);
    p.n_ctx = 0x7fffff00;
    CHECK_STATUS(lcs_header_measure(header, &p, uses, 16, &n), LCS_STATUS_NOMEM);
    p.n_ctx = 1 << 20;
    CHECK_OK(lcs_header_measure(header, &p, uses, 16, &n));
    lcs_header_free(header);
    CHECK(lcs_available_memory() > 0);
}

static void test_arguments_are_judged(int argc, char ** argv) {
    const char *     llama = fixture(argc, argv, "tiny-llama.gguf");
    lcs_header *     header = NULL;
    lcs_header_info  info;
    lcs_header_layer layer;
    lcs_header_type  type;
    const char *     text = NULL;
    CHECK_STATUS(lcs_header_read(NULL, NULL, &header), LCS_STATUS_ARG);
    CHECK_STATUS(lcs_header_read(llama, NULL, NULL), LCS_STATUS_ARG);
    CHECK_STATUS(lcs_header_get_info(NULL, &info), LCS_STATUS_ARG);
    lcs_model_params wrong;
    lcs_model_params_init(&wrong);
    wrong.split_mode = 9;
    CHECK_STATUS(lcs_header_read(llama, &wrong, &header), LCS_STATUS_RANGE);
    CHECK(header == NULL);
    header = read_header(llama, NULL);
    info = info_of(header);
    CHECK_STATUS(lcs_header_get_info(header, NULL), LCS_STATUS_ARG);
    for (int32_t beyond = -1; beyond < 2; beyond += 2) {
        CHECK_STATUS(lcs_header_layer_at(header, beyond < 0 ? -1 : info.n_layer_all, &layer), LCS_STATUS_RANGE);
        CHECK_STATUS(lcs_header_type_at(header, beyond < 0 ? -1 : info.n_types, &type), LCS_STATUS_RANGE);
        CHECK_STATUS(lcs_header_meta_at(header, beyond < 0 ? -1 : lcs_header_meta_count(header), &text, &text),
                     LCS_STATUS_RANGE);
    }
    lcs_header_free(header);
    lcs_header_free(NULL);
    CHECK(lcs_header_architecture(NULL)[0] == '\0' && lcs_header_meta_count(NULL) == 0);
}

static void test_a_split_model_has_one_header(int argc, char ** argv) {
    lcs_header * whole = read_header(fixture(argc, argv, "tiny-split-00001-of-00002.gguf"), NULL);
    lcs_model *  model = load_model(fixture(argc, argv, "tiny-split-00001-of-00002.gguf"));
    CHECK(info_of(whole).n_parts == 2);
    lcs_context_params p;
    lcs_context_params_init(&p);
    check_measured(model, whole, &p);
    lcs_model_free(model);
    lcs_header_free(whole);
}

static void use_in_the_child(lcs_header * header) {
    lcs_header_info info;
    lcs_memory_use  uses[16];
    size_t          n = 0;
    CHECK_STATUS(lcs_header_get_info(header, &info), LCS_STATUS_FORKED);
    CHECK_STATUS(lcs_header_measure(header, NULL, uses, 16, &n), LCS_STATUS_FORKED);
    CHECK(lcs_header_architecture(header)[0] == '\0' && lcs_header_meta_count(header) == 0);
    lcs_header_free(header);
}

static void test_a_forked_child_may_not_use_it(int argc, char ** argv) {
    lcs_header * header = read_header(fixture(argc, argv, "tiny-llama.gguf"), NULL);
    IN_CHILD(use_in_the_child(header));
    lcs_header_free(header);
}

static void test_each_failing_step_is_clean(int argc, char ** argv) {
    const char * path = fixture(argc, argv, "tiny-swa.gguf");
    bool         fired = true;
    int          n_steps = 0;
    for (int64_t n = 1; fired; ++n) {
        lcs_header *   header = NULL;
        lcs_memory_use uses[16];
        size_t         n_uses = 0;
        lcs_fault_arm(n);
        lcs_status status = lcs_header_read(path, NULL, &header);
        if (status == LCS_STATUS_OK) {
            status = lcs_header_measure(header, NULL, uses, 16, &n_uses);
        }
        fired = lcs_fault_fired();
        lcs_fault_arm(0);
        CHECK(status == (fired ? LCS_STATUS_NOMEM : LCS_STATUS_OK));
        lcs_header_free(header);
        check_nothing_alive();
        n_steps += fired;
    }
    CHECK(n_steps >= 6);
}

int main(int argc, char ** argv) {
    test_a_header_says_what_the_loaded_model_says(argc, argv);
    test_each_layer_says_what_it_keeps(argc, argv);
    test_a_dry_run_says_what_a_real_context_has(argc, argv);
    test_what_cannot_be_measured_is_said(argc, argv);
    test_arguments_are_judged(argc, argv);
    test_a_split_model_has_one_header(argc, argv);
    test_a_forked_child_may_not_use_it(argc, argv);
    test_each_failing_step_is_clean(argc, argv);
    check_nothing_alive();
    return 0;
}
