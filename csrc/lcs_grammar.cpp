// GBNF text to rules: llama.cpp's syntax, read strictly and with bounds. Lazy grammars' triggers too.
#include "lcs_grammar.hpp"

#include <algorithm>
#include <cstring>
#include <map>

namespace lcs {

bool char_class::matches(uint32_t code_point) const {
    if (code_point < 128) {
        return (ascii[code_point / 64] >> (code_point % 64) & 1) != 0;
    }
    const auto after = std::upper_bound(ranges.begin(), ranges.end(), code_point,
                                        [](uint32_t c, const auto & range) { return c < range.first; });
    const bool found = after != ranges.begin() && code_point <= std::prev(after)->second;
    return found != negated;
}

bool char_class::matches_any(uint32_t low, uint32_t high) const {
    const auto after = std::upper_bound(ranges.begin(), ranges.end(), high,
                                        [](uint32_t c, const auto & range) { return c < range.first; });
    if (after == ranges.begin()) {
        return negated;
    }
    const auto last = std::prev(after); // begins at or before high
    // Ranges lie apart, so that only one alone can cover all of low..high.
    return negated ? !(last->first <= low && high <= last->second) : low <= last->second;
}

bool compiled_grammar::matches(const grammar_element & element, uint32_t code_point) const {
    switch (element.type) {
        case grammar_element::CHAR:  return element.value == code_point;
        case grammar_element::CLASS: return classes[element.value].matches(code_point);
        case grammar_element::ANY:   return true;
        default:                     return false;
    }
}

bool compiled_grammar::matches_any(const grammar_element & element, uint32_t low, uint32_t high) const {
    switch (element.type) {
        case grammar_element::CHAR:  return low <= element.value && element.value <= high;
        case grammar_element::CLASS: return classes[element.value].matches_any(low, high);
        case grammar_element::ANY:   return true;
        default:                     return false;
    }
}

bool decode_utf8(std::string_view bytes, partial_char & partial, std::vector<uint32_t> & code_points) {
    for (const char c : bytes) {
        const uint32_t byte = static_cast<uint8_t>(c);
        if (partial.n_left > 0) {
            if ((byte & 0xC0) != 0x80) {
                return false;
            }
            partial.value = partial.value << 6 | (byte & 0x3F);
            if (--partial.n_left == 0) {
                if (partial.value < partial.low || partial.value > 0x10FFFF ||
                    (partial.value >= 0xD800 && partial.value < 0xE000)) {
                    return false;
                }
                code_points.push_back(partial.value);
            }
        } else if (byte == 0) {
            return false;
        } else if (byte < 0x80) {
            code_points.push_back(byte);
        } else if (byte >= 0xC2 && byte < 0xE0) {
            partial = {byte & 0x1F, 0x80, 1};
        } else if (byte >= 0xE0 && byte < 0xF0) {
            partial = {byte & 0x0F, 0x800, 2};
        } else if (byte >= 0xF0 && byte < 0xF5) {
            partial = {byte & 0x07, 0x10000, 3};
        } else {
            return false;
        }
    }
    return true;
}

namespace {

using element = grammar_element;

bool is_name_char(char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '-';
}

bool is_digit(char c) {
    return c >= '0' && c <= '9';
}

class parser {
public:
    parser(const char * text, size_t n_bytes, const model_box * model)
        : begin_(text), at_(text), end_(text + n_bytes), model_(model) {}

    std::shared_ptr<const compiled_grammar> parse(const char * root) {
        skip_space(true);
        while (at_ != end_) {
            parse_rule();
        }
        const auto found = names_.find(root);
        if (found == names_.end() || !bodies_[found->second].defined) {
            fail(LCS_STATUS_GRAMMAR, std::string("the grammar has no rule \"") + root + "\"", "root");
        }
        for (const auto & [name, rule] : names_) {
            if (!bodies_[rule].defined) {
                at_ = bodies_[rule].first_use;
                refuse("rule \"" + name + "\" is not defined");
            }
        }
        refuse_left_recursion();
        return link(found->second);
    }

private:
    struct body {
        std::vector<std::vector<element>> alternatives;
        bool                              defined = false;
        const char *                      first_use = nullptr;
    };

    [[noreturn]] void refuse(const std::string & reason) const {
        size_t line = 1;
        const char * line_begin = begin_;
        for (const char * c = begin_; c != at_; ++c) {
            if (*c == '\n') {
                ++line;
                line_begin = c + 1;
            }
        }
        fail(LCS_STATUS_GRAMMAR, "line " + std::to_string(line) + ", column " + std::to_string(at_ - line_begin + 1) +
                                     ": " + reason);
    }

    char peek(size_t ahead = 0) const { return static_cast<size_t>(end_ - at_) > ahead ? at_[ahead] : '\0'; }

    void skip_space(bool newlines) {
        for (;; ++at_) {
            if (peek() == '#') {
                while (at_ != end_ && *at_ != '\n' && *at_ != '\r') {
                    ++at_;
                }
            }
            const char c = peek();
            if (!(c == ' ' || c == '\t' || (newlines && (c == '\n' || c == '\r')))) {
                return;
            }
        }
    }

    std::string_view parse_name() {
        const char * first = at_;
        while (is_name_char(peek())) {
            ++at_;
        }
        if (at_ == first) {
            refuse("a rule name is expected");
        }
        return {first, static_cast<size_t>(at_ - first)};
    }

    uint64_t parse_int(uint64_t limit, const char * what) {
        if (!is_digit(peek())) {
            refuse(std::string(what) + " is expected");
        }
        uint64_t value = 0;
        while (is_digit(peek())) {
            value = value * 10 + static_cast<uint64_t>(peek() - '0');
            if (value > limit) {
                refuse(std::string(what) + " over " + std::to_string(limit));
            }
            ++at_;
        }
        return value;
    }

    uint32_t parse_hex(int n_digits) {
        uint32_t value = 0;
        for (int i = 0; i < n_digits; ++i, ++at_) {
            const char c = peek();
            const char lower = static_cast<char>(c | 0x20);
            if (is_digit(c)) {
                value = value << 4 | static_cast<uint32_t>(c - '0');
            } else if (lower >= 'a' && lower <= 'f') {
                value = value << 4 | static_cast<uint32_t>(lower - 'a' + 10);
            } else {
                refuse(std::to_string(n_digits) + " hexadecimal digits are expected");
            }
        }
        return value;
    }

    uint32_t parse_char() {
        if (at_ == end_) {
            refuse("the text ends inside a literal");
        }
        if (*at_ == '\\') {
            const char escape = peek(1);
            at_ += escape != '\0' ? 2 : 1;
            switch (escape) {
                case 'x': return parse_hex(2);
                case 'u': return parse_hex(4);
                case 'U': return parse_hex(8);
                case 't': return '\t';
                case 'r': return '\r';
                case 'n': return '\n';
                case '\\':
                case '"':
                case '[':
                case ']':
                case '-': return static_cast<uint32_t>(escape);
                default:  refuse("an escape that is none of \\x \\u \\U \\t \\r \\n \\\\ \\\" \\[ \\] \\-");
            }
        }
        const uint8_t lead = static_cast<uint8_t>(*at_);
        const size_t  n = lead < 0x80 ? 1 : lead < 0xE0 ? 2 : lead < 0xF0 ? 3 : 4;
        code_points_.clear();
        partial_char partial;
        if (static_cast<size_t>(end_ - at_) < n || !decode_utf8({at_, n}, partial, code_points_) ||
            code_points_.size() != 1) {
            refuse("not UTF-8");
        }
        at_ += n;
        return code_points_[0];
    }

    uint32_t rule_of(std::string_view name) {
        const auto [place, is_new] = names_.emplace(std::string(name), static_cast<uint32_t>(bodies_.size()));
        if (is_new) {
            bodies_.emplace_back().first_use = name.data();
        }
        return place->second;
    }

    void count_elements(size_t n) {
        n_elements_ += n;
        if (n_elements_ > MAX_GRAMMAR_ELEMENTS) {
            refuse("the grammar has more than " + std::to_string(MAX_GRAMMAR_ELEMENTS) +
                   " elements once repetitions are written out");
        }
    }

    uint32_t add_rule(std::vector<std::vector<element>> alternatives) {
        for (const auto & alternative : alternatives) {
            count_elements(alternative.size() + 1);
        }
        auto & made = bodies_.emplace_back();
        made.alternatives = std::move(alternatives);
        made.defined = true;
        return static_cast<uint32_t>(bodies_.size() - 1);
    }

    void parse_rule() {
        const auto name = parse_name();
        const auto rule = rule_of(name);
        skip_space(false);
        if (!(peek() == ':' && peek(1) == ':' && peek(2) == '=')) {
            refuse("::= is expected");
        }
        at_ += 3;
        skip_space(true);
        auto alternatives = parse_alternatives(0);
        if (peek() == '\r') {
            at_ += peek(1) == '\n' ? 2 : 1;
        } else if (peek() == '\n') {
            ++at_;
        } else if (at_ != end_) {
            refuse(*at_ == ')' ? "a ) without its (" : "the end of the line is expected");
        }
        // As in llama.cpp, the last of several definitions counts.
        bodies_[rule].alternatives = std::move(alternatives);
        bodies_[rule].defined = true;
        skip_space(true);
    }

    std::vector<std::vector<element>> parse_alternatives(int depth) {
        if (depth > MAX_GRAMMAR_NESTING) {
            refuse("nesting over " + std::to_string(MAX_GRAMMAR_NESTING));
        }
        std::vector<std::vector<element>> alternatives;
        alternatives.push_back(parse_sequence(depth));
        while (peek() == '|') {
            ++at_;
            skip_space(true);
            alternatives.push_back(parse_sequence(depth));
        }
        return alternatives;
    }

    std::vector<element> parse_sequence(int depth) {
        std::vector<element> sequence;
        size_t               last = 0; // where the item that a repetition would repeat begins
        const bool           nested = depth > 0;
        const auto           add = [&](element::kind type, uint32_t value) {
            count_elements(1);
            sequence.push_back({type, value});
        };
        count_elements(1);
        while (at_ != end_) {
            const char c = *at_;
            if (c == '"') {
                ++at_;
                last = sequence.size();
                while (peek() != '"') {
                    add(element::CHAR, parse_char());
                }
                ++at_;
            } else if (c == '[') {
                last = sequence.size();
                add(element::CLASS, parse_class());
            } else if (c == '.') {
                ++at_;
                last = sequence.size();
                add(element::ANY, 0);
            } else if (c == '<' || c == '!') {
                at_ += c == '!' ? 1 : 0;
                last = sequence.size();
                add(c == '!' ? element::TOKEN_NOT : element::TOKEN, parse_token());
            } else if (is_name_char(c)) {
                const uint32_t rule = rule_of(parse_name());
                last = sequence.size();
                add(element::REF, rule);
            } else if (c == '(') {
                const char * open = at_;
                ++at_;
                skip_space(true);
                auto inner = parse_alternatives(depth + 1);
                if (peek() != ')') {
                    at_ = at_ == end_ ? open : at_;
                    refuse(at_ == open ? "a ( without its )" : ") is expected");
                }
                ++at_;
                last = sequence.size();
                add(element::REF, add_rule(std::move(inner)));
            } else if (c == '*' || c == '+' || c == '?' || c == '{') {
                if (last == sequence.size()) {
                    refuse(std::string("nothing to repeat before ") + c);
                }
                const auto [low, high] = parse_repeat(nested);
                repeat(sequence, last, low, high);
            } else {
                break;
            }
            skip_space(nested);
        }
        return sequence;
    }

    uint32_t parse_class() {
        ++at_;
        char_class made;
        if (peek() == '^') {
            ++at_;
            made.negated = true;
        }
        const char * inside = at_;
        while (peek() != ']') {
            const uint32_t low = parse_char();
            uint32_t       high = low;
            if (peek() == '-' && peek(1) != ']') {
                ++at_;
                high = parse_char();
            }
            // As in llama.cpp, a range that runs backwards holds nothing.
            if (low <= high) {
                made.ranges.emplace_back(low, high);
            }
            n_ranges_ += 1;
            if (n_ranges_ > MAX_GRAMMAR_ELEMENTS) {
                refuse("the grammar has more than " + std::to_string(MAX_GRAMMAR_ELEMENTS) + " character ranges");
            }
        }
        if (at_ == inside) {
            refuse("an empty character class");
        }
        ++at_;
        std::sort(made.ranges.begin(), made.ranges.end());
        size_t n = 0;
        for (const auto & range : made.ranges) {
            if (n > 0 && range.first <= made.ranges[n - 1].second + (made.ranges[n - 1].second != UINT32_MAX ? 1 : 0)) {
                made.ranges[n - 1].second = std::max(made.ranges[n - 1].second, range.second);
            } else {
                made.ranges[n++] = range;
            }
        }
        made.ranges.resize(n);
        for (uint32_t c = 0; c < 128; ++c) {
            const bool found = std::any_of(made.ranges.begin(), made.ranges.end(), [c](const auto & range) {
                return range.first <= c && c <= range.second;
            });
            if (found != made.negated) {
                made.ascii[c / 64] |= uint64_t(1) << (c % 64);
            }
        }
        classes_.push_back(std::move(made));
        return static_cast<uint32_t>(classes_.size() - 1);
    }

    // <[id]>, or <text> where that text is one token.
    uint32_t parse_token() {
        const char * first = at_;
        if (peek() != '<') {
            refuse("< is expected after !");
        }
        ++at_;
        if (peek() == '[') {
            ++at_;
            const auto token = static_cast<uint32_t>(parse_int(INT32_MAX, "a token id"));
            if (peek() != ']' || peek(1) != '>') {
                refuse("]> is expected after a token id");
            }
            at_ += 2;
            if (model_ != nullptr && token >= static_cast<uint32_t>(model_->info.n_vocab)) {
                refuse("token " + std::to_string(token) + " is outside the vocabulary of " +
                       std::to_string(model_->info.n_vocab));
            }
            return token;
        }
        constexpr size_t MAX_TOKEN_BYTES = 512;
        while (at_ != end_ && *at_ != '>' && static_cast<size_t>(at_ - first) < MAX_TOKEN_BYTES) {
            ++at_;
        }
        if (peek() != '>') {
            refuse(at_ == end_ ? "a < without its >"
                               : "a token text over " + std::to_string(MAX_TOKEN_BYTES) + " bytes");
        }
        ++at_;
        if (model_ == nullptr) {
            return 0;
        }
        llama_token tokens[2];
        if (llama_tokenize(model_->vocab, first, static_cast<int32_t>(at_ - first), tokens, 2, false, true) != 1) {
            refuse("\"" + std::string(first, at_) + "\" is not one token");
        }
        return static_cast<uint32_t>(tokens[0]);
    }

    static constexpr uint64_t UNBOUNDED = UINT64_MAX;

    std::pair<uint64_t, uint64_t> parse_repeat(bool nested) {
        switch (*at_++) {
            case '*': return {0, UNBOUNDED};
            case '+': return {1, UNBOUNDED};
            case '?': return {0, 1};
            default:  break;
        }
        skip_space(nested);
        const uint64_t low = parse_int(MAX_GRAMMAR_REPEAT, "a repetition count");
        uint64_t       high = low;
        skip_space(nested);
        if (peek() == ',') {
            ++at_;
            skip_space(nested);
            high = is_digit(peek()) ? parse_int(MAX_GRAMMAR_REPEAT, "a repetition count") : UNBOUNDED;
            skip_space(nested);
        }
        if (peek() != '}') {
            refuse("} is expected");
        }
        if (low > high) {
            refuse("a repetition from " + std::to_string(low) + " to " + std::to_string(high));
        }
        ++at_;
        return {low, high};
    }

    // x{2,4} becomes x x s2, with s2 ::= x s1 | and s1 ::= x | ; x{2,} becomes x x s, with s ::= x s | .
    void repeat(std::vector<element> & sequence, size_t last, uint64_t low, uint64_t high) {
        if (sequence.size() - last > 1) {
            const std::vector<element> repeated(sequence.begin() + static_cast<ptrdiff_t>(last), sequence.end());
            const element              whole{element::REF, add_rule({repeated})};
            sequence.resize(last);
            sequence.push_back(whole);
        }
        const element one = sequence[last];
        sequence.resize(last);
        count_elements(low);
        sequence.insert(sequence.end(), low, one);
        if (high == UNBOUNDED) {
            const uint32_t rule = add_rule({{one, {element::REF, 0}}, {}});
            bodies_[rule].alternatives[0][1].value = rule;
            sequence.push_back({element::REF, rule});
        } else if (high > low) {
            uint32_t rest = add_rule({{one}, {}});
            for (uint64_t n = low + 1; n < high; ++n) {
                rest = add_rule({{one, {element::REF, rest}}, {}});
            }
            sequence.push_back({element::REF, rest});
        }
    }

    // A rule that can begin with itself. As in llama.cpp, only an alternative without elements counts as empty here, so
    // that the same grammars are refused; the matcher ends on those that are left.
    void refuse_left_recursion() {
        const auto may_be_empty = [&](uint32_t rule) {
            return std::any_of(bodies_[rule].alternatives.begin(), bodies_[rule].alternatives.end(),
                               [](const auto & alternative) { return alternative.empty(); });
        };
        struct visit {
            uint32_t rule;
            size_t   alternative;
            size_t   element;
        };
        enum : uint8_t { NEW, OPEN, DONE };
        std::vector<uint8_t> state(bodies_.size(), NEW);
        std::vector<visit>   path;
        for (uint32_t start = 0; start < bodies_.size(); ++start) {
            if (state[start] != NEW) {
                continue;
            }
            state[start] = OPEN;
            path.push_back({start, 0, 0});
            while (!path.empty()) {
                auto & at = path.back();
                const auto & alternatives = bodies_[at.rule].alternatives;
                if (at.alternative == alternatives.size()) {
                    state[at.rule] = DONE;
                    path.pop_back();
                    continue;
                }
                const auto & alternative = alternatives[at.alternative];
                const bool   leads = at.element < alternative.size() && alternative[at.element].type == element::REF &&
                                   (at.element == 0 || may_be_empty(alternative[at.element - 1].value));
                if (!leads) {
                    ++at.alternative;
                    at.element = 0;
                    continue;
                }
                const uint32_t next = alternative[at.element++].value;
                if (state[next] == OPEN) {
                    fail(LCS_STATUS_GRAMMAR, "rule \"" + name_of(next) + "\" begins with itself (left recursion)");
                }
                if (state[next] == NEW) {
                    state[next] = OPEN;
                    path.push_back({next, 0, 0});
                }
            }
        }
    }

    std::string name_of(uint32_t rule) const {
        for (const auto & [name, named] : names_) {
            if (named == rule) {
                return name;
            }
        }
        return "(...)";
    }

    std::shared_ptr<const compiled_grammar> link(uint32_t root) {
        auto made = std::make_shared<compiled_grammar>();
        made->elements.reserve(n_elements_);
        for (const auto & from : bodies_) {
            made->rules.push_back({static_cast<uint32_t>(made->alternatives.size()),
                                   static_cast<uint32_t>(from.alternatives.size())});
            for (const auto & alternative : from.alternatives) {
                made->alternatives.push_back(static_cast<uint32_t>(made->elements.size()));
                made->elements.insert(made->elements.end(), alternative.begin(), alternative.end());
                made->elements.push_back({element::END, 0});
            }
        }
        made->classes = std::move(classes_);
        made->root = root;
        return made;
    }

    const char *                                    begin_;
    const char *                                    at_;
    const char *                                    end_;
    const model_box *                               model_;
    std::map<std::string, uint32_t, std::less<>>    names_;
    std::vector<body>                               bodies_;
    std::vector<char_class>                         classes_;
    std::vector<uint32_t>                           code_points_;
    size_t                                          n_elements_ = 0;
    size_t                                          n_ranges_ = 0;
};

size_t bounded_length(const char * text, size_t limit, const char * what) {
    const size_t n = strnlen(text, limit + 1);
    if (n > limit) {
        fail(LCS_STATUS_GRAMMAR, std::string(what) + " is longer than " + std::to_string(limit) + " bytes", what,
             std::to_string(limit));
    }
    return n;
}

} // namespace

std::shared_ptr<const compiled_grammar> compile_grammar(const char * text, const char * root, const model_box * model) {
    const size_t n_bytes = bounded_length(text, MAX_GRAMMAR_BYTES, "grammar");
    return parser(text, n_bytes, model).parse(root != nullptr ? root : "root");
}

void check_grammar_text(const char * text) {
    compile_grammar(text, nullptr, nullptr);
}

grammar_triggers::pattern compile_trigger(const char * text) {
    constexpr size_t   MAX_BYTES = 1024;
    constexpr int      MAX_NESTING = 64;
    constexpr uint64_t MAX_COST = 1 << 12; // of bytes times repetition counts: the states of the automaton
    const size_t       n_bytes = bounded_length(text, MAX_BYTES, "trigger pattern");

    grammar_triggers::pattern made;
    made.text.assign(text, n_bytes);
    if (made.text.empty()) {
        fail(LCS_STATUS_GRAMMAR, "a trigger pattern is empty");
    }
    made.whole = made.text.front() == '^' && made.text.back() == '$';

    int      depth = 0;
    uint64_t cost = n_bytes;
    bool     in_class = false;
    bool     alternatives = false; // outside of groups
    bool     plain = true;         // only literal characters so far
    for (size_t i = 0; i < n_bytes; ++i) {
        const char c = text[i];
        const bool escaped = c == '\\' && i + 1 < n_bytes;
        const char named = escaped ? text[i + 1] : c;
        const bool punctuation = !is_digit(named) && (static_cast<char>(named | 0x20) < 'a' ||
                                                      static_cast<char>(named | 0x20) > 'z');
        const bool literal = escaped ? punctuation : std::strchr("\\^$.*+?()[]{}|", c) == nullptr;
        if (plain && literal) {
            made.literal += named;
        } else if (plain) {
            plain = false;
            // What a quantifier makes optional is no part of the begin, and a byte of UTF-8 is not repeated alone.
            if (c == '*' || c == '?' || c == '{') {
                made.literal.clear();
            }
        }
        if (escaped) {
            ++i;
        } else if (in_class) {
            in_class = c != ']';
        } else if (c == '[') {
            in_class = true;
        } else if (c == '(') {
            if (++depth > MAX_NESTING) {
                fail(LCS_STATUS_GRAMMAR, "a trigger pattern nests over " + std::to_string(MAX_NESTING));
            }
        } else if (c == ')') {
            --depth;
        } else if (c == '|') {
            alternatives = alternatives || depth == 0;
        } else if (c == '{') {
            uint64_t largest = 1;
            uint64_t value = 0;
            for (size_t j = i + 1; j < n_bytes && text[j] != '}'; ++j) {
                const uint64_t more = value * 10 + static_cast<uint64_t>(text[j] - '0');
                value = is_digit(text[j]) ? std::min(more, MAX_COST + 1) : 0;
                largest = std::max(largest, value);
            }
            cost *= largest;
        }
        if (cost > MAX_COST) {
            fail(LCS_STATUS_GRAMMAR, "a trigger pattern repeats too much: its bytes times its counts are over " +
                                         std::to_string(MAX_COST));
        }
    }
    made.is_literal = plain;
    made.anchored = made.text.front() == '^' && !alternatives;
    if (alternatives) {
        made.literal.clear();
    }
    if (!made.is_literal) {
        auto flags = std::regex::ECMAScript;
#if defined(__GLIBCXX__)
        // The default executor recurses once a character and backtracks without bound.
        flags |= std::regex_constants::__polynomial;
#endif
        try {
            made.regex = std::regex(made.text, flags);
        } catch (const std::regex_error & e) {
            fail(LCS_STATUS_GRAMMAR, "trigger pattern \"" + made.text.substr(0, 64) + "\": " + e.what());
        }
    }
    return made;
}

size_t find_trigger(const grammar_triggers::pattern & pattern, const std::string & output, size_t n_old) {
    if (pattern.is_literal) {
        const size_t n = pattern.literal.size();
        return output.find(pattern.literal, n_old >= n ? n_old - n + 1 : 0);
    }
    const auto group_begin = [](const std::smatch & match) {
        for (size_t i = 1; i < match.size(); ++i) {
            if (match.length(i) > 0) {
                return static_cast<size_t>(match.position(i));
            }
        }
        return static_cast<size_t>(match.position(0));
    };
    std::smatch match;
    if (pattern.whole && std::regex_match(output, match, pattern.regex)) {
        return group_begin(match);
    }
    size_t from = 0;
    auto   flags = std::regex_constants::match_default;
    if (pattern.anchored) {
        flags |= std::regex_constants::match_continuous;
    } else if (!pattern.literal.empty()) {
        from = output.find(pattern.literal);
        if (from == std::string::npos) {
            return from;
        }
        flags |= from > 0 ? std::regex_constants::match_prev_avail : std::regex_constants::match_default;
    }
    const auto begin = output.begin() + static_cast<ptrdiff_t>(from);
    return std::regex_search(begin, output.end(), match, pattern.regex, flags) ? from + group_begin(match)
                                                                               : std::string::npos;
}

} // namespace lcs
