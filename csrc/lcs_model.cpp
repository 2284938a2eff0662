// Owns models: the load, what is read from a model once, and its life. Weights are shared by every handle made of them.
#include "lcs_model.hpp"

#include "ggml-backend.h"

#include <algorithm>
#include <cctype>
#include <cmath>

namespace lcs {

model_box::~model_box() {
    llama_model_free(model);
}

namespace {

// "load_tensors: missing tensor 'x'" without the function.
std::string without_function(const std::string & text) {
    const size_t end = text.find(": ");
    if (end == std::string::npos || text.substr(0, end).find('_') == std::string::npos) {
        return text;
    }
    const bool name = std::all_of(text.begin(), text.begin() + static_cast<std::ptrdiff_t>(end), [](unsigned char c) {
        return std::isalnum(c) != 0 || c == '_' || c == ':';
    });
    return name ? without_function(text.substr(end + 2)) : text;
}

struct progress {
    lcs_progress_fn fn;
    void *          data;
    bool            cancelled = false;
};

bool on_progress(float fraction, void * data) {
    auto & p = *static_cast<progress *>(data);
    if (p.fn != nullptr && !p.fn(fraction, p.data)) {
        p.cancelled = true;
    }
    return !p.cancelled;
}

// The NULL-terminated list that llama.cpp takes.
std::vector<ggml_backend_dev_t> find_devices(const lcs_model_params & params) {
    std::vector<ggml_backend_dev_t> found;
    require_range("n_devices", static_cast<int64_t>(std::min<size_t>(params.n_devices, INT32_MAX)), 0,
                  static_cast<int64_t>(llama_max_devices()));
    for (size_t i = 0; i < params.n_devices; ++i) {
        require(params.devices[i], "a device name");
        const std::string        name = params.devices[i];
        const ggml_backend_dev_t device = ggml_backend_dev_by_name(name.c_str());
        if (device == nullptr || ggml_backend_dev_type(device) == GGML_BACKEND_DEVICE_TYPE_CPU ||
            ggml_backend_dev_type(device) == GGML_BACKEND_DEVICE_TYPE_META) {
            fail(LCS_STATUS_ARG, "device \"" + name + "\" is none that takes weights", "devices", "", name);
        }
        if (std::find(found.begin(), found.end(), device) != found.end()) {
            fail(LCS_STATUS_ARG, "device \"" + name + "\" is given twice", "devices", "", name);
        }
        found.push_back(device);
    }
    found.push_back(nullptr);
    return found;
}

std::vector<float> read_tensor_split(const lcs_model_params & params) {
    require_range("n_tensor_split", static_cast<int64_t>(std::min<size_t>(params.n_tensor_split, INT32_MAX)), 0,
                  static_cast<int64_t>(llama_max_devices()));
    std::vector<float> split(llama_max_devices(), 0.0f);
    for (size_t i = 0; i < params.n_tensor_split; ++i) {
        require_finite("tensor_split", params.tensor_split[i], 0.0, 1e30);
        split[i] = params.tensor_split[i];
    }
    return split;
}

void judge_params(const lcs_model_params & params) {
    require_range("split_mode", params.split_mode, LCS_SPLIT_MODE_NONE, LCS_SPLIT_MODE_TENSOR);
    require_range("main_gpu", params.main_gpu, 0, static_cast<int64_t>(llama_max_devices()) - 1);
    if (params.devices == nullptr && params.n_devices != 0) {
        fail(LCS_STATUS_ARG, "devices is NULL");
    }
    if (params.tensor_split == nullptr && params.n_tensor_split != 0) {
        fail(LCS_STATUS_ARG, "tensor_split is NULL");
    }
    if (params.split_mode == LCS_SPLIT_MODE_NONE && params.n_devices != 0) {
        require_range("main_gpu", params.main_gpu, 0, static_cast<int64_t>(params.n_devices) - 1);
    }
}

llama_load_mode load_mode(const lcs_model_params & params) {
    if (params.use_mlock) {
        return params.use_mmap ? LLAMA_LOAD_MODE_MMAP_MLOCK : LLAMA_LOAD_MODE_MLOCK;
    }
    return params.use_mmap ? LLAMA_LOAD_MODE_AUTO : LLAMA_LOAD_MODE_NONE; // AUTO: mmap where every device can
}

int32_t memory_kind(const model_box & box) {
    // create_memory() makes none for these.
    static const char * const NONE[] = {
        "bert", "jina-bert-v2", "jina-bert-v3", "nomic-bert", "nomic-bert-moe", "neo-bert", "eurobert",
        "wavtokenizer-dec", "modern-bert", "gemma-embedding", "dream", "llada", "llada-moe", "rnd1"};
    if (box.info.vocab_only || std::find(std::begin(NONE), std::end(NONE), box.architecture) != std::end(NONE)) {
        return LCS_MEMORY_KIND_NONE;
    }
    if (llama_model_is_recurrent(box.model)) {
        return LCS_MEMORY_KIND_RECURRENT;
    }
    if (llama_model_is_hybrid(box.model)) {
        return LCS_MEMORY_KIND_HYBRID;
    }
    return box.info.n_swa > 0 ? LCS_MEMORY_KIND_SWA : LCS_MEMORY_KIND_ATTENTION;
}

// llama.cpp's getters of shapes assert on a model loaded without weights: it has not read them.
void read_shapes(model_box & box, const gguf_header & header) {
    lcs_model_info & info = box.info;
    if (!info.vocab_only) {
        info.n_ctx_train = llama_model_n_ctx_train(box.model);
        info.n_embd = llama_model_n_embd(box.model);
        info.n_embd_out = llama_model_n_embd_out(box.model);
        info.n_layer = llama_model_n_layer(box.model);
        info.n_layer_nextn = llama_model_n_layer_nextn(box.model);
        info.n_head = llama_model_n_head(box.model);
        info.n_head_kv = llama_model_n_head_kv(box.model);
        info.n_swa = llama_model_n_swa(box.model);
        info.rope_type = llama_model_rope_type(box.model);
        info.rope_freq_scale_train = llama_model_rope_freq_scale_train(box.model);
        info.ftype = llama_model_ftype(box.model);
        return;
    }
    // One number for all layers, or one for each: the first.
    const auto shape = [&](const std::string & name, int32_t absent) {
        const std::string          key = box.architecture + "." + name;
        const gguf_header::value * v = header.find(key);
        const bool                 listed = v != nullptr && v->is_array && v->n > 0;
        const int64_t value = listed ? header.integer_at(*v, 0) : header.integer(key).value_or(absent);
        return static_cast<int32_t>(std::clamp<int64_t>(value, INT32_MIN, INT32_MAX));
    };
    info.n_ctx_train = shape("context_length", 0);
    info.n_embd = shape("embedding_length", 0);
    info.n_embd_out = shape("embedding_length_out", info.n_embd);
    info.n_layer_nextn = shape("nextn_predict_layers", 0);
    info.n_layer = shape("block_count", 0) - info.n_layer_nextn;
    info.n_head = shape("attention.head_count", 0);
    info.n_head_kv = shape("attention.head_count_kv", info.n_head);
    info.n_swa = shape("attention.sliding_window", 0);
    info.rope_type = LLAMA_ROPE_TYPE_NONE;
    const double factor = header.number(box.architecture + ".rope.scaling.factor").value_or(1.0);
    info.rope_freq_scale_train = factor > 0.0 ? static_cast<float>(1.0 / factor) : 1.0f;
    info.ftype = static_cast<int32_t>(header.integer("general.file_type").value_or(LLAMA_FTYPE_GUESSED));
}

} // namespace

load_request::load_request(const lcs_model_params & params) {
    judge_params(params);
    devices = find_devices(params);
    split = read_tensor_split(params);
    raw = llama_model_default_params();
    raw.devices = params.devices == nullptr ? nullptr : devices.data();
    raw.n_gpu_layers = params.n_gpu_layers;
    raw.split_mode = static_cast<llama_split_mode>(params.split_mode);
    raw.main_gpu = params.main_gpu;
    raw.tensor_split = params.tensor_split == nullptr ? nullptr : split.data();
    raw.load_mode = load_mode(params);
    raw.check_tensors = params.check_tensors;
    raw.use_extra_bufts = params.use_extra_bufts;
    raw.load_mtp = params.load_mtp;
}

void read_model(model_box & box, const gguf_header & header, bool vocab_only) {
    box.vocab = llama_model_get_vocab(box.model);
    box.architecture = header.text("general.architecture").value_or("");
    box.metadata = header.scalars();
    // Architecture, shapes, metadata and vocabulary are the header; nothing else of it is worth telling apart.
    box.fingerprint = lcs_hash(header.bytes().data(), header.bytes().size());

    lcs_model_info & info = box.info;
    info.vocab_only = vocab_only;
    info.n_params = llama_model_n_params(box.model);
    info.n_bytes = llama_model_size(box.model);
    info.n_vocab = llama_vocab_n_tokens(box.vocab);
    info.vocab_type = llama_vocab_type(box.vocab);
    info.has_encoder = llama_model_has_encoder(box.model);
    info.has_decoder = llama_model_has_decoder(box.model);
    info.is_diffusion = llama_model_is_diffusion(box.model);
    read_shapes(box, header);
    info.memory_kind = memory_kind(box);

    char description[256];
    llama_model_desc(box.model, description, sizeof description);
    box.description = description[0] != '\0' ? description : box.architecture;
    read_specials(box);
}

namespace {

std::shared_ptr<model_box> load_model(const std::string & path, const lcs_model_params & params) {
    load_request request(params);
    fault_point();
    std::vector<gguf_header> parts = read_model_file(path);
    fault_point();
    if (!params.vocab_only) {
        require_weights_fit(parts, request, params.use_mmap && llama_supports_mmap());
    }
    const gguf_header & header = parts.front();
    auto box = std::make_shared<model_box>();
    box->path = path;

    progress observed{params.progress, params.progress_data};
    request.raw.vocab_only = params.vocab_only;
    request.raw.progress_callback = on_progress;
    request.raw.progress_callback_user_data = &observed;

    fault_point();
    const trapped_aborts trapped(LCS_STATUS_LOAD);
    box->model = llama_model_load_from_file(path.c_str(), request.raw);
    if (observed.cancelled) {
        fail(LCS_STATUS_CANCELLED, "the load was cancelled");
    }
    if (box->model == nullptr) {
        fail_load(log_last_line());
    }
    fault_point();
    read_model(*box, header, params.vocab_only);
    return box;
}

const model_box * box_of(const lcs_model * model) {
    return model == nullptr || model->forked() ? nullptr : model->box.get();
}

} // namespace

void fail_load(const std::string & log_line) {
    std::string reason = log_line;
    if (const size_t at = reason.rfind("error loading model"); at != std::string::npos) {
        reason = reason.substr(at);
        if (const size_t colon = reason.find(": "); colon != std::string::npos) {
            reason = reason.substr(colon + 2);
        }
    }
    reason = without_function(reason);
    const bool memory = reason.find("bad_alloc") != std::string::npos ||
                        reason.find("unable to allocate") != std::string::npos ||
                        reason.find("failed to allocate") != std::string::npos;
    fail(memory ? LCS_STATUS_NOMEM : LCS_STATUS_LOAD,
         reason.empty() ? "llama.cpp refused it without a reason" : reason);
}

} // namespace lcs

extern "C" {

void lcs_model_params_init(lcs_model_params * params_out) {
    if (params_out == nullptr) {
        return;
    }
    lcs_model_params params{};
    params.n_gpu_layers = -1;
    params.split_mode = LCS_SPLIT_MODE_LAYER;
    params.use_mmap = true;
    params.use_extra_bufts = true;
    *params_out = params;
}

lcs_status lcs_model_load(const char * path, const lcs_model_params * params, lcs_model ** model_out) {
    return lcs::guard([&] {
        lcs::require(path, "path");
        lcs::require(model_out, "model_out");
        lcs_model_params given;
        lcs_model_params_init(&given);
        if (params != nullptr) {
            given = *params;
        }
        lcs::init_once();
        lcs::fault_point();
        auto handle = std::make_unique<lcs_model>();
        handle->box = lcs::load_model(path, given);
        *model_out = handle.release();
    });
}

void lcs_model_free(lcs_model * model) {
    lcs::free_handle(model);
}

lcs_status lcs_model_get_info(const lcs_model * model, lcs_model_info * info_out) {
    return lcs::guard([&] {
        lcs::require_alive(model, "model");
        lcs::require(info_out, "info_out");
        *info_out = model->box->info;
    });
}

const char * lcs_model_description(const lcs_model * model) {
    const lcs::model_box * box = lcs::box_of(model);
    return box == nullptr ? "" : box->description.c_str();
}

const char * lcs_model_architecture(const lcs_model * model) {
    const lcs::model_box * box = lcs::box_of(model);
    return box == nullptr ? "" : box->architecture.c_str();
}

const char * lcs_model_chat_template(const lcs_model * model, const char * name) {
    const lcs::model_box * box = lcs::box_of(model);
    if (box == nullptr) {
        return nullptr;
    }
    try {
        return llama_model_chat_template(box->model, name);
    } catch (...) { // it builds the key's text
        return nullptr;
    }
}

int32_t lcs_model_meta_count(const lcs_model * model) {
    const lcs::model_box * box = lcs::box_of(model);
    return box == nullptr ? 0 : static_cast<int32_t>(box->metadata.size());
}

lcs_status lcs_model_meta_at(const lcs_model * model, int32_t i, const char ** key_out, const char ** value_out) {
    return lcs::guard([&] {
        lcs::require_alive(model, "model");
        lcs::give_meta(model->box->metadata, i, key_out, value_out);
    });
}

} // extern "C"
