// Owns LoRA adapters: loaded for one model, which they keep alive. Setting them is the context's.
#include "lcs_gguf.hpp"
#include "lcs_internal.hpp"

namespace lcs {

adapter_box::~adapter_box() {
    if (adapter != nullptr) {
        const std::lock_guard<std::mutex> lock(model->mutex); // it leaves the model's list
        llama_adapter_lora_free(adapter);
    }
}

namespace {

std::shared_ptr<adapter_box> load_adapter(const std::shared_ptr<model_box> & model, const char * path) {
    if (model->info.vocab_only) {
        fail(LCS_STATUS_UNSUPPORTED, "the model was loaded without weights", "vocab_only");
    }
    fault_point();
    const gguf_header header = read_adapter_file(path);
    const auto        architecture = header.text("general.architecture");
    if (architecture && *architecture != model->architecture) {
        fail(LCS_STATUS_LOAD,
             "the adapter is for " + std::string(*architecture) + ", the model is " + model->architecture,
             "architecture", model->architecture, std::string(*architecture));
    }
    fault_point();
    auto box = std::make_shared<adapter_box>();
    box->model = model;
    box->metadata = header.scalars();
    fault_point();
    const std::lock_guard<std::mutex> lock(model->mutex);
    const trapped_aborts              trapped(LCS_STATUS_LOAD);
    box->adapter = llama_adapter_lora_init(model->model, path);
    if (box->adapter == nullptr) {
        fail_load(log_last_line());
    }
    return box;
}

} // namespace

} // namespace lcs

extern "C" {

lcs_status lcs_adapter_load(lcs_model * model, const char * path, lcs_adapter ** adapter_out) {
    return lcs::guard([&] {
        lcs::require_alive(model, "model");
        lcs::require(path, "path");
        lcs::require(adapter_out, "adapter_out");
        lcs::fault_point();
        auto handle = std::make_unique<lcs_adapter>();
        handle->box = lcs::load_adapter(model->box, path);
        *adapter_out = handle.release();
    });
}

void lcs_adapter_free(lcs_adapter * adapter) {
    lcs::free_handle(adapter);
}

int32_t lcs_adapter_meta_count(const lcs_adapter * adapter) {
    return adapter == nullptr || adapter->forked() ? 0 : static_cast<int32_t>(adapter->box->metadata.size());
}

lcs_status lcs_adapter_meta_at(
        const lcs_adapter * adapter, int32_t i, const char ** key_out, const char ** value_out) {
    return lcs::guard([&] {
        lcs::require_alive(adapter, "adapter");
        lcs::give_meta(adapter->box->metadata, i, key_out, value_out);
    });
}

} // extern "C"
