// Owns headers: what a model's file says without its weights, and what the model would need.
//
// llama.cpp alone knows where it puts a tensor, which layers keep a window and how large its compute buffers are. So it
// is given the model's double, a file of the same keys and tensors without vocabulary and without data, loads that with
// no_alloc, and is asked. The double takes milliseconds, whatever the model's size.
#include "lcs_context.hpp"
#include "lcs_model.hpp"

#include "llama-ext.h"
#include "llama-model.h"

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <map>
#include <unordered_map>

#if defined(__linux__)
#    include <sys/mman.h>
#endif
#if !defined(_WIN32)
#    include <sys/resource.h>
#    include <unistd.h>
#endif

namespace lcs {

namespace {

// Where a tensor lies in its file.
struct place {
    size_t   part;
    uint64_t begin;
    uint64_t end;
};

class double_file {
public:
    explicit double_file(const std::vector<gguf_header> & parts) {
        std::string text = header_of(parts);
        file_.reset(open());
        if (!file_ || std::fwrite(text.data(), 1, text.size(), file_.get()) != text.size() ||
            std::fflush(file_.get()) != 0 || !extend(text.size() + n_data_)) {
            fail(LCS_STATUS_NOMEM, std::string("no file for the model's double: ") + std::strerror(errno));
        }
        std::rewind(file_.get());
    }

    std::FILE * get() const { return file_.get(); }

private:
    struct closer {
        void operator()(std::FILE * f) const { std::fclose(f); }
    };

    template <class T>
    static void put(std::string & out, T value) {
        out.append(reinterpret_cast<const char *>(&value), sizeof value);
    }

    static void put_text(std::string & out, std::string_view text) {
        put(out, uint64_t{text.size()});
        out += text;
    }

    std::string header_of(const std::vector<gguf_header> & parts) {
        const gguf_header &           first = parts.front();
        std::string                   values;
        uint64_t                      n_values = 0;
        const gguf_header::value *    tokens = first.find("tokenizer.ggml.tokens");
        const std::string             vocab_size =
                std::string(first.text("general.architecture").value_or("")) + ".vocab_size";
        const bool                    has_tokens = tokens != nullptr && tokens->is_array;
        for (const std::string & key : first.keys()) {
            const gguf_header::value & v = *first.find(key);
            const bool of_tokenizer = key.rfind("tokenizer.", 0) == 0 && (v.is_array || key == "tokenizer.ggml.model");
            if (of_tokenizer || key.rfind("split.", 0) == 0 || key == "general.alignment" ||
                (has_tokens && key == vocab_size)) {
                continue;
            }
            values += first.record(v);
            ++n_values;
        }
        put_text(values, "tokenizer.ggml.model");
        put(values, uint32_t{GGUF_TYPE_STRING});
        put_text(values, "none"); // llama.cpp then makes up as many tokens as it is told
        ++n_values;
        if (has_tokens) {
            put_text(values, vocab_size);
            put(values, uint32_t{GGUF_TYPE_UINT32});
            put(values, static_cast<uint32_t>(tokens->n));
            ++n_values;
        }

        std::string tensors;
        uint64_t    n_tensors = 0;
        for (const gguf_header & part : parts) {
            for (const gguf_header::tensor & t : part.tensors()) {
                put_text(tensors, t.name);
                put(tensors, t.n_dims);
                for (uint32_t d = 0; d < t.n_dims; ++d) {
                    put(tensors, t.ne[d]);
                }
                put(tensors, static_cast<uint32_t>(t.type));
                put(tensors, n_data_);
                n_data_ += padded(t.n_bytes);
                ++n_tensors;
            }
        }

        std::string out = GGUF_MAGIC;
        put(out, uint32_t{GGUF_VERSION});
        put(out, n_tensors);
        put(out, n_values);
        out += values;
        out += tensors;
        out.resize(padded(out.size()));
        return out;
    }

    static uint64_t padded(uint64_t n) { return (n + GGUF_DEFAULT_ALIGNMENT - 1) / GGUF_DEFAULT_ALIGNMENT *
                                                GGUF_DEFAULT_ALIGNMENT; }

    static std::FILE * open() {
#if defined(__linux__)
        const int fd = memfd_create("llamacppshim-double", MFD_CLOEXEC);
        if (fd >= 0) {
            std::FILE * file = fdopen(fd, "w+b");
            if (file == nullptr) {
                close(fd);
            }
            return file;
        }
#endif
        return std::tmpfile();
    }

    // A hole where the data would be: it takes no memory.
    bool extend(uint64_t n_bytes) const {
#if defined(_WIN32)
        (void) n_bytes;
        return false;
#else
        rlimit limit{};
        if (getrlimit(RLIMIT_FSIZE, &limit) == 0 && n_bytes > limit.rlim_cur) {
            errno = EFBIG; // beyond it the kernel sends a signal
            return false;
        }
        return ftruncate(fileno(file_.get()), static_cast<off_t>(n_bytes)) == 0;
#endif
    }

    std::unique_ptr<std::FILE, closer> file_;
    uint64_t                           n_data_ = 0;
};

int32_t vocab_type(std::string_view tokenizer) {
    static const std::pair<const char *, int32_t> TYPES[] = {
        {"llama", LLAMA_VOCAB_TYPE_SPM},  {"gpt2", LLAMA_VOCAB_TYPE_BPE},      {"hybriddna", LLAMA_VOCAB_TYPE_BPE},
        {"gemma4", LLAMA_VOCAB_TYPE_BPE}, {"whitespace", LLAMA_VOCAB_TYPE_BPE}, {"bert", LLAMA_VOCAB_TYPE_WPM},
        {"t5", LLAMA_VOCAB_TYPE_UGM},     {"rwkv", LLAMA_VOCAB_TYPE_RWKV},     {"plamo2", LLAMA_VOCAB_TYPE_PLAMO2}};
    for (const auto & [name, type] : TYPES) {
        if (tokenizer == name) {
            return type;
        }
    }
    return LLAMA_VOCAB_TYPE_NONE;
}

} // namespace

} // namespace lcs

struct lcs_header : lcs::handle, lcs::counted<lcs::kind::header> {
    std::shared_ptr<lcs::model_box>             box; // of the double
    lcs_header_info                             info{};
    std::string                                 tokenizer;
    std::vector<lcs_header_type>                types;
    std::unordered_map<std::string, lcs::place> places;
    std::map<std::string, std::string>          mapped_names; // of buffer types whose tensors are mapped
    bool                                        mapped = false;
};

namespace lcs {

namespace {

void read_parts(lcs_header & header, const std::vector<gguf_header> & parts) {
    lcs_header_info &                    info = header.info;
    std::map<ggml_type, lcs_header_type> types;
    for (size_t i = 0; i < parts.size(); ++i) {
        info.n_file_bytes += parts[i].file_bytes();
        info.n_tensors += static_cast<int32_t>(parts[i].tensors().size());
        for (const gguf_header::tensor & t : parts[i].tensors()) {
            if (!header.places.emplace(t.name, place{i, t.offset, t.offset + t.n_bytes}).second) {
                fail(LCS_STATUS_LOAD, "two parts have the same tensor");
            }
            lcs_header_type & type = types[t.type];
            type.name = ggml_type_name(t.type);
            type.n_tensors += 1;
            type.n_bytes += t.n_bytes;
        }
    }
    for (const auto & [_, type] : types) {
        header.types.push_back(type);
    }
    const gguf_header & first = parts.front();
    header.tokenizer = first.text("tokenizer.ggml.model").value_or("");
    info.tokenizer = header.tokenizer.c_str();
    info.version = first.version();
    info.n_parts = static_cast<int32_t>(parts.size());
    info.n_header_bytes = first.bytes().size();
    info.n_types = static_cast<int32_t>(header.types.size());
}

void load_double(model_box & box, const std::vector<gguf_header> & parts, llama_model_params raw) {
    raw.no_alloc = true;
    raw.load_mode = LLAMA_LOAD_MODE_NONE;
    raw.check_tensors = false;
    fault_point();
    const double_file    file(parts);
    const quiet_log      quiet; // it would tell of the double: made-up tokens, missing files
    const trapped_aborts trapped(LCS_STATUS_LOAD);
    box.model = llama_model_load_from_file_ptr(file.get(), raw);
    if (box.model == nullptr) {
        fail_load(log_last_line());
    }
}

std::unique_ptr<lcs_header> read_header(const std::string & path, const lcs_model_params & params) {
    load_request request(params);
    fault_point();
    const std::vector<gguf_header> parts = read_model_file(path);
    fault_point();
    auto header = std::make_unique<lcs_header>();
    read_parts(*header, parts);
    header->mapped = params.use_mmap && llama_supports_mmap();
    header->box = std::make_shared<model_box>();
    header->box->path = path;

    load_double(*header->box, parts, request.raw);
    fault_point();
    read_model(*header->box, parts.front(), false);

    lcs_header_info &     info = header->info;
    const llama_hparams & h = header->box->model->hparams;
    info.model = header->box->info;
    info.model.vocab_type = vocab_type(header->tokenizer);
    info.n_layer_all = static_cast<int32_t>(h.n_layer_all);
    info.n_expert = static_cast<int32_t>(h.n_expert);
    info.n_expert_used = static_cast<int32_t>(h.n_expert_used_max());
    return header;
}

// llama.cpp maps, of each file, the stretch from the first to the last tensor that stays where it is.
uint64_t mapped_bytes(const lcs_header & header, ggml_backend_buffer_type_t type) {
    std::map<size_t, std::pair<uint64_t, uint64_t>> stretches;
    for (const auto & [name, tensor] : header.box->model->tensors_by_name) {
        const auto found = header.places.find(name);
        if (found == header.places.end() || ggml_backend_buffer_get_type(tensor->buffer) != type) {
            continue;
        }
        const place & p = found->second;
        auto &        stretch = stretches.try_emplace(p.part, p.begin, p.end).first->second;
        stretch = {std::min(stretch.first, p.begin), std::max(stretch.second, p.end)};
    }
    uint64_t bytes = 0;
    for (const auto & [_, stretch] : stretches) {
        bytes += stretch.second - stretch.first;
    }
    return bytes;
}

bool can_be_mapped(ggml_backend_buffer_type_t type) {
    ggml_backend_dev_t device = ggml_backend_buft_get_device(type);
    if (device == nullptr) { // the CPU's own type names none
        device = ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU);
    }
    ggml_backend_dev_props props;
    ggml_backend_dev_get_props(device, &props);
    return props.caps.buffer_from_host_ptr && type == ggml_backend_dev_buffer_type(device);
}

llama_memory_breakdown dry_run(model_box & box, const llama_context_params & params) {
    fault_point();
    const quiet_log      quiet;
    const trapped_aborts trapped(LCS_STATUS_INTERNAL);
    const context_ptr    ctx = make_context(box, params);
    fault_point();
    return llama_get_memory_breakdown(ctx.get());
}

std::vector<lcs_memory_use> measure(lcs_header & header, const lcs_context_params & given) {
    model_box &                box = *header.box;
    const llama_context_params params = judge_context(box, given);
    require_dry_run_fits(box, params);
    llama_memory_breakdown uses = dry_run(box, params);
    if (params.n_ubatch < params.n_seq_max) {
        // A dry run tells of the graph of one ubatch. One token for each sequence is more here, and is reserved too.
        llama_context_params more = params;
        more.n_ubatch = params.n_seq_max;
        for (const auto & [type, use] : dry_run(box, more)) {
            uses[type].compute = std::max(uses[type].compute, use.compute);
        }
    }
    std::vector<lcs_memory_use> found;
    for (const auto & [type, use] : uses) {
        const char * name = ggml_backend_buft_name(type);
        uint64_t     model = use.model;
        if (header.mapped && model > 0 && can_be_mapped(type)) {
            const std::string & mapped = header.mapped_names.try_emplace(name, std::string(name) + "_Mapped").first->second;
            found.push_back({mapped.c_str(), mapped_bytes(header, type), 0, 0});
            model = 0;
        }
        found.push_back({name, model, use.context, use.compute});
    }
    found.push_back({"output", 0, 0, first_output_floats(box, params) * sizeof(float)});
    return found;
}

} // namespace

void require_weights_fit(const std::vector<gguf_header> & parts, const load_request & request, bool mapped) {
    uint64_t n_bytes = 0;
    for (const gguf_header & part : parts) {
        for (const gguf_header::tensor & t : part.tensors()) {
            n_bytes += t.n_bytes;
        }
    }
    const uint64_t available = available_memory_bytes();
    if (n_bytes <= available / 2) {
        return; // whatever is copied: a repacked tensor is about as large as it was
    }
    model_box box;
    try {
        load_double(box, parts, request.raw);
    } catch (const failure &) {
        return; // no verdict: the load itself says what is wrong with the file
    }
    uint64_t needed = 0;
    for (const auto & [type, bytes] : box.model->memory_breakdown()) {
        const ggml_backend_dev_t device = ggml_backend_buft_get_device(type);
        const bool on_host = device == nullptr || ggml_backend_dev_type(device) == GGML_BACKEND_DEVICE_TYPE_CPU;
        needed += on_host && !(mapped && can_be_mapped(type)) ? bytes : 0;
    }
    require_available("the model", needed, available);
}

} // namespace lcs

extern "C" {

lcs_status lcs_header_read(const char * path, const lcs_model_params * params, lcs_header ** header_out) {
    return lcs::guard([&] {
        lcs::require(path, "path");
        lcs::require(header_out, "header_out");
        lcs_model_params given;
        lcs_model_params_init(&given);
        if (params != nullptr) {
            given = *params;
        }
        lcs::init_once();
        lcs::fault_point();
        *header_out = lcs::read_header(path, given).release();
    });
}

void lcs_header_free(lcs_header * header) {
    lcs::free_handle(header);
}

lcs_status lcs_header_get_info(const lcs_header * header, lcs_header_info * info_out) {
    return lcs::guard([&] {
        lcs::require_alive(header, "header");
        lcs::require(info_out, "info_out");
        *info_out = header->info;
    });
}

const char * lcs_header_architecture(const lcs_header * header) {
    return header == nullptr || header->forked() ? "" : header->box->architecture.c_str();
}

lcs_status lcs_header_layer_at(const lcs_header * header, int32_t i, lcs_header_layer * layer_out) {
    return lcs::guard([&] {
        lcs::require_alive(header, "header");
        lcs::require(layer_out, "layer_out");
        lcs::require_range("i", i, 0, int64_t{header->info.n_layer_all} - 1);
        *layer_out = lcs::layer_of(*header->box, static_cast<uint32_t>(i));
    });
}

lcs_status lcs_header_type_at(const lcs_header * header, int32_t i, lcs_header_type * type_out) {
    return lcs::guard([&] {
        lcs::require_alive(header, "header");
        lcs::require(type_out, "type_out");
        lcs::require_range("i", i, 0, static_cast<int64_t>(header->types.size()) - 1);
        *type_out = header->types[i];
    });
}

int32_t lcs_header_meta_count(const lcs_header * header) {
    return header == nullptr || header->forked() ? 0 : static_cast<int32_t>(header->box->metadata.size());
}

lcs_status lcs_header_meta_at(
        const lcs_header * header, int32_t i, const char ** key_out, const char ** value_out) {
    return lcs::guard([&] {
        lcs::require_alive(header, "header");
        lcs::give_meta(header->box->metadata, i, key_out, value_out);
    });
}

lcs_status lcs_header_measure(
        lcs_header * header, const lcs_context_params * params, lcs_memory_use * entries, size_t capacity,
        size_t * n_out) {
    return lcs::guard([&] {
        const lcs::entered entered(header, "header");
        lcs::require(n_out, "n_out");
        lcs_context_params given;
        lcs_context_params_init(&given);
        if (params != nullptr) {
            given = *params;
        }
        lcs::give_uses(lcs::measure(*header, given), entries, capacity, n_out);
    });
}

} // extern "C"
