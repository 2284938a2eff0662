// Grammar texts of any kind: refused with GRAMMAR, or compiled and followed within bounds. Under libFuzzer one input is
// one text. Without it, a plain test: seeded mutations of good and bad texts, then random grammars against llama.cpp's
// engine as the oracle.
#include "lcs_grammar.hpp"

#include "llama-grammar.h"

#include <cstdio>
#include <cstdlib>
#include <iterator>
#include <random>

#define CHECK(condition)                                                            \
    do {                                                                            \
        if (!(condition)) {                                                         \
            fprintf(stderr, "%s:%d: failed: %s\n", __FILE__, __LINE__, #condition); \
            exit(1);                                                                \
        }                                                                           \
    } while (0)

namespace {

// True where the text is a grammar. Anything but OK and GRAMMAR ends the test.
bool try_text(const std::string & text) {
    lcs::check_grammar_text(text.c_str());
    lcs::grammar_matcher matcher(lcs::compile_grammar(text.c_str(), nullptr, nullptr), nullptr, nullptr);
    for (const char * piece : {"{", "\"", "a", "b", "}", "\xC3", "\xA4", "1", " ", "x\ny"}) {
        lcs::grammar_matcher copy(matcher);
        const bool           taken = matcher.accept_text(piece);
        CHECK(taken == copy.accept_text(piece));
        CHECK(matcher.complete() == copy.complete());
    }
    return true;
}

bool is_grammar(const std::string & text) {
    try {
        return try_text(text);
    } catch (const lcs::failure & f) {
        CHECK(f.status == LCS_STATUS_GRAMMAR);
        CHECK(!f.message.empty());
        return false;
    }
}

} // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t * data, size_t size) {
    is_grammar(std::string(reinterpret_cast<const char *>(data), size));
    return 0;
}

#if !defined(LCS_LIBFUZZER)

namespace {

const char * const SEEDS[] = {
    "root ::= \"a\"",
    "root ::= [a-z]+ | \"\\x41\\u00e4\\U0001F600\" b{2,5}\nb ::= ( \"x\" | \"y\" )? # note\n",
    "root ::= object\nvalue ::= object | array | string | number | (\"true\" | \"false\" | \"null\") ws\n"
    "object ::= \"{\" ws ( string \":\" ws value (\",\" ws string \":\" ws value)* )? \"}\" ws\n"
    "array ::= \"[\" ws ( value (\",\" ws value)* )? \"]\" ws\n"
    "string ::= \"\\\"\" ( [^\"\\\\\\x7F\\x00-\\x1F] | \"\\\\\" ([\"\\\\bfnrt] | \"u\" [0-9a-fA-F]{4}) )* \"\\\"\" ws\n"
    "number ::= (\"-\"? ([0-9] | [1-9] [0-9]{0,15})) (\".\" [0-9]+)? ([eE] [-+]? [0-9] [1-9]{0,15})? ws\n"
    "ws ::= | \" \" | \"\\n\" [ \\t]{0,20}\n",
    "root ::= a\na ::= | b c\nb ::= \"\" | c\nc ::= \"c\"?",
    "root ::= x\nx ::= \"a\" x y | \"a\" x z | \"a\"\ny ::= \"b\"\nz ::= \"b\"",
    "root ::= root \"a\" | \"b\"",
    "root ::= ((((((((\"a\"{1,4}){1,4}){1,4}){1,4}){1,4}){1,4}){1,4}){1,4})",
    "root ::= (\"a\"? \"b\"?)* \"c\"",
    "root ::= <[7]> !<[8]> <think> .*",
    "root ::= \"a\"{4096} | \"b\"{0,4096}",
};

void mutate(std::string & text, std::mt19937 & rng) {
    static const char SYMBOLS[] = "\"[](){}|*+?.,:=-^\\<>!#\n\r\t ax09\xC3\xA4\xFF\x01";
    const int         n_edits = 1 + static_cast<int>(rng() % 6);
    for (int i = 0; i < n_edits; ++i) {
        const size_t at = text.empty() ? 0 : rng() % text.size();
        switch (rng() % 5) {
            case 0:  text.insert(at, 1, SYMBOLS[rng() % (sizeof SYMBOLS - 1)]); break;
            case 1:  text.erase(at, 1 + rng() % 4); break;
            case 2:  text.insert(at, text.substr(rng() % (text.size() + 1), rng() % 24)); break;
            case 3:  text.insert(at, std::to_string(rng() % 6000)); break;
            default: text.insert(at, SEEDS[rng() % std::size(SEEDS)]); break;
        }
        text.resize(std::min<size_t>(text.size(), 1 << 14));
    }
}

std::string random_item(std::mt19937 & rng, int rule, int n_rules, int depth) {
    static const char * const TERMINALS[] = {"\"a\"",   "\"ab\"", "[ab]",     "[^a]",       "\"b\"",
                                             "[a-c\\x64]", ".",   "\"\\u00e4\"", "[^\\u00e4-\\u00ff]"};
    std::string item;
    const auto  pick = rng() % 8;
    if (pick < 5 || (pick < 7 && rule + 1 == n_rules) || (pick == 7 && depth > 2)) {
        item = TERMINALS[rng() % std::size(TERMINALS)];
    } else if (pick < 7) {
        item = "r" + std::to_string(rule + 1 + static_cast<int>(rng() % static_cast<unsigned>(n_rules - rule - 1)));
    } else {
        const auto inner = [&] { return random_item(rng, rule, n_rules, depth + 1); };
        item = "( " + inner() + " | " + inner() + " " + inner() + " )";
    }
    // Repeating what may be empty is where llama.cpp refuses or grows without end, so only the outermost is repeated.
    static const char * const REPEATS[] = {"*", "+", "?", "{2}", "{1,3}", "{0,2}", "{2,}"};
    if (depth == 0 && item[0] != '(' && item[0] != 'r' && rng() % 3 == 0) {
        item += REPEATS[rng() % std::size(REPEATS)];
    }
    return item;
}

// Rules refer to later ones, and to themselves behind a character: llama.cpp ends on these.
std::string random_grammar(std::mt19937 & rng) {
    const int   n_rules = 1 + static_cast<int>(rng() % 4);
    std::string text;
    for (int rule = 0; rule < n_rules; ++rule) {
        const std::string name = rule == 0 ? "root" : "r" + std::to_string(rule);
        text += name + " ::=";
        const int n_alternatives = 1 + static_cast<int>(rng() % 3);
        for (int i = 0; i < n_alternatives; ++i) {
            text += i > 0 ? " |" : "";
            const int n_items = 1 + static_cast<int>(rng() % 3);
            for (int j = 0; j < n_items; ++j) {
                text += " " + random_item(rng, rule, n_rules, 0);
            }
            if (rng() % 6 == 0) {
                text += " \"b\" " + name + (rng() % 2 == 0 ? " \"a\"" : "") + " | \"a\"";
            }
        }
        text += "\n";
    }
    return text;
}

void compare_with_llama(std::mt19937 & rng, int64_t & n_taken, int64_t & n_refused) {
    const std::string text = random_grammar(rng);
    const auto        rules = lcs::compile_grammar(text.c_str(), nullptr, nullptr);
    static const char * const PIECES[] = {"a",        "b",    "ab",   "ba",       "c",   "d",
                                          "\xC3\xA4", "\xC3", "\xA4", "\xE2\x82", "aab", "bab"};
    for (int n_tries = 0; n_tries < 6; ++n_tries) {
        lcs::grammar_matcher matcher(rules, nullptr, nullptr);
        llama_grammar *      oracle =
            llama_grammar_init_impl(nullptr, text.c_str(), "root", false, nullptr, 0, nullptr, 0);
        CHECK(oracle != nullptr);
        bool in_character = false; // there llama.cpp says no earlier than the next byte
        for (int step = 0; step < 12; ++step) {
            bool complete = false;
            for (const auto & stack : llama_grammar_get_stacks(oracle)) {
                complete = complete || stack.empty();
            }
            if (complete != matcher.complete()) {
                fprintf(stderr, "complete %d, llama.cpp %d:\n%s", matcher.complete(), complete, text.c_str());
                exit(1);
            }
            const std::string piece = PIECES[rng() % std::size(PIECES)];
            const bool        continues = (piece[0] & 0xC0) == 0x80;
            const bool        cut = piece == "\xC3" || piece == "\xE2\x82";
            if (continues != in_character || (cut && step > 8)) {
                continue; // not UTF-8: llama.cpp does not look
            }
            if (continues && piece != "\xA4") {
                continue;
            }
            lcs::grammar_matcher before(matcher);
            const bool           taken = matcher.accept_text(piece);
            bool                 expected = true;
            try {
                llama_grammar_accept_str(*oracle, piece);
            } catch (const std::exception &) {
                expected = false;
            }
            if (cut && expected && !taken) {
                break; // ours looked ahead: the character that begins here fits nowhere
            }
            if (taken != expected) {
                fprintf(stderr, "piece \"%s\": %d, llama.cpp %d:\n%s", piece.c_str(), taken, expected, text.c_str());
                exit(1);
            }
            ++(taken ? n_taken : n_refused);
            if (!taken) {
                CHECK(matcher.complete() == before.complete());
                break;
            }
            in_character = cut && piece == "\xC3";
            if (piece == "\xE2\x82") {
                break;
            }
        }
        llama_grammar_free_impl(oracle);
    }
}

// Output that llama.cpp's engine doubles its stacks on.
void follow_the_ambiguous() {
    lcs::grammar_matcher matcher(lcs::compile_grammar(SEEDS[4], nullptr, nullptr), nullptr, nullptr);
    for (int i = 0; i < 2000; ++i) {
        CHECK(matcher.accept_text("a"));
    }
    CHECK(matcher.complete() == false);
    for (int i = 0; i < 1999; ++i) {
        CHECK(matcher.accept_text("b"));
    }
    CHECK(matcher.complete());
    CHECK(!matcher.accept_text("b"));

    // Two alternatives a rule: 2^200 readings, and as many paths for a naive search for left recursion.
    std::string deep = "root ::= r0\n";
    for (int i = 0; i < 200; ++i) {
        const std::string next = "r" + std::to_string(i + 1);
        deep += "r" + std::to_string(i) + " ::= " + next + " \"b\" | " + next + " \"b\" | " + next + "\n";
    }
    deep += "r200 ::= \"a\"\n";
    lcs::grammar_matcher wide(lcs::compile_grammar(deep.c_str(), nullptr, nullptr), nullptr, nullptr);
    CHECK(wide.accept_text("a") && wide.complete());
    for (int i = 0; i < 200; ++i) {
        CHECK(wide.accept_text("b"));
    }
    CHECK(wide.complete() && !wide.accept_text("b"));

    // What a rule may begin with is itself behind a part that may be empty: llama.cpp accepts it and never returns.
    const char * const   behind_nothing = "root ::= a root \"c\" | \"x\"\na ::= b\nb ::= | \"y\"\n";
    lcs::grammar_matcher hidden(lcs::compile_grammar(behind_nothing, nullptr, nullptr), nullptr, nullptr);
    CHECK(hidden.accept_text("x") && hidden.complete());
    for (int i = 0; i < 50; ++i) {
        CHECK(hidden.accept_text("c") && hidden.complete());
    }

    // A list stays as deep as it began.
    const char * const   a_list = "root ::= \"[\" l \"]\"\nl ::= i l | i\ni ::= [a-z] (\",\" | \";\")";
    lcs::grammar_matcher list(lcs::compile_grammar(a_list, nullptr, nullptr), nullptr, nullptr);
    CHECK(list.accept_text("["));
    for (int i = 0; i < 100000; ++i) {
        CHECK(list.accept_text("a,"));
        CHECK(list.n_frames() < 2000);
    }
    CHECK(list.accept_text("]") && list.complete());
}

} // namespace

int main(int argc, char ** argv) {
    const int    n_texts = argc > 1 ? atoi(argv[1]) : 20000;
    std::mt19937 rng(argc > 2 ? static_cast<uint32_t>(atoi(argv[2])) : 1);

    follow_the_ambiguous();
    int64_t n_good = 0;
    for (const char * seed : SEEDS) {
        n_good += is_grammar(seed) ? 1 : 0;
    }
    CHECK(n_good == 9); // all but the left recursion: nested repetitions cost no more than their text
    int64_t n_mutants = 0;
    for (int i = 0; i < n_texts; ++i) {
        std::string text = SEEDS[rng() % std::size(SEEDS)];
        mutate(text, rng);
        n_mutants += is_grammar(text) ? 1 : 0;
    }
    CHECK(n_mutants > n_texts / 100 && n_mutants < n_texts);
    int64_t n_taken = 0;
    int64_t n_refused = 0;
    for (int i = 0; i < n_texts / 5; ++i) {
        compare_with_llama(rng, n_taken, n_refused);
    }
    CHECK(n_taken > n_texts && n_refused > n_texts / 2);
    return 0;
}

#endif
