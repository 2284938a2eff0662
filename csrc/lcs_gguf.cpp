// Owns the reading of GGUF headers, and the judgement of what llama.cpp would assert, crash or hang on while loading.
#include "lcs_gguf.hpp"

#include "lcs_internal.hpp"

#define XXH_INLINE_ALL
#include "hash/xxhash/xxhash.h"

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <deque>
#include <filesystem>
#include <limits>
#include <random>

namespace lcs {

namespace {

[[noreturn]] void refuse(std::string reason) {
    fail(LCS_STATUS_LOAD, std::move(reason));
}

// For messages: what a damaged file calls a name may be anything.
std::string shown(std::string_view text) {
    constexpr size_t MOST = 80;
    std::string      out = "\"";
    for (const char c : text.substr(0, MOST)) {
        out += static_cast<unsigned char>(c) < 0x20 || c == 0x7f ? '?' : c;
    }
    return out + (text.size() > MOST ? "...\"" : "\"");
}

// llama.cpp reads texts as C strings.
std::string_view up_to_nul(std::string_view text) {
    return text.substr(0, text.find('\0'));
}

bool is_integer(gguf_type type) {
    switch (type) {
        case GGUF_TYPE_UINT8:
        case GGUF_TYPE_INT8:
        case GGUF_TYPE_UINT16:
        case GGUF_TYPE_INT16:
        case GGUF_TYPE_UINT32:
        case GGUF_TYPE_INT32:
        case GGUF_TYPE_UINT64:
        case GGUF_TYPE_INT64:  return true;
        default:               return false;
    }
}

size_t scalar_bytes(gguf_type type) {
    switch (type) {
        case GGUF_TYPE_UINT8:
        case GGUF_TYPE_INT8:
        case GGUF_TYPE_BOOL:    return 1;
        case GGUF_TYPE_UINT16:
        case GGUF_TYPE_INT16:   return 2;
        case GGUF_TYPE_UINT32:
        case GGUF_TYPE_INT32:
        case GGUF_TYPE_FLOAT32: return 4;
        case GGUF_TYPE_UINT64:
        case GGUF_TYPE_INT64:
        case GGUF_TYPE_FLOAT64: return 8;
        default:                return 0;
    }
}

// Of one key-value pair and of one tensor: empty name, type and the smallest value; name, no dimension, type, offset.
// As in gguf.cpp.
constexpr uint64_t GGUF_MAX_ELEMENTS = 1u << 30;
constexpr uint64_t LEAST_VALUE_BYTES = 8 + 4 + 1;
constexpr uint64_t LEAST_TENSOR_BYTES = 8 + 4 + 4 + 8;

} // namespace

// Hands out the file's bytes in order. Grows the buffer by what is there, never by what a length field promises.
class gguf_header::source {
public:
    source(std::string & buffer, uint64_t n_bytes, std::FILE * file)
        : buffer_(buffer), n_bytes_(n_bytes), file_(file) {}

    uint64_t left() const { return n_bytes_ - at_; }
    size_t   at() const { return at_; }

    // Takes n bytes and gives where they begin in the buffer.
    size_t take(uint64_t n, const char * what) {
        if (n > left()) {
            refuse(std::string("truncated: ") + what + " needs " + std::to_string(n) + " bytes, " +
                   std::to_string(left()) + " are left");
        }
        const size_t from = at_;
        at_ += static_cast<size_t>(n);
        if (at_ > buffer_.size()) {
            fill();
        }
        return from;
    }

    template <class T>
    T take(const char * what) {
        const size_t from = take(sizeof(T), what);
        T            value;
        std::memcpy(&value, buffer_.data() + from, sizeof value);
        return value;
    }

    std::string_view take_text(const char * what) {
        const auto   n = take<uint64_t>(what);
        const size_t from = take(n, what);
        return std::string_view(buffer_).substr(from, static_cast<size_t>(n));
    }

private:
    void fill() {
        constexpr uint64_t CHUNK = 1 << 20;
        const size_t       had = buffer_.size();
        const uint64_t     wanted = std::min(n_bytes_, std::max<uint64_t>(at_, had + std::max<uint64_t>(CHUNK, had)));
        buffer_.resize(static_cast<size_t>(wanted));
        if (std::fread(buffer_.data() + had, 1, buffer_.size() - had, file_) != buffer_.size() - had) {
            refuse("cannot be read to its end");
        }
    }

    std::string & buffer_;
    uint64_t      n_bytes_;
    std::FILE *   file_;
    size_t        at_ = 0;
};

gguf_header::gguf_header(const std::string & path) {
    namespace fs = std::filesystem;
    std::error_code error;
    const fs::path  file_path = fs::u8path(path);
    const auto      status = fs::status(file_path, error);
    if (status.type() == fs::file_type::not_found) {
        refuse("no such file");
    }
    if (error) {
        refuse("cannot be opened: " + error.message());
    }
    if (status.type() == fs::file_type::directory) {
        refuse("is a folder");
    }
    if (status.type() != fs::file_type::regular) { // opening a pipe would wait for its writer
        refuse("is no regular file");
    }
    struct closer {
        void operator()(std::FILE * f) const { std::fclose(f); }
    };
    const std::unique_ptr<std::FILE, closer> file(ggml_fopen(path.c_str(), "rb"));
    if (!file) {
        refuse(std::string("cannot be opened: ") + std::strerror(errno));
    }
    file_bytes_ = fs::file_size(file_path, error);
    if (error) {
        refuse("cannot be opened: " + error.message());
    }
    source in(buffer_, file_bytes_, file.get());
    read(in);
}

gguf_header::gguf_header(const void * data, size_t n_bytes)
    : buffer_(static_cast<const char *>(data), n_bytes), file_bytes_(n_bytes) {
    source in(buffer_, file_bytes_, nullptr);
    read(in);
}

void gguf_header::read(source & in) {
    if (file_bytes_ == 0) {
        refuse("is empty");
    }
    const size_t magic = in.take(4, "the magic");
    if (std::memcmp(buffer_.data() + magic, GGUF_MAGIC, 4) != 0) {
        refuse("is no GGUF file: it begins with " + shown(std::string_view(buffer_).substr(magic, 4)));
    }
    version_ = in.take<uint32_t>("the version");
    if (version_ != 0 && (version_ & 0xffff) == 0) {
        refuse("has the byte order of another machine");
    }
    if (version_ < 2 || version_ > GGUF_VERSION) {
        refuse("GGUF version " + std::to_string(version_) + " is outside 2.." + std::to_string(GGUF_VERSION));
    }
    const auto n_tensors = in.take<uint64_t>("the tensor count");
    const auto n_values = in.take<uint64_t>("the key count");
    if (n_values > in.left() / LEAST_VALUE_BYTES) {
        refuse("truncated: claims " + std::to_string(n_values) + " keys in " + std::to_string(in.left()) + " bytes");
    }
    if (n_tensors > in.left() / LEAST_TENSOR_BYTES) {
        refuse("truncated: claims " + std::to_string(n_tensors) + " tensors in " + std::to_string(in.left()) +
               " bytes");
    }
    read_values(in, n_values);
    read_tensors(in, n_tensors);
}

void gguf_header::read_values(source & in, uint64_t n) {
    for (uint64_t i = 0; i < n; ++i) {
        const size_t begin = in.at();
        std::string  key(in.take_text("a key"));
        if (key.empty() || key.find('\0') != std::string::npos) {
            refuse("key " + std::to_string(i) + " is empty or holds a NUL");
        }
        value v;
        v.begin = begin;
        auto type = in.take<uint32_t>("a type");
        v.is_array = type == GGUF_TYPE_ARRAY;
        if (v.is_array) {
            type = in.take<uint32_t>("an element type");
            v.n = in.take<uint64_t>("an array length");
        }
        v.type = static_cast<gguf_type>(type);
        v.at = in.at();
        if (type == GGUF_TYPE_STRING) {
            for (uint64_t k = 0; k < v.n; ++k) {
                in.take_text("a text");
            }
        } else if (const size_t each = type < GGUF_TYPE_COUNT ? scalar_bytes(v.type) : 0; each == 0) {
            refuse(shown(key) + " has the unknown type " + std::to_string(type));
        } else if (v.n > in.left() / each) {
            refuse("truncated: " + shown(key) + " claims " + std::to_string(v.n) + " elements in " +
                   std::to_string(in.left()) + " bytes");
        } else {
            in.take(v.n * each, "a value");
        }
        if (v.n > GGUF_MAX_ELEMENTS) {
            refuse(shown(key) + " has " + std::to_string(v.n) + " elements, most " + std::to_string(GGUF_MAX_ELEMENTS));
        }
        v.end = in.at();
        if (!index_.emplace(key, keys_.size()).second) {
            refuse("has the key " + shown(key) + " twice");
        }
        keys_.push_back(std::move(key));
        values_.push_back(v);
    }
    if (const value * v = find(GGUF_KEY_GENERAL_ALIGNMENT)) {
        if (v->is_array || v->type != GGUF_TYPE_UINT32) {
            refuse("general.alignment is no u32");
        }
        alignment_ = load<uint32_t>(v->at);
        if (alignment_ == 0 || (alignment_ & (alignment_ - 1)) != 0) {
            refuse("general.alignment " + std::to_string(alignment_) + " is no power of two");
        }
    }
}

void gguf_header::read_tensors(source & in, uint64_t n) {
    for (uint64_t i = 0; i < n; ++i) {
        tensor t;
        t.name = in.take_text("a tensor name");
        const std::string name = "tensor " + shown(t.name);
        if (t.name.size() >= GGML_MAX_NAME || t.name.find('\0') != std::string::npos) {
            refuse(name + " has " + std::to_string(t.name.size()) + " bytes in its name, most " +
                   std::to_string(GGML_MAX_NAME - 1) + ", no NUL");
        }
        t.n_dims = in.take<uint32_t>("a tensor's dimensions");
        if (t.n_dims > GGML_MAX_DIMS) {
            refuse(name + " has " + std::to_string(t.n_dims) + " dimensions, most " + std::to_string(GGML_MAX_DIMS));
        }
        int64_t n_elements = 1;
        for (uint32_t d = 0; d < t.n_dims; ++d) {
            t.ne[d] = in.take<int64_t>("a tensor's shape");
            if (t.ne[d] < 1) {
                refuse(name + " has " + std::to_string(t.ne[d]) + " elements in a dimension");
            }
            if (t.ne[d] > std::numeric_limits<int64_t>::max() / n_elements) {
                refuse(name + " has more elements than fit 63 bits");
            }
            n_elements *= t.ne[d];
        }
        const auto type = in.take<uint32_t>("a tensor's type");
        t.type = static_cast<ggml_type>(type);
        // Types that were removed have no block size.
        if (type >= GGML_TYPE_COUNT || ggml_blck_size(t.type) == 0 || ggml_type_size(t.type) == 0) {
            refuse(name + " has the unknown type " + std::to_string(type));
        }
        const int64_t block = ggml_blck_size(t.type);
        if (t.ne[0] % block != 0) {
            refuse(name + " has rows of " + std::to_string(t.ne[0]) + ", no multiple of " + std::to_string(block));
        }
        const uint64_t n_blocks = static_cast<uint64_t>(n_elements / block);
        if (n_blocks > file_bytes_ / ggml_type_size(t.type)) {
            refuse("truncated: " + name + " needs more bytes than the file has");
        }
        t.n_bytes = n_blocks * ggml_type_size(t.type);
        t.offset = in.take<uint64_t>("a tensor's offset");
        if (!tensor_index_.emplace(t.name, tensors_.size()).second) {
            refuse("has the tensor " + shown(t.name) + " twice");
        }
        tensors_.push_back(std::move(t));
    }
    header_bytes_ = in.at();
    const auto padded = [this](uint64_t bytes) { return (bytes + alignment_ - 1) / alignment_ * alignment_; };
    data_offset_ = tensors_.empty() ? in.at() : padded(in.at());
    uint64_t expected = 0;
    for (tensor & t : tensors_) {
        const std::string name = "tensor " + shown(t.name);
        if (t.offset != expected) {
            refuse(name + " is at " + std::to_string(t.offset) + ", expected " + std::to_string(expected));
        }
        // No sum overflows: each size is at most the file's, and the first sum past its end is refused.
        expected += padded(t.n_bytes);
        t.offset += data_offset_;
        if (t.offset > file_bytes_ || t.n_bytes > file_bytes_ - t.offset) {
            refuse("truncated: " + name + " ends at byte " + std::to_string(t.offset + t.n_bytes) + " of " +
                   std::to_string(file_bytes_));
        }
    }
}

template <class T>
T gguf_header::load(size_t at) const {
    T v;
    std::memcpy(&v, buffer_.data() + at, sizeof v);
    return v;
}

std::string_view gguf_header::text_at(size_t at) const {
    const auto n = load<uint64_t>(at);
    return std::string_view(buffer_).substr(at + sizeof n, static_cast<size_t>(n));
}

const gguf_header::value * gguf_header::find(const std::string & key) const {
    const auto it = index_.find(key);
    return it == index_.end() ? nullptr : &values_[it->second];
}

const gguf_header::tensor * gguf_header::find_tensor(const std::string & name) const {
    const auto it = tensor_index_.find(name);
    return it == tensor_index_.end() ? nullptr : &tensors_[it->second];
}

int64_t gguf_header::integer_at(const value & v, uint64_t i) const {
    const size_t at = v.at + static_cast<size_t>(i) * scalar_bytes(v.type);
    switch (v.type) {
        case GGUF_TYPE_UINT8:  return load<uint8_t>(at);
        case GGUF_TYPE_INT8:   return load<int8_t>(at);
        case GGUF_TYPE_UINT16: return load<uint16_t>(at);
        case GGUF_TYPE_INT16:  return load<int16_t>(at);
        case GGUF_TYPE_UINT32: return load<uint32_t>(at);
        case GGUF_TYPE_INT32:  return load<int32_t>(at);
        case GGUF_TYPE_INT64:  return load<int64_t>(at);
        case GGUF_TYPE_UINT64:
            return static_cast<int64_t>(
                    std::min<uint64_t>(load<uint64_t>(at), std::numeric_limits<int64_t>::max()));
        default: return 0;
    }
}

std::optional<int64_t> gguf_header::integer(const std::string & key) const {
    const value * v = find(key);
    if (v == nullptr || v->is_array || !is_integer(v->type)) {
        return std::nullopt;
    }
    return integer_at(*v, 0);
}

std::optional<double> gguf_header::number(const std::string & key) const {
    const value * v = find(key);
    if (v == nullptr || v->is_array || (v->type != GGUF_TYPE_FLOAT32 && v->type != GGUF_TYPE_FLOAT64)) {
        return std::nullopt;
    }
    return v->type == GGUF_TYPE_FLOAT32 ? load<float>(v->at) : load<double>(v->at);
}

std::vector<std::pair<std::string, std::string>> gguf_header::scalars() const {
    std::vector<std::pair<std::string, std::string>> out;
    for (size_t i = 0; i < keys_.size(); ++i) {
        const value & v = values_[i];
        if (v.is_array) {
            continue;
        }
        std::string text;
        switch (v.type) {
            case GGUF_TYPE_STRING:  text = up_to_nul(text_at(v.at)); break;
            case GGUF_TYPE_BOOL:    text = load<int8_t>(v.at) != 0 ? "true" : "false"; break;
            case GGUF_TYPE_FLOAT32: text = std::to_string(load<float>(v.at)); break;
            case GGUF_TYPE_FLOAT64: text = std::to_string(load<double>(v.at)); break;
            case GGUF_TYPE_UINT64:  text = std::to_string(load<uint64_t>(v.at)); break;
            default:                text = std::to_string(integer_at(v, 0)); break;
        }
        out.emplace_back(keys_[i], std::move(text));
    }
    return out;
}

std::optional<std::string_view> gguf_header::text(const std::string & key) const {
    const value * v = find(key);
    if (v == nullptr || v->is_array || v->type != GGUF_TYPE_STRING) {
        return std::nullopt;
    }
    return up_to_nul(text_at(v->at));
}

namespace {

constexpr int64_t MAX_LAYERS = 512;        // LLAMA_MAX_LAYERS
constexpr int64_t MAX_EXPERTS = 1024;      // LLAMA_MAX_EXPERTS
constexpr int64_t MAX_DUMMY_TOKENS = 1 << 22; // for models without a tokenizer llama.cpp makes them up from a number
constexpr int64_t TENSOR_ALIGNMENT = 32;   // of ggml's CPU buffers, into which the file is mapped

// The keys of one architecture: "llama.block_count" is at("block_count").
class hparams {
public:
    explicit hparams(const gguf_header & header)
        : header_(header), architecture_(header.text("general.architecture").value_or("")) {}

    const std::string & architecture() const { return architecture_; }
    bool                is(std::initializer_list<const char *> names) const {
        return std::any_of(names.begin(), names.end(), [this](const char * name) { return architecture_ == name; });
    }

    std::string                     key(const char * name) const { return architecture_ + "." + name; }
    std::optional<int64_t>          integer(const char * name) const { return header_.integer(key(name)); }
    std::optional<std::string_view> text(const char * name) const { return header_.text(key(name)); }

    // The largest of a value that is given once or for each layer; 0 where it is absent.
    int64_t largest(const char * name) const {
        const gguf_header::value * v = header_.find(key(name));
        int64_t                    most = 0;
        for (uint64_t i = 0; v != nullptr && is_integer(v->type) && i < v->n; ++i) {
            most = std::max(most, header_.integer_at(*v, i));
        }
        return most;
    }

    int64_t of_first_layer(const char * name) const {
        const gguf_header::value * v = header_.find(key(name));
        return v != nullptr && is_integer(v->type) && v->n > 0 ? header_.integer_at(*v, 0) : 0;
    }

    void require_range(const char * name, int64_t low, int64_t high) const {
        if (const auto value = integer(name); value && (*value < low || *value > high)) {
            refuse(key(name) + " " + std::to_string(*value) + " is outside " + std::to_string(low) + ".." +
                   std::to_string(high));
        }
    }

private:
    const gguf_header & header_;
    std::string         architecture_;
};

void judge_experts(const hparams & p) {
    const int64_t n_expert = p.integer("expert_count").value_or(0);
    const int64_t n_used = p.largest("expert_used_count");
    const int64_t n_groups = p.integer("expert_group_count").value_or(0);
    const int64_t n_groups_used = p.integer("expert_group_used_count").value_or(0);
    if (n_expert <= 1 && p.is({"hunyuan-dense", "hunyuan_vl"})) {
        return; // llama.cpp takes them as dense
    }
    p.require_range("expert_count", 0, MAX_EXPERTS);
    if (n_used > n_expert || (n_used == 0) != (n_expert == 0)) {
        refuse("uses " + std::to_string(n_used) + " of " + std::to_string(n_expert) + " experts");
    }
    if (n_groups != 0 && n_groups >= n_expert) {
        refuse("has " + std::to_string(n_groups) + " groups of " + std::to_string(n_expert) + " experts");
    }
    if (n_groups > 1 && (n_expert % n_groups != 0 || n_groups_used < 1 || n_groups_used >= n_groups)) {
        refuse("uses " + std::to_string(n_groups_used) + " of " + std::to_string(n_groups) + " groups of " +
               std::to_string(n_expert) + " experts");
    }
}

// Where llama.cpp divides by a number of the file without a look at it.
void judge_divisors(const hparams & p) {
    p.require_range("full_attention_interval", 1, std::numeric_limits<int64_t>::max());
    if (p.is({"rwkv6", "rwkv6qwen2"})) {
        p.require_range("wkv.head_size", 1, std::numeric_limits<int64_t>::max());
    }
    if (p.is({"mamba2", "falcon-h1", "granitehybrid", "nemotron_h", "nemotron_h_moe"})) {
        p.require_range("ssm.group_count", 1, std::numeric_limits<int64_t>::max());
    }
    if (p.is({"deepseek4", "dflash"})) {
        p.require_range("attention.output_group_count", 1, std::numeric_limits<int64_t>::max());
    }
    if (p.is({"olmo2", "phimoe"}) && p.of_first_layer("attention.head_count") == 0) {
        refuse(p.key("attention.head_count") + " is 0 or missing");
    }
    if (p.is({"qwen3next", "qwen35moe", "qwen4exp"}) && p.of_first_layer("expert_used_count") == 0 &&
        p.of_first_layer("expert_feed_forward_length") == 0) {
        refuse(p.key("expert_used_count") + " is 0 or missing");
    }
}

void judge_hparams(const hparams & p) {
    judge_divisors(p);
    p.require_range("block_count", 1, MAX_LAYERS);
    p.require_range("nextn_predict_layers", 0, p.integer("block_count").value_or(MAX_LAYERS));
    judge_experts(p);
    if (const auto type = p.text("rope.scaling.type");
        type && *type != "none" && *type != "linear" && *type != "yarn" && *type != "longrope") {
        refuse(p.key("rope.scaling.type") + " is " + shown(*type));
    }
}

// Bytes that GPT-2's byte alphabet has no character for: llama.cpp writes the whole token again for each of them.
uint64_t undecodable(std::string_view token) {
    uint64_t n = 0;
    for (size_t i = 0; i < token.size();) {
        const auto c = static_cast<unsigned char>(token[i]);
        if (c < 0x80) {
            n += c < 33 || c > 126;
            i += 1;
        } else if (c >= 0xc0 && c < 0xe0 && i + 1 < token.size()) {
            const unsigned cpt = (c & 0x1fu) << 6 | (static_cast<unsigned char>(token[i + 1]) & 0x3fu);
            n += cpt < 161 || cpt == 173 || cpt > 323;
            i += 2;
        } else {
            n += 1;
            i += 1;
        }
    }
    return n;
}

// The first byte of a token in RWKV's escaped writing.
int first_rwkv_byte(std::string_view token, size_t & n_taken) {
    const auto hex = [](char c) { return c >= 'a' ? c - 'a' + 10 : c - '0'; };
    n_taken = 1;
    if (token[0] != '\\') {
        return static_cast<unsigned char>(token[0]);
    }
    if (token.size() < 2) {
        return -1;
    }
    n_taken = 2;
    switch (token[1]) {
        case 't': return '\t';
        case 'n': return '\n';
        case 'r': return '\r';
        case 'x':
            n_taken = 4;
            return token.size() < 4 ? -1 : static_cast<unsigned char>(hex(token[2]) * 16 + hex(token[3]));
        default: return static_cast<unsigned char>(token[1]);
    }
}

// A set of texts that are owned elsewhere: a quarter of the time of std::unordered_set, which a large vocabulary feels.
class word_set {
public:
    void reserve(uint64_t n) {
        size_t n_slots = 16;
        while (n_slots / 2 < n) {
            n_slots *= 2;
        }
        slots_.assign(n_slots, {});
    }

    // False if it is there already. No more words than were reserved.
    bool add(std::string_view word) {
        const uint64_t hash = XXH3_64bits_withSeed(word.data(), word.size(), seed_);
        for (size_t i = hash & (slots_.size() - 1);; i = (i + 1) & (slots_.size() - 1)) {
            slot & s = slots_[i];
            if (s.word.data() == nullptr) {
                s = {hash, word};
                return true;
            }
            if (s.hash == hash && s.word == word) {
                return false;
            }
        }
    }

private:
    struct slot {
        uint64_t         hash = 0;
        std::string_view word;
    };

    const uint64_t    seed_ = std::random_device{}(); // no file can be made whose words all meet
    std::vector<slot> slots_;
};

class vocabulary_judge {
public:
    vocabulary_judge(const gguf_header & header, std::string_view model) : model_(model) {
        const gguf_header::value * types = header.find("tokenizer.ggml.token_type");
        const bool typed = types != nullptr && types->is_array && is_integer(types->type);
        const gguf_header::value * tokens = header.find("tokenizer.ggml.tokens");
        if (tokens == nullptr || !tokens->is_array || tokens->type != GGUF_TYPE_STRING) {
            return; // llama.cpp says so itself
        }
        if (tokens->n == 0) {
            refuse("the vocabulary is empty");
        }
        words_.reserve(tokens->n);
        header.each_text(*tokens, [&](std::string_view text) {
            const uint64_t i = n_++;
            judge(up_to_nul(text), typed && i < types->n ? header.integer_at(*types, i) : TOKEN_NORMAL);
        });
        if (n_undecodable_bytes_ > MAX_UNDECODABLE_BYTES) {
            refuse("the vocabulary does not use the byte alphabet of its tokenizer");
        }
        if (model == "rwkv") {
            judge_rwkv_bytes();
        }
    }

private:
    static constexpr int64_t  TOKEN_NORMAL = 1;
    static constexpr int64_t  TOKEN_BYTE = 6;
    static constexpr uint64_t MAX_UNDECODABLE_BYTES = 1 << 28;

    // Beyond these llama.cpp would run out of stack (tries that recurse for each byte) or of time.
    uint64_t longest_token() const {
        if (model_ == "bert") {
            return 512;
        }
        if (model_ == "plamo2") {
            return 256;
        }
        return model_ == "t5" || model_ == "rwkv" ? 4096 : 65536;
    }

    std::string number() const { return std::to_string(n_ - 1); }

    void judge(std::string_view word, int64_t type) {
        if (word.size() > longest_token()) {
            refuse("token " + number() + " has " + std::to_string(word.size()) + " bytes, most " +
                   std::to_string(longest_token()));
        }
        if (type == TOKEN_BYTE && model_ == "bert") {
            refuse("token " + number() + " is a byte token, which WordPiece does not have");
        }
        if (word.empty()) { // llama.cpp gives it a name, which another token may have already
            made_up_.push_back("[EMPTY_" + number() + "]");
            word = made_up_.back();
        } else if (model_ == "rwkv") {
            size_t    n_taken;
            const int first = first_rwkv_byte(word, n_taken);
            if (first >= 0) {
                begins_[first] = true;
                alone_[first] = alone_[first] || n_taken == word.size();
            }
        }
        if (model_ == "gpt2") {
            n_undecodable_bytes_ += undecodable(word) * (word.size() + 32);
        }
        if (!words_.add(word)) {
            refuse("token " + number() + " has the text " + shown(word) + " of another");
        }
    }

    // llama.cpp's search begins anew at the start of the text where no token at all matches a byte that begins one.
    void judge_rwkv_bytes() const {
        for (int byte = 0; byte < 256; ++byte) {
            if (begins_[byte] && !alone_[byte]) {
                refuse("no token is the single byte " + std::to_string(byte));
            }
        }
    }

    std::string_view                     model_;
    uint64_t                             n_ = 0;
    uint64_t                             n_undecodable_bytes_ = 0;
    word_set                             words_;
    std::deque<std::string>              made_up_;
    bool                                 begins_[256] = {};
    bool                                 alone_[256] = {};
};

void judge_vocabulary(const gguf_header & header, const hparams & p) {
    const auto model = header.text("tokenizer.ggml.model");
    if (!model) {
        return;
    }
    if (*model == "no_vocab" || *model == "none") {
        p.require_range("vocab_size", 0, MAX_DUMMY_TOKENS);
        return;
    }
    if (header.text("tokenizer.ggml.pre").value_or("") == "whitespace" && *model != "whitespace") {
        refuse("the pre-tokenizer \"whitespace\" leaves spaces in words, which " + shown(*model) + " does not take");
    }
    vocabulary_judge(header, *model);
}

void judge_tensors(const gguf_header & header) {
    if (!header.tensors().empty() && header.alignment() % TENSOR_ALIGNMENT != 0) {
        refuse("general.alignment " + std::to_string(header.alignment()) + " is no multiple of " +
               std::to_string(TENSOR_ALIGNMENT));
    }
    const gguf_header::tensor * embeddings = header.find_tensor("token_embd.weight");
    if (embeddings != nullptr && embeddings->type == GGML_TYPE_NVFP4 &&
        header.find_tensor("output.weight") == nullptr &&
        (header.find_tensor("output.scale") != nullptr || header.find_tensor("output.input_scale") != nullptr)) {
        refuse("has a scale for an output that is its embeddings");
    }
}

} // namespace

void judge_model(const gguf_header & header) {
    if (!header.text("general.architecture")) {
        refuse("general.architecture is missing, or no text");
    }
    const hparams p(header);
    judge_hparams(p);
    judge_vocabulary(header, p);
    judge_tensors(header);
}

void judge_adapter(const gguf_header & header) {
    for (const char * key : {"general.type", "general.architecture", "adapter.type"}) {
        if (header.find(key) != nullptr && !header.text(key)) {
            refuse(std::string(key) + " is no text");
        }
    }
    const gguf_header::value * alpha = header.find("adapter.lora.alpha");
    if (alpha != nullptr && (alpha->is_array || alpha->type != GGUF_TYPE_FLOAT32)) {
        refuse("adapter.lora.alpha is no f32");
    }
    if (const auto value = header.number("adapter.lora.alpha"); value && !std::isfinite(*value)) {
        refuse("adapter.lora.alpha is not finite");
    }
}

std::vector<gguf_header> read_model_file(const std::string & path) {
    std::vector<gguf_header> parts;
    const gguf_header &      first = parts.emplace_back(path);
    if (const int64_t no = first.integer("split.no").value_or(0); no > 0) {
        refuse("is part " + std::to_string(no + 1) + " of a split model, whose first part must be given");
    }
    judge_model(first);
    const gguf_header::value * count = first.find("split.count");
    if (count == nullptr || count->is_array || count->type != GGUF_TYPE_UINT16) {
        return parts; // one file, or a type that llama.cpp refuses
    }
    const auto n_parts = static_cast<int32_t>(first.integer_at(*count, 0));
    if (n_parts <= 1) {
        return parts;
    }
    // llama.cpp's rule: the parts stand beside the first, which is named PREFIX-00001-of-NNNNN.gguf.
    std::vector<char> prefix(path.size() + 1);
    if (llama_split_prefix(prefix.data(), prefix.size(), path.c_str(), 0, n_parts) == 0) {
        refuse("is not named as the first of " + std::to_string(n_parts) + " parts");
    }
    std::vector<char> name(path.size() + 64);
    for (int32_t i = 1; i < n_parts; ++i) {
        llama_split_path(name.data(), name.size(), prefix.data(), i, n_parts);
        try {
            const gguf_header &        part = parts.emplace_back(std::string(name.data()));
            const gguf_header::value * no = part.find("split.no");
            if (no == nullptr || no->is_array || no->type != GGUF_TYPE_UINT16) {
                refuse("split.no is no u16");
            }
            if (part.integer_at(*no, 0) != i) {
                refuse("split.no is " + std::to_string(part.integer_at(*no, 0)) + ", expected " + std::to_string(i));
            }
            judge_tensors(part);
            parts.back().trim(); // there may be hundreds
        } catch (failure & f) {
            f.message = "part " + std::to_string(i + 1) + " of " + std::to_string(n_parts) + ": " + f.message;
            throw;
        }
    }
    return parts;
}

gguf_header read_adapter_file(const std::string & path) {
    gguf_header header(path);
    judge_adapter(header);
    return header;
}

} // namespace lcs
