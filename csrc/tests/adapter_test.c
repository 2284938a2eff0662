/* LoRA adapters: loaded for their model, which they keep alive, and refused for any other. Oracle: the keys that
 * tests/tiny.py writes. What an adapter does to logits is tested with the context. */
#include "damage.h"

static void check_refused(lcs_model * model, const char * path, const char * expected) {
    lcs_adapter *    adapter = NULL;
    lcs_error_info   error;
    const lcs_status status = lcs_adapter_load(model, path, &adapter);
    lcs_last_error(&error);
    if (status != LCS_STATUS_LOAD || adapter != NULL || strstr(error.message, expected) == NULL) {
        fprintf(stderr, "%s: %s \"%s\", expected LOAD with \"%s\"\n", path, lcs_status_name(status), error.message,
                expected);
        exit(1);
    }
}

static void test_an_adapter_has_metadata(lcs_model * model, const char * path) {
    lcs_adapter * adapter = NULL;
    const char *  key = NULL;
    const char *  value = NULL;
    bool          found = false;
    CHECK_OK(lcs_adapter_load(model, path, &adapter));
    CHECK(lcs_adapter_meta_count(adapter) == 5);
    for (int32_t i = 0; i < 5; ++i) {
        CHECK_OK(lcs_adapter_meta_at(adapter, i, &key, &value));
        found = found || (strcmp(key, "adapter.lora.alpha") == 0 && strcmp(value, "4.000000") == 0);
    }
    CHECK(found);
    CHECK_STATUS(lcs_adapter_meta_at(adapter, -1, &key, &value), LCS_STATUS_RANGE);
    CHECK_STATUS(lcs_adapter_meta_at(adapter, 5, &key, &value), LCS_STATUS_RANGE);
    CHECK_STATUS(lcs_adapter_meta_at(adapter, 0, NULL, &value), LCS_STATUS_ARG);
    CHECK_STATUS(lcs_adapter_meta_at(adapter, 0, &key, NULL), LCS_STATUS_ARG);
    lcs_adapter_free(adapter);
}

static void test_null_is_an_argument_error(lcs_model * model, const char * path) {
    lcs_adapter * adapter = NULL;
    const char *  text = NULL;
    CHECK_STATUS(lcs_adapter_load(NULL, path, &adapter), LCS_STATUS_ARG);
    CHECK_STATUS(lcs_adapter_load(model, NULL, &adapter), LCS_STATUS_ARG);
    CHECK_STATUS(lcs_adapter_load(model, path, NULL), LCS_STATUS_ARG);
    CHECK_STATUS(lcs_adapter_meta_at(NULL, 0, &text, &text), LCS_STATUS_ARG);
    CHECK(lcs_adapter_meta_count(NULL) == 0);
    lcs_adapter_free(NULL);
    CHECK(adapter == NULL);
}

static void test_an_adapter_outlives_the_handle_of_its_model(const char * model_path, const char * path) {
    lcs_live_counts live;
    lcs_model *     model = load_model(model_path);
    lcs_adapter *   first = NULL;
    lcs_adapter *   second = NULL;
    CHECK_OK(lcs_adapter_load(model, path, &first));
    CHECK_OK(lcs_adapter_load(model, path, &second));
    lcs_model_free(model);
    lcs_live(&live);
    CHECK(live.models == 0 && live.adapters == 2);
    lcs_adapter_free(first);
    CHECK(lcs_adapter_meta_count(second) == 5);
    lcs_adapter_free(second);
    check_nothing_alive();
}

static void test_a_foreign_adapter_is_refused(
        lcs_model * llama, lcs_model * mamba, const char * path, const char * foreign) {
    lcs_error_info error;
    lcs_adapter *  adapter = NULL;
    CHECK_STATUS(lcs_adapter_load(mamba, path, &adapter), LCS_STATUS_LOAD);
    lcs_last_error(&error);
    CHECK(adapter == NULL && strcmp(error.field, "architecture") == 0);
    CHECK(strcmp(error.expected, "mamba") == 0 && strcmp(error.actual, "llama") == 0);
    check_refused(llama, foreign, "shape");
}

static void test_a_damaged_adapter_is_refused(lcs_model * model, const char * model_path, const char * path) {
    static const struct {
        const char * key;
        uint32_t     type;
        const char * expected;
    } TYPES[] = {
        {"adapter.lora.alpha", 4, "adapter.lora.alpha is no f32"},
        {"adapter.lora.alpha", 5, "adapter.lora.alpha is no f32"},
    };
    const bytes good = read_bytes(path);
    check_refused(model, "/nonexistent.gguf", "no such file");
    check_refused(model, "/tmp", "is a folder");
    check_refused(model, write_bytes("empty", "", 0), "is empty");
    check_refused(model, write_bytes("text", "no adapter at all", 17), "no GGUF file");
    check_refused(model, model_path, "adapter");
    for (size_t i = 0; i < sizeof TYPES / sizeof *TYPES; ++i) {
        bytes b = copy_bytes(good);
        put_u32(type_of(b, TYPES[i].key), TYPES[i].type);
        check_refused(model, write_bytes("type.gguf", b.data, b.n), TYPES[i].expected);
        free(b.data);
    }
    bytes nan = copy_bytes(good);
    put_u32(value_of(nan, "adapter.lora.alpha"), 0x7fc00000);
    check_refused(model, write_bytes("nan.gguf", nan.data, nan.n), "not finite");
    free(nan.data);
    bytes other = copy_bytes(good);
    replace_all(other, "adapter.type", "adapter.tipe");
    check_refused(model, write_bytes("kind.gguf", other.data, other.n), "lora");
    free(other.data);
    bytes typed = copy_bytes(good);
    replace_all(typed, "general.name", "general.type"); /* twice now */
    check_refused(model, write_bytes("twice.gguf", typed.data, typed.n), "twice");
    free(typed.data);
    bytes wrong = copy_bytes(good);
    replace_all(wrong, "general.type", "general.tipe");
    check_refused(model, write_bytes("untyped.gguf", wrong.data, wrong.n), "general.type");
    free(wrong.data);
    bytes number = copy_bytes(good);
    replace_all(number, "general.type", "general.tipe");
    insert_u32(&number, "general.type", 1);
    check_refused(model, write_bytes("number.gguf", number.data, number.n), "general.type is no text");
    free(number.data);
    bytes renamed = copy_bytes(good);
    replace_all(renamed, "lora_b", "lora_c");
    check_refused(model, write_bytes("renamed.gguf", renamed.data, renamed.n), "suffix");
    free(renamed.data);
    for (size_t n = 1; n < good.n; n += 977) {
        check_refused(model, write_bytes("cut.gguf", good.data, n), "truncated");
    }
    free(good.data);
}

static void test_a_model_without_weights_takes_no_adapter(const char * model_path, const char * path) {
    lcs_model *      model = NULL;
    lcs_adapter *    adapter = NULL;
    lcs_model_params p;
    lcs_model_params_init(&p);
    p.vocab_only = true;
    CHECK_OK(lcs_model_load(model_path, &p, &model));
    CHECK_STATUS(lcs_adapter_load(model, path, &adapter), LCS_STATUS_UNSUPPORTED);
    CHECK(adapter == NULL);
    lcs_model_free(model);
}

static void use_in_the_child(lcs_model * model, lcs_adapter * adapter, const char * path) {
    lcs_live_counts live;
    lcs_adapter *   other = NULL;
    const char *    text = NULL;
    CHECK_STATUS(lcs_adapter_load(model, path, &other), LCS_STATUS_FORKED);
    CHECK_STATUS(lcs_adapter_meta_at(adapter, 0, &text, &text), LCS_STATUS_FORKED);
    CHECK(lcs_adapter_meta_count(adapter) == 0);
    lcs_adapter_free(adapter);
    lcs_live(&live);
    CHECK(live.adapters == 1);
}

static void test_a_forked_child_may_not_use_it(lcs_model * model, const char * path) {
    lcs_adapter * adapter = NULL;
    CHECK_OK(lcs_adapter_load(model, path, &adapter));
    IN_CHILD(use_in_the_child(model, adapter, path));
    lcs_adapter_free(adapter);
}

static void test_each_failing_step_of_a_load_is_clean(lcs_model * model, const char * path) {
    bool fired = true;
    int  n_steps = 0;
    for (int64_t n = 1; fired; ++n) {
        lcs_adapter *   adapter = NULL;
        lcs_live_counts live;
        lcs_fault_arm(n);
        const lcs_status status = lcs_adapter_load(model, path, &adapter);
        fired = lcs_fault_fired();
        lcs_fault_arm(0);
        CHECK(status == (fired ? LCS_STATUS_NOMEM : LCS_STATUS_OK));
        CHECK((adapter == NULL) == fired);
        lcs_adapter_free(adapter);
        lcs_live(&live);
        CHECK(live.adapters == 0);
        n_steps += fired;
    }
    CHECK(n_steps >= 3);
}

int main(int argc, char ** argv) {
    const char * llama_path = fixture(argc, argv, "tiny-llama.gguf");
    const char * lora = fixture(argc, argv, "tiny-lora.gguf");
    const char * foreign = fixture(argc, argv, "tiny-lora-foreign.gguf");
    test_an_adapter_outlives_the_handle_of_its_model(llama_path, lora);
    test_a_model_without_weights_takes_no_adapter(llama_path, lora);
    lcs_model * llama = load_model(llama_path);
    lcs_model * mamba = load_model(fixture(argc, argv, "tiny-mamba.gguf"));
    test_an_adapter_has_metadata(llama, lora);
    test_null_is_an_argument_error(llama, lora);
    test_a_foreign_adapter_is_refused(llama, mamba, lora, foreign);
    test_a_damaged_adapter_is_refused(llama, llama_path, lora);
    test_a_forked_child_may_not_use_it(llama, lora);
    test_each_failing_step_of_a_load_is_clean(llama, lora);
    lcs_model_free(mamba);
    lcs_model_free(llama);
    check_nothing_alive();
    remove_scratch();
    return 0;
}
