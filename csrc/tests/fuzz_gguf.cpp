// GGUF files of any kind: refused with LOAD, or read within bounds. Under libFuzzer one input is one file. Without it,
// a plain test: seeded mutations of small models, of which those that the reader lets through are loaded by llama.cpp
// in a child process, which must live.
#include "lcs_gguf.hpp"
#include "lcs_internal.hpp"

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <functional>
#include <iterator>
#include <limits>
#include <random>
#include <sstream>

#if !defined(LCS_LIBFUZZER)
#    include <sys/wait.h>
#    include <unistd.h>
#endif

#define CHECK(condition)                                                            \
    do {                                                                            \
        if (!(condition)) {                                                         \
            fprintf(stderr, "%s:%d: failed: %s\n", __FILE__, __LINE__, #condition); \
            exit(1);                                                                \
        }                                                                           \
    } while (0)

namespace {

// What a header promises once it was accepted: nothing points outside the file.
void check_bounds(const lcs::gguf_header & header) {
    for (const auto & t : header.tensors()) {
        CHECK(t.n_bytes > 0 && t.offset >= header.data_offset());
        CHECK(t.offset <= header.file_bytes() && t.n_bytes <= header.file_bytes() - t.offset);
    }
    for (const std::string & key : header.keys()) {
        const lcs::gguf_header::value * v = header.find(key);
        CHECK(v != nullptr);
        if (v->type == GGUF_TYPE_STRING) {
            size_t n = 0;
            if (v->is_array) {
                header.each_text(*v, [&](std::string_view text) { n += text.size(); });
            }
            CHECK(n <= header.file_bytes());
        } else if (v->n > 0) {
            header.integer_at(*v, v->n - 1);
        }
    }
    CHECK(header.scalars().size() <= header.keys().size());
    CHECK(header.bytes().size() <= header.file_bytes());
}

// Whether the file would be handed to llama.cpp. Anything but an answer and LOAD ends the test.
bool is_accepted(const std::string & file) {
    try {
        const lcs::gguf_header header(file.data(), file.size());
        check_bounds(header);
        lcs::judge_adapter(header);
        lcs::judge_model(header);
        return true;
    } catch (const lcs::failure & f) {
        CHECK(f.status == LCS_STATUS_LOAD);
        CHECK(!f.message.empty());
        return false;
    }
}

} // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t * data, size_t size) {
    is_accepted(std::string(reinterpret_cast<const char *>(data), size));
    return 0;
}

#if !defined(LCS_LIBFUZZER)

namespace {

// A llama of one layer with the 256 bytes as its vocabulary, for each kind of tokenizer.
std::string make_model(const std::string & path, const char * tokenizer) {
    constexpr int64_t N_EMBD = 32;
    constexpr int64_t N_VOCAB = 259;
    gguf_context *    g = gguf_init_empty();
    gguf_set_val_str(g, "general.architecture", "llama");
    gguf_set_val_str(g, "general.name", "fuzz");
    for (const auto & [key, value] : std::initializer_list<std::pair<const char *, uint32_t>>{
             {"llama.context_length", 64}, {"llama.embedding_length", N_EMBD}, {"llama.block_count", 1},
             {"llama.feed_forward_length", N_EMBD}, {"llama.attention.head_count", 2},
             {"llama.attention.head_count_kv", 1}, {"llama.rope.dimension_count", N_EMBD / 2},
             {"tokenizer.ggml.bos_token_id", 1}, {"tokenizer.ggml.eos_token_id", 2},
             {"tokenizer.ggml.unknown_token_id", 0}}) {
        gguf_set_val_u32(g, key, value);
    }
    gguf_set_val_f32(g, "llama.attention.layer_norm_rms_epsilon", 1e-5f);
    gguf_set_val_str(g, "llama.rope.scaling.type", "linear");
    gguf_set_val_str(g, "tokenizer.ggml.model", tokenizer);
    gguf_set_val_str(g, "tokenizer.ggml.pre", "gpt-2");
    gguf_set_val_bool(g, "tokenizer.ggml.add_bos_token", true);
    std::vector<std::string> words = {"<unk>", "<s>", "</s>"};
    for (int byte = 0; byte < 256; ++byte) {
        char word[8];
        if (std::strcmp(tokenizer, "rwkv") == 0) {
            std::snprintf(word, sizeof word, "\\x%02x", byte);
        } else if (std::strcmp(tokenizer, "llama") == 0 || byte < 0x21 || byte > 0x7e) {
            std::snprintf(word, sizeof word, "<0x%02X>", byte);
        } else {
            std::snprintf(word, sizeof word, "%c", byte);
        }
        words.push_back(word);
    }
    if (std::strcmp(tokenizer, "rwkv") == 0) {
        words[0] = "\\x00\\x00"; // begins with a byte that is a token
        words[1] = "ab";
        words[2] = "abc";
    }
    std::vector<const char *> texts;
    for (const std::string & word : words) {
        texts.push_back(word.c_str());
    }
    const std::vector<float> scores(N_VOCAB, -1.0f);
    std::vector<int32_t>     types(N_VOCAB, 1);
    types[0] = 2;
    types[1] = types[2] = 3;
    if (std::strcmp(tokenizer, "llama") == 0) {
        std::fill(types.begin() + 3, types.end(), 6);
    }
    const char * merges[] = {"a b", "ab c"};
    gguf_set_arr_str(g, "tokenizer.ggml.tokens", texts.data(), texts.size());
    gguf_set_arr_data(g, "tokenizer.ggml.scores", GGUF_TYPE_FLOAT32, scores.data(), scores.size());
    gguf_set_arr_data(g, "tokenizer.ggml.token_type", GGUF_TYPE_INT32, types.data(), types.size());
    gguf_set_arr_str(g, "tokenizer.ggml.merges", merges, std::size(merges));

    ggml_context * c = ggml_init({1 << 20, nullptr, false});
    const auto     add = [&](const char * name, int64_t ne0, int64_t ne1) {
        ggml_tensor * t = ne1 == 0 ? ggml_new_tensor_1d(c, GGML_TYPE_F32, ne0)
                                   : ggml_new_tensor_2d(c, GGML_TYPE_F32, ne0, ne1);
        std::memset(t->data, 0, ggml_nbytes(t));
        ggml_set_name(t, name);
        gguf_add_tensor(g, t);
    };
    add("token_embd.weight", N_EMBD, N_VOCAB);
    add("output_norm.weight", N_EMBD, 0);
    add("blk.0.attn_norm.weight", N_EMBD, 0);
    add("blk.0.attn_q.weight", N_EMBD, N_EMBD);
    add("blk.0.attn_k.weight", N_EMBD, N_EMBD / 2);
    add("blk.0.attn_v.weight", N_EMBD, N_EMBD / 2);
    add("blk.0.attn_output.weight", N_EMBD, N_EMBD);
    add("blk.0.ffn_norm.weight", N_EMBD, 0);
    add("blk.0.ffn_gate.weight", N_EMBD, N_EMBD);
    add("blk.0.ffn_down.weight", N_EMBD, N_EMBD);
    add("blk.0.ffn_up.weight", N_EMBD, N_EMBD);
    CHECK(gguf_write_to_file(g, path.c_str(), false));
    ggml_free(c);
    gguf_free(g);
    std::ifstream      in(path, std::ios::binary);
    std::ostringstream file;
    file << in.rdbuf();
    return file.str();
}

template <class T>
void put(std::string & file, size_t at, T value) {
    if (at + sizeof value <= file.size()) {
        std::memcpy(file.data() + at, &value, sizeof value);
    }
}

int64_t extreme(std::mt19937 & rng) {
    static const int64_t VALUES[] = {0, 1, 2, 3, 7, 31, 255, 256, 259, 260, 512, 513, 1024, 1025, 65535, 65536,
                                     INT32_MAX, INT64_C(1) << 31, INT64_C(0xffffffff),
                                     INT64_C(1) << 32, INT64_MAX, -1, INT64_MIN};
    return VALUES[rng() % std::size(VALUES)];
}

// Every kind of damage to the header; weights are only numbers.
void mutate(std::string & file, const lcs::gguf_header & whole, std::mt19937 & rng) {
    const size_t n_header = whole.bytes().size();
    const auto & keys = whole.keys();
    switch (rng() % 8) {
        case 0: file[rng() % n_header] ^= static_cast<char>(1u << (rng() % 8)); break;
        case 1: file[rng() % n_header] = static_cast<char>(rng()); break;
        case 2: put(file, rng() % n_header, extreme(rng)); break;
        case 3: put(file, rng() % n_header, static_cast<int32_t>(extreme(rng))); break;
        case 4: file.resize(rng() % (rng() % 2 == 0 ? file.size() : n_header)); break;
        case 5: { // a known value
            const auto * v = whole.find(keys[rng() % keys.size()]);
            if (v->type != GGUF_TYPE_STRING) {
                const uint64_t i = rng() % v->n;
                put(file, v->at + static_cast<size_t>(i) * 4, static_cast<int32_t>(extreme(rng)));
            } else {
                put(file, v->at + sizeof(uint64_t), static_cast<char>(rng()));
            }
            break;
        }
        case 6: { // its type, which stands before it, or its name
            const auto * v = whole.find(keys[rng() % keys.size()]);
            put(file, v->at - (v->is_array ? 12 : 4) - rng() % 3, static_cast<char>(rng() % 14));
            break;
        }
        default: { // one piece of the header over another
            const size_t n = 1 + rng() % 40;
            const size_t from = rng() % n_header;
            const size_t to = rng() % n_header;
            if (from + n <= file.size() && to + n <= file.size()) {
                std::memmove(file.data() + to, file.data() + from, n);
            }
        }
    }
}

// Runs the body in a child; how it ended.
int in_child(const std::function<bool()> & body) {
    fflush(stdout);
    const pid_t pid = fork();
    CHECK(pid >= 0);
    if (pid == 0) {
        alarm(120);
        _exit(body() ? 0 : 1);
    }
    int status = 0;
    CHECK(waitpid(pid, &status, 0) == pid);
    return status;
}

// A header that was let through is read, or refused by llama.cpp with a reason; what it would need can be asked.
bool header_lives(const std::string & path) {
    lcs_header *     header = nullptr;
    const lcs_status status = lcs_header_read(path.c_str(), nullptr, &header);
    if (status != LCS_STATUS_OK) {
        return (status == LCS_STATUS_LOAD || status == LCS_STATUS_NOMEM) && header == nullptr;
    }
    lcs_context_params params;
    lcs_context_params_init(&params);
    lcs_memory_use uses[64];
    size_t         n = 0;
    lcs_header_measure(header, &params, uses, std::size(uses), &n);
    lcs_header_free(header);
    return true;
}

// A file that was let through is loaded, or refused by llama.cpp with a reason; one that loads can tokenise.
bool lives(const std::string & path, bool vocab_only) {
    if (!header_lives(path)) {
        return false;
    }
    lcs_model_params params;
    lcs_model_params_init(&params);
    params.vocab_only = vocab_only;
    lcs_model *      model = nullptr;
    const lcs_status status = lcs_model_load(path.c_str(), &params, &model);
    if (status != LCS_STATUS_OK) {
        return (status == LCS_STATUS_LOAD || status == LCS_STATUS_NOMEM) && model == nullptr;
    }
    const std::string text("<s>abc \xff\x00 unused</s>\n\n", 23);
    for (const bool special : {false, true}) {
        int32_t tokens[256];
        char    back[4096];
        size_t  n = 0;
        lcs_vocab_tokenize(model, text.data(), text.size(), special, special, tokens, std::size(tokens), &n);
        if (n <= std::size(tokens)) {
            lcs_vocab_detokenize(model, tokens, n, special, special, back, sizeof back, &n);
        }
    }
    lcs_model_free(model);
    return true;
}

void fuzz(const std::string & path, const char * tokenizer, uint32_t seed, int n_rounds) {
    const std::string      model = make_model(path, tokenizer);
    const lcs::gguf_header whole(model.data(), model.size());
    CHECK(is_accepted(model));
    CHECK(in_child([&] { return lives(path, false); }) == 0);
    std::mt19937 rng(seed);
    int          n_accepted = 0;
    for (int i = 0; i < n_rounds; ++i) {
        std::string file = model;
        for (uint32_t n = 1 + rng() % 3; n > 0; --n) {
            mutate(file, whole, rng);
        }
        if (!is_accepted(file)) {
            continue;
        }
        ++n_accepted;
        std::ofstream(path, std::ios::binary).write(file.data(), static_cast<std::streamsize>(file.size()));
        const bool vocab_only = rng() % 3 == 0;
        const int  status = in_child([&] { return lives(path, vocab_only); });
        if (status != 0) {
            fprintf(stderr, "round %d of %s ended with %d; the file is kept: %s\n", i, tokenizer, status, path.c_str());
            exit(1);
        }
    }
    printf("%s: %d of %d were let through\n", tokenizer, n_accepted, n_rounds);
    CHECK(n_accepted > n_rounds / 100); // else the mutations test only the reader
}

} // namespace

int main(int argc, char ** argv) {
    const int   n_rounds = argc > 1 ? std::atoi(argv[1]) : 1000;
    const auto  seed = static_cast<uint32_t>(argc > 2 ? std::atoi(argv[2]) : 1);
    char        folder[] = "/tmp/lcs_fuzz_XXXXXX";
    CHECK(mkdtemp(folder) != nullptr);
    const std::string path = std::string(folder) + "/model.gguf";
    for (const char * tokenizer : {"llama", "gpt2", "bert", "t5", "rwkv"}) {
        fuzz(path, tokenizer, seed, n_rounds);
    }
    std::remove(path.c_str());
    rmdir(folder);
    return 0;
}

#endif
