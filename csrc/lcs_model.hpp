// What the loader of models shares with the reader of headers, which makes the same model without its weights.
#pragma once

#include "lcs_gguf.hpp"
#include "lcs_internal.hpp"

namespace lcs {

// llama.cpp's parameters of a load, judged, with the lists that they point to.
struct load_request {
    std::vector<ggml_backend_dev_t> devices; // NULL-terminated
    std::vector<float>              split;
    llama_model_params              raw{};

    explicit load_request(const lcs_model_params & params);
    load_request(const load_request &) = delete;
    load_request & operator=(const load_request &) = delete;
};

// Fills the box of a model that llama.cpp has made from this header.
void read_model(model_box & box, const gguf_header & header, bool vocab_only);

// header.cpp: NOMEM unless the machine has room for the weights that get memory of their own: those that are not mapped,
// and repacked copies. Linux would promise the memory and kill the process when it is written.
void require_weights_fit(const std::vector<gguf_header> & parts, const load_request & request, bool mapped);

} // namespace lcs
