// The reader of GGUF headers: every count and length is checked against the bytes of the file before it is believed.
#pragma once

#include "ggml.h"
#include "gguf.h"

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

namespace lcs {

// A header as read, values in file order. Knows the format, not what keys mean. Throws failure(LOAD).
class gguf_header {
public:
    // A scalar, or an array of scalars or texts. Bytes stay in the header's buffer.
    struct value {
        gguf_type type = GGUF_TYPE_COUNT; // of the scalar, or of each element
        bool      is_array = false;
        uint64_t  n = 1;
        size_t    at = 0;    // where its bytes begin
        size_t    begin = 0; // of its record: key, type, value
        size_t    end = 0;
    };

    struct tensor {
        std::string name;
        ggml_type   type = GGML_TYPE_COUNT;
        uint32_t    n_dims = 0;
        int64_t     ne[GGML_MAX_DIMS] = {1, 1, 1, 1};
        uint64_t    n_bytes = 0;
        uint64_t    offset = 0; // from the start of the file
    };

    // Reads the file only as far as its header goes.
    explicit gguf_header(const std::string & path);
    // A whole file in memory; borrowed for the call.
    gguf_header(const void * data, size_t n_bytes);

    uint32_t version() const { return version_; }
    uint64_t file_bytes() const { return file_bytes_; }
    uint64_t data_offset() const { return data_offset_; }
    uint32_t alignment() const { return alignment_; }

    const std::vector<tensor> &      tensors() const { return tensors_; }
    const std::vector<std::string> & keys() const { return keys_; }

    const tensor * find_tensor(const std::string & name) const;
    const value *  find(const std::string & key) const;

    // The scalar under key, whatever its width; nothing where it is absent, an array or another kind.
    std::optional<int64_t>          integer(const std::string & key) const;
    std::optional<double>           number(const std::string & key) const;
    std::optional<std::string_view> text(const std::string & key) const;

    // Every scalar as text, in file order, written as llama.cpp writes them.
    std::vector<std::pair<std::string, std::string>> scalars() const;

    // The bytes of the header, from the magic to the last tensor.
    std::string_view bytes() const { return std::string_view(buffer_).substr(0, header_bytes_); }

    // Element i of an array of integers; i < v.n.
    int64_t integer_at(const value & v, uint64_t i) const;

    // The record of a value as it is in the file.
    std::string_view record(const value & v) const {
        return std::string_view(buffer_).substr(v.begin, v.end - v.begin);
    }

    // Lets go of what of the tensors' data was read on the way.
    void trim() {
        buffer_.resize(header_bytes_);
        buffer_.shrink_to_fit();
    }

    // Calls visit(std::string_view) for each text of an array of texts.
    template <class Visit>
    void each_text(const value & v, Visit && visit) const {
        size_t at = v.at;
        for (uint64_t i = 0; i < v.n; ++i) {
            const std::string_view text = text_at(at);
            at += sizeof(uint64_t) + text.size();
            visit(text);
        }
    }

private:
    class source;

    void             read(source & in);
    void             read_values(source & in, uint64_t n);
    void             read_tensors(source & in, uint64_t n);
    std::string_view text_at(size_t at) const;
    template <class T>
    T load(size_t at) const;

    std::string                             buffer_; // the header's bytes, and some of the data behind it
    size_t                                  header_bytes_ = 0;
    uint32_t                                version_ = 0;
    uint64_t                                file_bytes_ = 0;
    uint64_t                                data_offset_ = 0;
    uint32_t                                alignment_ = GGUF_DEFAULT_ALIGNMENT;
    std::vector<std::string>                keys_;
    std::vector<value>                      values_;
    std::unordered_map<std::string, size_t> index_;
    std::vector<tensor>                     tensors_;
    std::unordered_map<std::string, size_t> tensor_index_;
};

// What a header says llama.cpp would die of, or misread. Throws failure(LOAD) with the reason.
void judge_model(const gguf_header & header);
void judge_adapter(const gguf_header & header);

// Read and judged: one header, or those of every part of a split model, in order.
std::vector<gguf_header> read_model_file(const std::string & path);
gguf_header read_adapter_file(const std::string & path);

} // namespace lcs
