// A grammar as rules, and what of it is left to write. grammar.cpp makes the rules from GBNF text; matcher.cpp follows
// an output through them. llama.cpp's own engine is not used: some texts make it hang, abort or exhaust memory (an
// ambiguous grammar doubles its stacks with every character), and it prints its errors to stderr.
#pragma once

#include "lcs_internal.hpp"

#include <array>
#include <regex>
#include <string_view>

namespace lcs {

constexpr size_t   MAX_GRAMMAR_BYTES = 1 << 20;
constexpr int      MAX_GRAMMAR_NESTING = 256;
constexpr uint64_t MAX_GRAMMAR_REPEAT = 4096;
constexpr size_t   MAX_GRAMMAR_ELEMENTS = 1 << 20; // after repetitions are written out

// One symbol of an alternative.
struct grammar_element {
    enum kind : uint32_t { END, REF, CHAR, CLASS, ANY, TOKEN, TOKEN_NOT };

    kind     type;
    uint32_t value; // rule, code point, class, or token

    bool is_char() const { return type == CHAR || type == CLASS || type == ANY; }
    bool is_token() const { return type == TOKEN || type == TOKEN_NOT; }
};

struct char_class {
    bool                                       negated = false;
    std::array<uint64_t, 2>                    ascii{}; // what matches below 128, negation applied
    std::vector<std::pair<uint32_t, uint32_t>> ranges;  // sorted, apart, not negated

    bool matches(uint32_t code_point) const;
    bool matches_any(uint32_t low, uint32_t high) const;
};

struct compiled_grammar {
    struct rule {
        uint32_t first_alternative;
        uint32_t n_alternatives;
    };

    std::vector<grammar_element> elements;     // every alternative, each closed by END
    std::vector<uint32_t>        alternatives; // their first elements
    std::vector<rule>            rules;
    std::vector<char_class>      classes;
    uint32_t                     root = 0;

    bool matches(const grammar_element & element, uint32_t code_point) const;
    bool matches_any(const grammar_element & element, uint32_t low, uint32_t high) const;
};

// GRAMMAR with line, column and reason. root NULL: "root". model NULL: tokens in the text are not looked up.
std::shared_ptr<const compiled_grammar> compile_grammar(const char * text, const char * root, const model_box * model);

// What wakes a lazy grammar.
struct grammar_triggers {
    struct pattern {
        std::string text;
        std::string literal;            // every match begins with it
        bool        is_literal = false; // and it is the whole pattern
        bool        anchored = false;   // matches only at the begin of the output
        bool        whole = false;      // ^...$: tried on the whole output first
        std::regex  regex;
    };
    std::vector<int32_t> tokens; // sorted
    std::vector<pattern> patterns;
};

grammar_triggers::pattern compile_trigger(const char * text);

// Where a pattern's first group that is not empty (else its match) begins; npos: no match. n_old bytes of the output
// were searched before.
size_t find_trigger(const grammar_triggers::pattern & pattern, const std::string & output, size_t n_old);

// A UTF-8 character begun by one token and ended by a later one.
struct partial_char {
    uint32_t value = 0;
    uint32_t low = 0;     // smallest code point that may be written with this many bytes
    int      n_left = 0;  // bytes to come
};

// Appends the code points of bytes, which go on from partial. False: not UTF-8, or a NUL.
bool decode_utf8(std::string_view bytes, partial_char & partial, std::vector<uint32_t> & code_points);

// The tokens of a vocabulary in the order of their texts, so that a walk follows each common begin once.
struct vocab_walk {
    struct entry {
        int32_t  token;
        uint32_t first;    // into code_points
        uint32_t n;
        uint32_t n_common; // with the entry before
        partial_char partial;
    };
    enum token_kind : uint8_t { EMPTY, TEXT, EOG };

    std::vector<uint32_t>   code_points;
    std::vector<entry>      entries; // texts that are UTF-8, but for an end that is cut; no EOG
    std::vector<token_kind> kinds;   // of each token
    uint32_t                longest = 0;
};

std::string token_text(const model_box & model, int32_t token);

/*
 * The places in a grammar where an output can be: an Earley recogniser whose items are elements, and whose frames are
 * "this rule, begun there" with the places to go on when it ends. Equal continuations are shared, so that ambiguity
 * costs memory by its width, not by the number of readings. A copy goes on by itself.
 */
class grammar_matcher {
public:
    grammar_matcher(std::shared_ptr<const compiled_grammar> grammar, std::shared_ptr<const grammar_triggers> triggers,
                    std::shared_ptr<model_box> model);

    // Takes a token. False: the grammar does not allow it, and nothing has changed; so too after an exception.
    bool accept(int32_t token);
    // The same for a text alone, without a vocabulary.
    bool accept_text(std::string_view text);

    // Whether it could end here.
    bool complete() const { return now_.complete; }
    // A lazy grammar before its trigger: allows all but a token that triggers and does not fit.
    bool awaiting() const { return awaiting_; }
    // What it remembers, for the bound on it.
    size_t n_frames() const { return frames_.size(); }

    // Whether accept() would take it. Not while awaiting().
    bool allows(int32_t token);

    // Every token that accept() would take now, by rising id. Not while awaiting().
    void allowed(std::vector<int32_t> & tokens);

private:
    static constexpr uint32_t NONE = UINT32_MAX;

    struct item {
        uint32_t element;
        uint32_t frame;
    };
    struct frame {
        uint32_t rule;
        uint32_t callers; // head of a list in callers_
        uint64_t ended;   // step in which it last ended
    };
    struct caller {
        item     next_item; // to go on with
        uint32_t next;
    };
    struct place {
        std::vector<item> items; // terminals
        bool              complete = false;

        bool dead() const { return items.empty() && !complete; }
    };
    // Sizes to cut frames_ and callers_ back to.
    struct mark {
        size_t frames;
        size_t callers;
    };
    // Working memory: grown once, not copied.
    struct scratch {
        std::vector<item>                          work;
        std::vector<uint32_t>                      frame_of_rule;
        std::vector<std::pair<uint64_t, uint64_t>> seen; // open addressing: key, stamp
        size_t                                     n_seen = 0;
        uint64_t                                   stamp = 0;
        std::vector<uint32_t>                      code_points;
        std::vector<place>                         levels;
        std::vector<mark>                          marks;

        scratch() = default;
        scratch(const scratch &) {}
        scratch & operator=(const scratch &) { return *this; }
    };

    mark here() const { return {frames_.size(), callers_.size()}; }
    void cut(const mark & m);
    void spend(uint64_t work);
    void begin_visits();
    bool first_visit(uint64_t key);
    void begin_step();
    void close_step(place & to);
    void flatten(uint32_t frame);
    void step(const place & from, uint32_t code_point, place & to);
    bool may_continue(const place & at, const partial_char & partial) const;
    bool follow(int32_t token, std::string_view text, place & to, partial_char & partial);
    bool take(int32_t token, std::string_view text);
    bool wait(int32_t token, const std::string & text);
    bool replay(size_t begin);
    void collect();

    std::shared_ptr<const compiled_grammar> grammar_;
    std::shared_ptr<const grammar_triggers> triggers_; // null: not lazy
    std::shared_ptr<model_box>              model_;    // null: texts alone

    std::vector<frame>  frames_; // a step only appends, so that cutting them back undoes it
    std::vector<caller> callers_;
    place               now_;
    partial_char        partial_;
    uint64_t            step_ = 0; // never used twice
    size_t              step_begin_ = 0;
    size_t              collect_at_ = 1024;
    uint64_t            budget_ = 0;

    bool                                    awaiting_ = false;
    std::string                             output_; // while awaiting
    std::vector<std::pair<int32_t, size_t>> output_tokens_; // and where each ends

    scratch scratch_;
};

} // namespace lcs
