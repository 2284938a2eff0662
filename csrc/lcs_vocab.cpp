// Owns text to tokens and back. llama.cpp does the words; cutting a long text at its special tokens is done here, since
// llama.cpp's own cut is quadratic in their number, and so is the choice of a stack that std::regex cannot overflow.
#include "lcs_internal.hpp"

#include "llama-vocab.h"

#include <algorithm>
#include <cctype>
#include <exception>
#include <cstring>
#include <functional>
#include <map>
#include <stdexcept>
#include <unordered_set>

#if !defined(_WIN32)
#    include <pthread.h>
#    include <signal.h>
#endif

namespace lcs {

// Built once with the model, read by any number of threads.
struct tokenizer {
    struct special {
        llama_token      token;
        std::string_view text; // owned by the model
        int32_t          attr;
    };

    // In the order in which llama.cpp looks for them: longest first.
    std::vector<special> specials;

    // A trie over the specials' bytes: node i's children are edges[first[i], first[i + 1]), sorted by byte.
    struct edge {
        unsigned char byte;
        uint32_t      node;
    };
    std::vector<uint32_t> first;
    std::vector<edge>     edges;
    std::vector<int32_t>  ends; // index of the special that ends at a node; -1: none

    // Whether words reach std::regex, which needs stack for each character that one match takes.
    bool recursive = false;
    bool takes_spaces = false;
    // Whether a regular expression looks to the end of such a row from each of its characters.
    bool looks_past_blanks = false;
    bool looks_past_digits = false;
    // SPM: every character that occurs in a token, as packed bytes. No token reaches across any other.
    std::unordered_set<uint32_t> characters;
    // Whether the tokenizer decodes UTF-8 throughout. (UGM does only where its own table has no entry.)
    bool decodes = false;
};

namespace {

constexpr size_t  SMALL_WORK = 1 << 16; // bytes of text times specials that llama.cpp may search by itself
constexpr size_t  SPM_ENOUGH = 1024;    // bytes from which cutting pays
constexpr size_t  CALM_MATCH = 500;     // characters of one match that fit any thread's stack
constexpr size_t  LONGEST_MATCH = 1 << 20;
constexpr size_t  LONGEST_QUADRATIC = 1000;
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr size_t STACK_PER_CHARACTER = 4096;
#else
constexpr size_t STACK_PER_CHARACTER = 512; // measured: 321 with libstdc++ 12
#endif
constexpr int32_t SPECIAL = LLAMA_TOKEN_ATTR_CONTROL | LLAMA_TOKEN_ATTR_USER_DEFINED | LLAMA_TOKEN_ATTR_UNKNOWN;

// The specials as llama.cpp sorts them; same order, same comparison, so ties fall alike.
std::vector<tokenizer::special> find_specials(const llama_vocab * vocab) {
    std::vector<tokenizer::special> found;
    for (llama_token token = 0; token < llama_vocab_n_tokens(vocab); ++token) {
        const int32_t attr = llama_vocab_get_attr(vocab, token);
        if ((attr & SPECIAL) != 0) {
            found.push_back({token, llama_vocab_get_text(vocab, token), attr});
        }
    }
    std::sort(found.begin(), found.end(), [](const tokenizer::special & a, const tokenizer::special & b) {
        return a.text.size() > b.text.size();
    });
    return found;
}

void build_trie(tokenizer & t) {
    std::vector<std::map<unsigned char, uint32_t>> children(1);
    t.ends.assign(1, -1);
    for (size_t i = 0; i < t.specials.size(); ++i) {
        uint32_t node = 0;
        for (const char c : t.specials[i].text) {
            const auto [it, added] = children[node].emplace(c, static_cast<uint32_t>(children.size()));
            node = it->second;
            if (added) {
                children.emplace_back();
                t.ends.push_back(-1);
            }
        }
        t.ends[node] = static_cast<int32_t>(i);
    }
    for (const auto & of_node : children) {
        t.first.push_back(static_cast<uint32_t>(t.edges.size()));
        for (const auto & [byte, node] : of_node) {
            t.edges.push_back({byte, node});
        }
    }
    t.first.push_back(static_cast<uint32_t>(t.edges.size()));
}

// Pre-tokenizers that llama.cpp splits by code of its own (unicode.cpp: unicode_regex_split_custom()), or by regular
// expressions without a repetition.
bool is_shallow(const std::string & pre) {
    static const char * const NAMES[] = {
        "llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "jina-v5-nano",
        "dbrx", "smaug-bpe", "gpt-2", "phi-2", "jina-es", "jina-de", "gigachat", "jina-v2-es", "jina-v2-de", "a.x-4.0",
        "mellum", "modern-bert", "jina-v1-en", "jina-v2-code", "roberta-bpe", "exaone4", "mpt", "olmo", "jais",
        "trillion", "granite-docling", "stablelm2", "qwen2", "deepseek-r1-qwen", "kormo", "f2llmv2", "megrez",
        "hunyuan", "solar-open", "qwen35", "chatglm-bpe", "glm4", "glm5", "kimi-k2", "grok-2", "laguna", "gemma4",
        "granite-embed-multi-311m", "sarvam-moe", "starcoder", "refact", "command-r", "smollm", "codeshell", "exaone",
        "minerva-7b", "mellum2"};
    return std::find(std::begin(NAMES), std::end(NAMES), pre) != std::end(NAMES);
}

std::string find_metadata(const model_box & box, const char * key) {
    for (const auto & [name, value] : box.metadata) {
        if (name == key) {
            return value;
        }
    }
    return "";
}

// Positions of a text that are cut out as special tokens, and the raw pieces between them.
class pieces {
public:
    explicit pieces(std::string_view text) : text_(text) {
        if (!text.empty()) {
            raw_.emplace(0, text.size());
        }
    }

    // Takes [at, at + size) out as a token if it still lies in one raw piece.
    void take(const tokenizer::special & s, size_t at) {
        auto it = raw_.upper_bound(at);
        if (it == raw_.begin()) {
            return;
        }
        --it;
        const size_t begin = it->first;
        const size_t end = it->second;
        if (at + s.text.size() > end) {
            return;
        }
        raw_.erase(it);
        size_t left = at;
        size_t right = at + s.text.size();
        const auto is_space = [this](size_t i) { return std::isspace(static_cast<unsigned char>(text_[i])) != 0; };
        if ((s.attr & LLAMA_TOKEN_ATTR_LSTRIP) != 0) {
            while (left > begin && is_space(left - 1)) {
                --left;
            }
        }
        if ((s.attr & LLAMA_TOKEN_ATTR_RSTRIP) != 0) {
            while (right < end && is_space(right)) {
                ++right;
            }
        }
        if (left > begin) {
            raw_.emplace(begin, left);
        }
        if (right < end) {
            raw_.emplace(right, end);
        }
        tokens_.emplace(at, s.token);
    }

    // In the order of the text: on_raw(piece) and on_token(token).
    template <class Raw, class Token>
    void visit(Raw && on_raw, Token && on_token) const {
        auto token = tokens_.begin();
        for (const auto & [begin, end] : raw_) {
            for (; token != tokens_.end() && token->first < begin; ++token) {
                on_token(token->second);
            }
            on_raw(text_.substr(begin, end - begin));
        }
        for (; token != tokens_.end(); ++token) {
            on_token(token->second);
        }
    }

private:
    std::string_view              text_;
    std::map<size_t, size_t>      raw_; // begin to end
    std::map<size_t, llama_token> tokens_;
};

// What llama.cpp's tokenizer_st_partition() does, in one pass over the text.
pieces cut(const tokenizer & t, std::string_view text, bool parse_special) {
    struct match {
        int32_t special;
        size_t  at;
    };
    std::vector<match> matches;
    for (size_t at = 0; at < text.size(); ++at) {
        uint32_t node = 0;
        for (size_t i = at; i < text.size(); ++i) {
            const auto byte = static_cast<unsigned char>(text[i]);
            const auto begin = t.edges.begin() + t.first[node];
            const auto end = t.edges.begin() + t.first[node + 1];
            const auto edge = std::lower_bound(
                    begin, end, byte, [](const tokenizer::edge & e, unsigned char b) { return e.byte < b; });
            if (edge == end || edge->byte != byte) {
                break;
            }
            node = edge->node;
            if (t.ends[node] >= 0) {
                const int32_t attr = t.specials[t.ends[node]].attr;
                if (parse_special || (attr & (LLAMA_TOKEN_ATTR_CONTROL | LLAMA_TOKEN_ATTR_UNKNOWN)) == 0) {
                    matches.push_back({t.ends[node], at});
                }
            }
        }
    }
    // The first special takes all its places, from the left, before the next one looks at what remains.
    std::stable_sort(matches.begin(), matches.end(), [](const match & a, const match & b) {
        return a.special < b.special;
    });
    pieces out(text);
    for (const match & m : matches) {
        out.take(t.specials[m.special], m.at);
    }
    return out;
}

// llama.cpp takes each byte that is no UTF-8 for U+FFFD, by an exception a byte, and throws at what decodes to more
// than U+10FFFF. The same replacement, done before.
std::string decodable(std::string_view text) {
    std::string out;
    out.reserve(text.size());
    const auto follows = [&](size_t i) {
        return i < text.size() && (static_cast<unsigned char>(text[i]) & 0xc0) == 0x80;
    };
    for (size_t i = 0; i < text.size();) {
        const auto lead = static_cast<unsigned char>(text[i]);
        size_t     n = lead < 0x80 ? 1 : lead < 0xc0 ? 0 : lead < 0xe0 ? 2 : lead < 0xf0 ? 3 : lead < 0xf8 ? 4 : 0;
        for (size_t k = 1; k < n; ++k) {
            n = follows(i + k) ? n : 0;
        }
        if (n == 4 && (lead > 0xf4 || (lead == 0xf4 && static_cast<unsigned char>(text[i + 1]) >= 0x90))) {
            n = 0;
        }
        if (n == 0) {
            out += "\xef\xbf\xbd";
            i += 1;
        } else {
            out.append(text, i, n);
            i += n;
        }
    }
    return out;
}

// The longest row of characters of a kind.
template <class Is>
size_t longest_row(std::string_view text, Is && is) {
    size_t longest = 0;
    size_t row = 0;
    for (const char c : text) {
        row = is(static_cast<unsigned char>(c)) ? row + 1 : 0;
        longest = std::max(longest, row);
    }
    return longest;
}

bool is_blank(unsigned char c) {
    return c == ' ' || (c >= '\t' && c <= '\r');
}

bool is_digit(unsigned char c) {
    return c >= '0' && c <= '9';
}

// A bound of the characters that one match of a pre-tokenizer takes: a word with the white space behind it. Exaone's
// takes a line of words with single spaces.
size_t longest_match(std::string_view text, bool takes_spaces) {
    size_t longest = 0;
    size_t word = 0;
    size_t blanks = 0;
    for (const char c : text) {
        const auto byte = static_cast<unsigned char>(c);
        if ((byte & 0xc0) == 0x80) {
            continue; // inside a character
        }
        if (is_blank(byte) && !(takes_spaces && byte == ' ')) {
            ++blanks;
        } else {
            word = blanks == 0 ? word + 1 : 1;
            blanks = 0;
        }
        longest = std::max(longest, word + blanks);
    }
    return longest + 1;
}

#if defined(_WIN32)
void run_with_stack(size_t, const std::function<void()> & body) {
    body();
}
#else
struct errand {
    const std::function<void()> * body;
    std::exception_ptr            error;
};

// Pages of a stack are only taken when they are touched.
void run_with_stack(size_t n_bytes, const std::function<void()> & body) {
    fault_point();
    errand         work{&body, nullptr};
    pthread_attr_t attributes;
    if (pthread_attr_init(&attributes) != 0) {
        throw std::bad_alloc();
    }
    sigset_t all;
    sigset_t before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before); // the program's signal handlers are for the program's threads
    pthread_t  thread;
    const bool failed = pthread_attr_setstacksize(&attributes, n_bytes) != 0 ||
                       pthread_create(&thread, &attributes,
                                      [](void * data) -> void * {
                                          auto & w = *static_cast<errand *>(data);
                                          try {
                                              (*w.body)();
                                          } catch (...) {
                                              w.error = std::current_exception();
                                          }
                                          return nullptr;
                                      },
                                      &work) != 0;
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    pthread_attr_destroy(&attributes);
    if (failed) {
        throw std::bad_alloc();
    }
    pthread_join(thread, nullptr);
    if (work.error) {
        std::rethrow_exception(work.error);
    }
}
#endif

// llama.cpp's answer for one piece, without BOS and EOS; appended to out.
void append_tokens(
        const llama_vocab * vocab, std::string_view text, bool parse_special, std::vector<llama_token> & out) {
    const size_t had = out.size();
    const auto   n_bytes = static_cast<int32_t>(text.size());
    const auto   run = [&](size_t room) {
        out.resize(had + room);
        return llama_tokenize(vocab, text.data(), n_bytes, out.data() + had,
                              static_cast<int32_t>(std::min<size_t>(room, INT32_MAX)), false, parse_special);
    };
    try {
        int32_t n = run(text.size() + 2); // almost never more than a token for each byte
        if (n < 0 && n != INT32_MIN) {
            n = run(static_cast<size_t>(-static_cast<int64_t>(n)));
        }
        if (n < 0) {
            fail(LCS_STATUS_RANGE, "the text has more than 2147483647 tokens");
        }
        out.resize(had + static_cast<size_t>(n));
    } catch (const std::out_of_range &) {
        fail(LCS_STATUS_UNSUPPORTED, "the vocabulary has no token for a byte of the text", "byte tokens");
    }
}

// As llama.cpp's SPM cuts text into characters: by the first byte alone.
size_t character_bytes(char lead) {
    const auto byte = static_cast<unsigned char>(lead);
    return byte < 0xc0 ? 1 : byte < 0xe0 ? 2 : byte < 0xf0 ? 3 : 4;
}

uint32_t packed(std::string_view character) {
    uint32_t bytes = static_cast<uint32_t>(character.size());
    for (const char c : character) {
        bytes = bytes << 8 | static_cast<unsigned char>(c);
    }
    return character.size() == 4 ? bytes : bytes | static_cast<uint32_t>(character.size()) << 24;
}

// llama.cpp's SPM takes time quadratic in the characters that are in no token, which come out as bytes. Nothing merges
// across them, so a text may be cut before one. The space that llama.cpp puts before a text stays alone then, and its
// tokens are dropped again.
void append_spm_tokens(
        const model_box & box, std::string_view text, bool parse_special, std::vector<llama_token> & out) {
    const auto drop = [&out](size_t from, size_t n) {
        out.erase(out.begin() + static_cast<std::ptrdiff_t>(from), out.begin() + static_cast<std::ptrdiff_t>(from + n));
    };
    const auto &     known = box.tokenizer->characters;
    size_t           begin = 0;
    size_t           n_space = 0;
    for (size_t i = 0; i < text.size();) {
        const size_t n = character_bytes(text[i]);
        // A space becomes three bytes before the cut into characters: inside one, it ends it.
        if (const size_t space = text.substr(i, n).find(' ', 1); space != std::string_view::npos) {
            i += space + 1;
            continue;
        }
        if (i + n <= text.size() && i - begin >= SPM_ENOUGH && known.count(packed(text.substr(i, n))) == 0) {
            const size_t from = out.size();
            append_tokens(box.vocab, text.substr(begin, i - begin), parse_special, out);
            drop(from, n_space);
            if (begin == 0) {
                std::vector<llama_token> alone;
                append_tokens(box.vocab, text.substr(i, n), false, alone);
                n_space = alone.size() - n; // a token for each byte, and the space
            }
            begin = i;
        }
        i += n;
    }
    const size_t from = out.size();
    append_tokens(box.vocab, text.substr(begin), parse_special, out);
    drop(from, n_space);
}

void require_row(const char * what, size_t n, size_t most) {
    if (n > most) {
        fail(LCS_STATUS_RANGE,
             std::string(what) + " of " + std::to_string(n) + " characters, most " + std::to_string(most), "text",
             std::to_string(most), std::to_string(n));
    }
}

// One piece between special tokens (or with them, where the text is short).
void tokenize_piece(
        const model_box & box, std::string_view text, bool parse_special, std::vector<llama_token> & out) {
    if (text.empty()) {
        return;
    }
    const tokenizer & t = *box.tokenizer;
    if (box.info.vocab_type == LLAMA_VOCAB_TYPE_SPM) {
        append_spm_tokens(box, text, parse_special, out);
        return;
    }
    std::string decoded;
    if (t.decodes) {
        decoded = decodable(text);
        text = decoded;
        require_range("n_bytes", static_cast<int64_t>(text.size()), 0, INT32_MAX); // up to three for one
    }
    const size_t n_match = t.recursive ? longest_match(text, t.takes_spaces) : 0;
    require_row("a word", n_match, LONGEST_MATCH);
    if (t.looks_past_blanks) {
        // It is split at line ends before.
        const auto in_line = [](unsigned char c) { return is_blank(c) && c != '\n' && c != '\r'; };
        require_row("white space", longest_row(text, in_line), LONGEST_QUADRATIC);
    }
    if (t.looks_past_digits) {
        require_row("a number", longest_row(text, is_digit), LONGEST_QUADRATIC);
    }
    if (n_match > CALM_MATCH) {
        run_with_stack((size_t(1) << 21) + n_match * STACK_PER_CHARACTER,
                       [&] { append_tokens(box.vocab, text, parse_special, out); });
    } else {
        append_tokens(box.vocab, text, parse_special, out);
    }
}

struct added {
    llama_token before = LLAMA_TOKEN_NULL;
    llama_token after = LLAMA_TOKEN_NULL;
};

// The tokens that add_special adds, as llama.cpp's tokenize() does for each kind of tokenizer.
added find_added(const model_box & box) {
    const lcs_vocab_specials & s = box.specials;
    added                      a;
    const auto                 need = [](llama_token token, const char * name) {
        if (token == LLAMA_TOKEN_NULL) {
            fail(LCS_STATUS_ARG, std::string("the model adds ") + name + ", but has none", name);
        }
        return token;
    };
    switch (box.info.vocab_type) {
        case LLAMA_VOCAB_TYPE_WPM:
            a.before = need(s.bos, "bos");
            a.after = need(s.sep, "sep");
            break;
        case LLAMA_VOCAB_TYPE_SPM:
        case LLAMA_VOCAB_TYPE_BPE:
        case LLAMA_VOCAB_TYPE_UGM:
            a.before = s.add_bos ? need(s.bos, "bos") : LLAMA_TOKEN_NULL;
            a.after = s.add_eos ? need(s.eos, "eos") : LLAMA_TOKEN_NULL;
            break;
        default: break;
    }
    return a;
}

std::vector<llama_token> tokenize(const model_box & box, std::string_view text, bool add_special, bool parse_special) {
    const added              add = add_special ? find_added(box) : added{};
    const tokenizer &        t = *box.tokenizer;
    std::vector<llama_token> out;
    fault_point();
    if (add.before != LLAMA_TOKEN_NULL) {
        out.push_back(add.before);
    }
    if (text.size() < std::min(SPM_ENOUGH, SMALL_WORK / std::max<size_t>(t.specials.size(), 1))) {
        tokenize_piece(box, text, parse_special, out);
    } else {
        cut(t, text, parse_special)
                .visit([&](std::string_view raw) { tokenize_piece(box, raw, false, out); },
                       [&](llama_token token) { out.push_back(token); });
    }
    if (add.after != LLAMA_TOKEN_NULL) {
        out.push_back(add.after);
    }
    // Bytes for which a vocabulary has no token at all come out as -1 where it has no unknown token either.
    out.erase(std::remove(out.begin(), out.end(), LLAMA_TOKEN_NULL), out.end());
    return out;
}

const model_box & vocab_of(const lcs_model * model) {
    require_alive(model, "model");
    require_vocab(*model->box);
    return *model->box;
}

} // namespace

void require_vocab(const model_box & box) {
    if (box.info.vocab_type == LLAMA_VOCAB_TYPE_NONE) {
        fail(LCS_STATUS_UNSUPPORTED, "the model has no vocabulary", "vocab");
    }
}

void require_token(const model_box & box, int32_t token) {
    require_range("token", token, 0, static_cast<int64_t>(box.info.n_vocab) - 1);
}

void read_specials(model_box & box) {
    const llama_vocab *  v = box.vocab;
    lcs_vocab_specials & s = box.specials;
    s.bos = llama_vocab_bos(v);
    s.eos = llama_vocab_eos(v);
    s.eot = llama_vocab_eot(v);
    s.sep = llama_vocab_sep(v);
    s.nl = llama_vocab_nl(v);
    s.pad = llama_vocab_pad(v);
    s.mask = llama_vocab_mask(v);
    s.fim_pre = llama_vocab_fim_pre(v);
    s.fim_suf = llama_vocab_fim_suf(v);
    s.fim_mid = llama_vocab_fim_mid(v);
    s.fim_pad = llama_vocab_fim_pad(v);
    s.fim_rep = llama_vocab_fim_rep(v);
    s.fim_sep = llama_vocab_fim_sep(v);
    s.add_bos = llama_vocab_get_add_bos(v);
    s.add_eos = llama_vocab_get_add_eos(v);
    s.add_sep = llama_vocab_get_add_sep(v);

    auto t = std::make_shared<tokenizer>();
    if (box.info.vocab_type != LLAMA_VOCAB_TYPE_NONE) {
        t->specials = find_specials(v);
        build_trie(*t);
    }
    if (box.info.vocab_type == LLAMA_VOCAB_TYPE_SPM) {
        std::vector<uint32_t> recent(1 << 12);
        for (llama_token token = 0; token < box.info.n_vocab; ++token) {
            const std::string_view text = llama_vocab_get_text(v, token);
            for (size_t i = 0; i < text.size(); ++i) {
                const uint32_t character = packed(text.substr(i, character_bytes(text[i])));
                uint32_t &     last = recent[character * 2654435761u >> 20];
                if (last != character) { // a set is slow, and most characters come again and again
                    last = character;
                    t->characters.insert(character);
                }
            }
        }
        t->characters.insert(packed(" ")); // becomes U+2581
    }
    const std::string pre = find_metadata(box, "tokenizer.ggml.pre");
    const bool        gemma4 = find_metadata(box, "tokenizer.ggml.model") == "gemma4"; // has the one of that name
    t->recursive = box.info.vocab_type == LLAMA_VOCAB_TYPE_BPE && !is_shallow(pre) && !gemma4;
    t->takes_spaces = pre == "exaone-moe";
    t->looks_past_blanks = t->recursive && pre == "deepseek-llm";
    t->looks_past_digits = t->recursive && pre == "superbpe";
    t->decodes = box.info.vocab_type == LLAMA_VOCAB_TYPE_BPE || box.info.vocab_type == LLAMA_VOCAB_TYPE_WPM ||
                 box.info.vocab_type == LLAMA_VOCAB_TYPE_PLAMO2;
    box.tokenizer = std::move(t);
}

namespace {

// Each part with its length in front, so that no two vocabularies have the same bytes.
void put(std::string & out, std::string_view part) {
    const auto n = static_cast<uint32_t>(part.size());
    out.append(reinterpret_cast<const char *>(&n), sizeof n);
    out.append(part);
}

template <class T>
void put_value(std::string & out, T value) {
    out.append(reinterpret_cast<const char *>(&value), sizeof value);
}

std::string describe(const model_box & box) {
    std::map<std::string, std::string> settings;
    for (const auto & [key, value] : box.metadata) {
        if (key.rfind("tokenizer.", 0) == 0 && key.rfind("tokenizer.chat_template", 0) != 0) {
            settings.emplace(key, value);
        }
    }
    std::string out;
    for (const auto & [key, value] : settings) {
        put(out, key);
        put(out, value);
    }
    const bool is_bpe = box.info.vocab_type == LLAMA_VOCAB_TYPE_BPE;
    for (llama_token token = 0; token < box.info.n_vocab; ++token) {
        put(out, llama_vocab_get_text(box.vocab, token));
        put_value(out, llama_vocab_get_score(box.vocab, token));
        put_value(out, static_cast<int32_t>(llama_vocab_get_attr(box.vocab, token)));
        put_value(out, static_cast<uint8_t>(llama_vocab_is_eog(box.vocab, token)));
    }
    if (is_bpe) {
        for (const std::string & merge : box.vocab->get_bpe_merges()) {
            put(out, merge);
        }
    }
    for (const char c : box.vocab->get_precompiled_charsmap()) {
        out.push_back(c);
    }
    return out;
}

} // namespace

} // namespace lcs

extern "C" {

lcs_status lcs_vocab_get_specials(const lcs_model * model, lcs_vocab_specials * specials_out) {
    return lcs::guard([&] {
        const lcs::model_box & box = lcs::vocab_of(model);
        lcs::require(specials_out, "specials_out");
        *specials_out = box.specials;
    });
}

lcs_status lcs_vocab_tokenize(
        const lcs_model * model, const char * text, size_t n_bytes, bool add_special, bool parse_special,
        int32_t * tokens, size_t capacity, size_t * n_out) {
    return lcs::guard([&] {
        const lcs::model_box & box = lcs::vocab_of(model);
        lcs::require(n_out, "n_out");
        lcs::require_room(text, n_bytes, "text");
        lcs::require_room(tokens, capacity, "tokens");
        lcs::require_range("n_bytes", static_cast<int64_t>(std::min<size_t>(n_bytes, INT64_MAX)), 0, INT32_MAX);
        const std::vector<llama_token> found =
                lcs::tokenize(box, std::string_view(text == nullptr ? "" : text, n_bytes), add_special, parse_special);
        *n_out = found.size();
        if (found.size() > capacity) {
            lcs::fail(LCS_STATUS_BUFFER,
                      std::to_string(found.size()) + " tokens do not fit " + std::to_string(capacity));
        }
        std::copy(found.begin(), found.end(), tokens);
    });
}

lcs_status lcs_vocab_detokenize(
        const lcs_model * model, const int32_t * tokens, size_t n_tokens, bool remove_special, bool unparse_special,
        char * buf, size_t capacity, size_t * n_out) {
    return lcs::guard([&] {
        const lcs::model_box & box = lcs::vocab_of(model);
        lcs::require(n_out, "n_out");
        lcs::require_room(tokens, n_tokens, "tokens");
        lcs::require_room(buf, capacity, "buf");
        lcs::require_range("n_tokens", static_cast<int64_t>(std::min<size_t>(n_tokens, INT64_MAX)), 0, INT32_MAX);
        for (size_t i = 0; i < n_tokens; ++i) {
            lcs::require_token(box, tokens[i]);
        }
        // llama.cpp tells a smaller size than it needs, or a larger one, unless it may write the whole text.
        lcs::fault_point();
        const auto  n = static_cast<int32_t>(n_tokens);
        std::string text(n_tokens * 8 + 64, '\0');
        const auto  run = [&] {
            const auto room = static_cast<int32_t>(std::min<size_t>(text.size(), INT32_MAX));
            return llama_detokenize(box.vocab, tokens, n, text.data(), room, remove_special, unparse_special);
        };
        int32_t written = run();
        if (written < 0) {
            text.resize(static_cast<size_t>(-static_cast<int64_t>(written)));
            written = run();
        }
        if (written < 0) {
            lcs::fail(LCS_STATUS_RANGE, "the text has more than 2147483647 bytes");
        }
        lcs::give(std::string_view(text).substr(0, static_cast<size_t>(written)), buf, capacity, n_out);
    });
}

lcs_status lcs_vocab_piece(
        const lcs_model * model, int32_t token, bool special, char * buf, size_t capacity, size_t * n_out) {
    return lcs::guard([&] {
        const lcs::model_box & box = lcs::vocab_of(model);
        lcs::require(n_out, "n_out");
        lcs::require_room(buf, capacity, "buf");
        lcs::require_token(box, token);
        char        few[64];
        int32_t     n = llama_token_to_piece(box.vocab, token, few, sizeof few, 0, special);
        std::string many;
        if (n < 0) {
            lcs::fault_point();
            many.resize(static_cast<size_t>(-static_cast<int64_t>(n)));
            n = llama_token_to_piece(box.vocab, token, many.data(), -n, 0, special);
        }
        lcs::give(std::string_view(many.empty() ? few : many.data(), static_cast<size_t>(std::max(n, 0))), buf,
                  capacity, n_out);
    });
}

lcs_status lcs_vocab_describe(const lcs_model * model, char * buf, size_t capacity, size_t * n_out) {
    return lcs::guard([&] {
        const lcs::model_box & box = lcs::vocab_of(model);
        lcs::require(n_out, "n_out");
        lcs::require_room(buf, capacity, "buf");
        lcs::fault_point();
        lcs::give(lcs::describe(box), buf, capacity, n_out);
    });
}

lcs_status lcs_vocab_token(const lcs_model * model, int32_t token, lcs_token_info * info_out) {
    return lcs::guard([&] {
        const lcs::model_box & box = lcs::vocab_of(model);
        lcs::require(info_out, "info_out");
        lcs::require_token(box, token);
        lcs_token_info info{};
        info.text = llama_vocab_get_text(box.vocab, token);
        info.score = llama_vocab_get_score(box.vocab, token);
        info.attr = llama_vocab_get_attr(box.vocab, token);
        info.is_eog = llama_vocab_is_eog(box.vocab, token);
        info.is_control = llama_vocab_is_control(box.vocab, token);
        *info_out = info;
    });
}

} // extern "C"
