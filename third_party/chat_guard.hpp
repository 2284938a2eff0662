// Limits for llama-common's template engine, reply parser and schema converter, which have none: time, stack, memory.
// Also keeps which bytes of a render came from its input, and does once what would be done again: chat_repeat.hpp.
//
// Included before everything else in every file of llama_chat, and first in whatever includes chat.h of llama-common.
// No file of llama.cpp is changed: where its code calls one of the functions named below, a macro that lives only while
// that code is read lets the call pass through here. Most are told from the function's own definition by their first
// token, so a pin that calls them in a new way does not compile, rather than going unguarded.
//
// Nothing happens on a thread that has no armed `run`.
#pragma once

#include <algorithm>
#include <cassert>
#include <chrono>
#include <cmath>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <ctime>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <sstream>
#include <stdexcept>
#include <string>
#include <string_view>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "chat_repeat.hpp"

#include "jinja/lexer.h"
#include "jinja/string.h"
#include "jinja/utils.h"

namespace jinja {
struct context;
struct func_args;
struct statement;
struct value_string_t;
struct value_t;
} // namespace jinja

namespace chat_guard {

using value = std::shared_ptr<jinja::value_t>;

constexpr int     MAX_SECONDS = 10;                       // of CPU time
constexpr size_t  MAX_OUTPUT_BYTES = size_t{64} << 20;    // of one text
constexpr size_t  MAX_VALUE_BYTES = size_t{1} << 30;      // of all values that one render makes, large texts apart
constexpr size_t  MAX_TEXT_BYTES = size_t{512} << 20;     // of all large texts alive at once
constexpr int64_t MAX_RANGE_ITEMS = 1000000;              // of all ranges of one render, and of one list
constexpr double  MAX_COMPARISONS = 2e10;                 // bytes one search may look at

// A part of a text, from where the one before it ends: whether it came from the messages.
struct stretch {
    size_t end;
    bool   is_input;
};

// What one render gave. No stretch is empty, and no two neighbours are alike.
struct rendered {
    std::string          text;
    std::vector<stretch> stretches;
};

// One call of llama-common under limits, on the thread that arms it. Past a limit every guarded step throws, whatever
// llama-common catches in between, and `broken` says which limit it was.
class run {
public:
    explicit run(std::vector<std::string> variables = {}) : variables_(std::move(variables)) {}
    ~run();
    run(const run &) = delete;
    run & operator=(const run &) = delete;

    // Stack bytes are counted from the frame that arms.
    void arm(size_t max_stack_bytes, bool keep_renders);
    void disarm();

    const std::string &           broken() const { return broken_; }
    bool                          out_of_stack() const { return out_of_stack_; }
    const std::vector<rendered> & renders() const { return renders_; }
    // What llama-common would have printed.
    const std::vector<std::string> & notes() const { return notes_; }

    // What is known from earlier calls: analyses, which grow, and whether the caller has what follows from a text that
    // begins a reply. If it has, the call ends with `enough`.
    void know(analyses & found, std::function<bool(const std::string &)> has_rest);
    analyses *      known_analyses() const { return analyses_; }
    const prompts & prompted() const { return prompts_; }
    void            prompt(const std::string & prompt, const std::string & generation_prompt);

    void step();
    void enter() { step(); node_bytes_ = 0; }
    void charge(size_t n_bytes);  // bytes of values that may stay
    void pass(size_t n_bytes);    // bytes that one node of the template copies
    void track(const value & text, size_t n_bytes);
    void count_range(int64_t n);
    [[noreturn]] void give_up(const std::string & limit);
    void begin_render();
    // The same, where it may have been done before: what of the input is still to be loaded.
    const common_json & begin_render(const jinja::program & program, const common_json & input, bool mark_input);
    value execute(jinja::context & ctx, const jinja::program & program);
    void end_render(const value & text);
    void hold(const value & v);
    void keep(const jinja::string & text);
    void note(std::string text);

    bool repr_of_input = false; // a container that holds input was turned into text

    const std::vector<std::string> & variables() const { return variables_; }

private:
    void let_go();

    analyses *                               analyses_ = nullptr;
    std::function<bool(const std::string &)> has_rest_;
    prompts                                  prompts_;
    last_render                              last_;
    last_render::next                        next_ = last_render::next::anew;

    std::vector<std::string> variables_; // names that the caller gave values for
    std::string              broken_;
    bool                     out_of_stack_ = false;
    bool                     keep_renders_ = false;
    std::vector<rendered>    renders_;
    size_t                   kept_bytes_ = 0;
    std::vector<std::string> notes_;
    // Containers a template made or was given. Held to the end of the render and emptied one by one, newest first: a
    // chain or a cycle of them would otherwise be freed by recursion, or never.
    std::vector<value>       held_;
    uintptr_t                stack_base_ = 0;
    size_t                   max_stack_bytes_ = 0;
    std::chrono::nanoseconds cpu_begin_{0};
    std::chrono::steady_clock::time_point deadline_; // the earliest the CPU time can be used up
    uint32_t                 n_steps_ = 0;
    size_t                   node_bytes_ = 0;
    size_t                   value_bytes_ = 0;
    std::vector<std::pair<std::weak_ptr<jinja::value_t>, size_t>> texts_;
    size_t                   text_bytes_ = 0;
    int64_t                  n_range_ = 0;
};

run * armed() noexcept;

inline void step() {
    if (run * r = armed()) {
        r->step();
    }
}

inline int zero() {
    step();
    return 0;
}

template <class T>
T && stepped(T && v) {
    step();
    return std::forward<T>(v);
}

// `stepping * x` is x, after a step: a prefix that needs no closing parenthesis.
struct stepping_t {};
inline constexpr stepping_t stepping{};
template <class T>
T && operator*(stepping_t, T && v) {
    step();
    return std::forward<T>(v);
}

// Of jinja/runtime.cpp.
jinja::context & entered(jinja::context & ctx);
struct leaving {
    const jinja::statement * node;
};
value operator->*(value result, leaving how);
const jinja::string &    appended(const jinja::string & text);
const std::string &      appended(const std::string & text);
const jinja::func_args & tested(const std::string & name, const jinja::func_args & args);
void                     weigh_membership(const value & needle, const value & haystack);
// Functions by name. The engine copies all of them for each name that it meets: this is what it copies instead.
template <class Functions>
struct look {
    const Functions & of;
    auto find(const std::string & name) const { return of.find(name); }
    auto end() const { return of.end(); }
    auto & at(const std::string & name) const { return of.at(name); }
};
struct looking_t {};
inline constexpr looking_t looking{};
template <class Functions>
look<Functions> operator->*(const Functions & of, looking_t) {
    return {of};
}

// Of jinja/value.h and value.cpp.
void          before_call(const std::string & name, const jinja::func_args & args);
value         after_call(const std::string & name, bool bound, const jinja::func_args & args, value result);
std::string   repr_of(const value & v);
std::ostringstream & grown(std::ostringstream & text);

template <class Function, class Args>
value invoked(const Function & function, const Args & args) {
    if (armed() == nullptr) {
        return function.val_func(args);
    }
    before_call(function.name, args);
    return after_call(function.name, function.arg0 != nullptr, args, function.val_func(args));
}

// `a % b` of integers, where b may be 0.
struct checked_t {};
inline constexpr checked_t checked{};
struct checked_int {
    int64_t value;
};
inline checked_int operator->*(int64_t value, checked_t) { return {value}; }
inline int64_t operator%(checked_int a, checked_int b) {
    if (b.value == 0) {
        throw std::runtime_error("division by zero");
    }
    return b.value == -1 ? 0 : a.value % b.value;
}

// Of chat.cpp and caps.cpp.
jinja::context &    begun(jinja::context & ctx);
const common_json & begun(const jinja::program & program, const common_json & input, bool mark_input);
void                loaded(jinja::context & ctx);
struct executing {
    jinja::context &       ctx;
    const jinja::program & program;
};
const jinja::program & no_program();
value                  operator->*(const value & nothing, executing how);
struct keeping_t {};
inline constexpr keeping_t keeping{};
std::shared_ptr<jinja::value_string_t> operator->*(std::shared_ptr<jinja::value_string_t> text, keeping_t);

// Of the files that derive parsers: the prompts are final.
struct after {};
after prompted(const std::string & prompt, const std::string & generation_prompt);
template <class T>
T && operator->*(after, T && v) {
    return std::forward<T>(v);
}

// Of json-schema-to-grammar.cpp, which prints.
void note(const char * format, ...)
#if defined(__GNUC__)
    __attribute__((format(printf, 1, 2)))
#endif
    ;

} // namespace chat_guard

#define all_of(first, ...)        all_of(chat_guard::stepped(first), __VA_ARGS__)
#define equal(first, ...)         equal(chat_guard::stepped(first), __VA_ARGS__)
#define val_func(args)            chat_guard::invoked(*this, args)
#define value_to_string_repr(...) CHAT_GUARD_REPR_##__VA_ARGS__)
#define CHAT_GUARD_REPR_const     value_to_string_repr(const
#define CHAT_GUARD_REPR_key       chat_guard::repr_of(key
#define CHAT_GUARD_REPR_val       chat_guard::repr_of(val
#include "jinja/value.h"
#undef all_of
#undef equal
#undef val_func
#undef value_to_string_repr
#undef CHAT_GUARD_REPR_const
#undef CHAT_GUARD_REPR_key
#undef CHAT_GUARD_REPR_val

#define append(text)                       append(chat_guard::appended(text))
#define gather_string_parts_recursive(...) CHAT_GUARD_GATHER_##__VA_ARGS__)
#define CHAT_GUARD_GATHER_const            gather_string_parts_recursive(const
#define CHAT_GUARD_GATHER_item             gather_string_parts_recursive(chat_guard::stepping * item
#define CHAT_GUARD_GATHER_val              gather_string_parts_recursive(val
#include "jinja/runtime.h"
#undef append
#undef gather_string_parts_recursive
#undef CHAT_GUARD_GATHER_const
#undef CHAT_GUARD_GATHER_item
#undef CHAT_GUARD_GATHER_val

// Upstream's trace points, in the loops that evaluate nothing themselves.
#undef JJ_DEBUG
#define JJ_DEBUG(...) chat_guard::step()

#if defined(CHAT_GUARD_RUNTIME)
#    define append(text)               append(chat_guard::appended(text))
#    define second(args)               second(chat_guard::tested(test_name, args))
#    define test_is_in()               (chat_guard::weigh_membership(left_val, right_val), test_is_in())
#    define global_builtins()          (global_builtins() ->* chat_guard::looking)
#    define get_builtins()             get_builtins() ->* chat_guard::looking
// A copy of all variables for each item of a loop, of use only where the items are chosen by a test.
#    define loop_scope(all)                       \
        *all_of_loop = &all;                       \
        std::optional<context> chosen_by;          \
        context & loop_scope = select_expr != nullptr ? chosen_by.emplace(*all_of_loop) : *all_of_loop
#    define execute_impl(ctx)          CHAT_GUARD_EXECUTE_##ctx)
#    define CHAT_GUARD_EXECUTE_context execute_impl(context
#    define CHAT_GUARD_EXECUTE_ctx     execute_impl(chat_guard::entered(ctx)) ->* chat_guard::leaving({this}
#elif defined(CHAT_GUARD_VALUE)
#    include "json.h"
#    include "unicode.h"
#    define sort(...)                    stable_sort(__VA_ARGS__) // bears a comparison that is no order
#    define test_fn(args)                test_fn(chat_guard::tested(test_name, args))
#    define val_int                      as_int() ->* chat_guard::checked
#    define value_to_json_internal(...)  CHAT_GUARD_JSON_##__VA_ARGS__)
#    define CHAT_GUARD_JSON_std          value_to_json_internal(std
#    define CHAT_GUARD_JSON_oss          value_to_json_internal(chat_guard::grown(oss)
#    define from_json(...)               CHAT_GUARD_FROM_##__VA_ARGS__)
#    define CHAT_GUARD_FROM_const        from_json(const
#    define CHAT_GUARD_FROM_item         from_json(chat_guard::stepping * item
#    define CHAT_GUARD_FROM_it           from_json(chat_guard::stepping * it
#    define mark_used(...)               CHAT_GUARD_USED_##__VA_ARGS__)
#    define CHAT_GUARD_USED_value        mark_used(value
#    define CHAT_GUARD_USED_const_cast   mark_used(const_cast
#    define CHAT_GUARD_USED_item         mark_used(chat_guard::stepping * item
#    define CHAT_GUARD_USED_pair         mark_used(chat_guard::stepping * pair
#elif defined(CHAT_GUARD_CAPS)
#    include "jinja/caps.h"
#    define gather_string_parts(result)  gather_string_parts(result) ->* chat_guard::keeping
#    define global_from_json(ctx, ...) \
        global_from_json(chat_guard::begun(ctx), __VA_ARGS__), chat_guard::loaded(ctx)
#elif defined(CHAT_GUARD_CHAT)
#    include "jinja/caps.h"
#    include "chat-auto-parser.h"
#    define gather_string_parts(result)  gather_string_parts(result) ->* chat_guard::keeping
#    define global_from_json(ctx, input, mark) \
        global_from_json(ctx, chat_guard::begun(tmpl.prog, input, mark), mark), chat_guard::loaded(ctx)
#    define execute(program)             execute(chat_guard::no_program()) ->* chat_guard::executing{ctx, program}
#    define analyze_template(tmpl)       analysis_complete, chat_guard::analyse(autoparser, tmpl)
namespace chat_guard {
void analyse(autoparser::autoparser & analysis, const common_chat_template & tmpl);
}
#elif defined(CHAT_GUARD_PARSER)
#    include "chat-peg-parser.h"
#    define build_chat_peg_parser \
        chat_guard::prompted(data.prompt, data.generation_prompt) ->* build_chat_peg_parser
#elif defined(CHAT_GUARD_DERIVED)
#    include "chat-auto-parser.h"
#    define build_parser(...)            CHAT_GUARD_BUILD_##__VA_ARGS__)
#    define CHAT_GUARD_BUILD_const       build_parser(const
#    define CHAT_GUARD_BUILD_ctx         build_parser(ctx
#    define CHAT_GUARD_BUILD_inputs \
        build_parser(chat_guard::prompted(data.prompt, data.generation_prompt) ->* inputs
#    define CHAT_GUARD_BUILD_parser_build_context build_parser(parser_build_context
#elif defined(CHAT_GUARD_PEG)
#    include "peg-parser.h"
#    include "json-schema-to-grammar.h"
#    include <regex>
#    define exec(arena, ctx, start) exec(chat_guard::stepped(arena), ctx, start)
#elif defined(CHAT_GUARD_SCHEMA)
#    include "json-schema.h"
#    include "json-schema-to-grammar.h"
#    include "common.h"
#    include "trie.h"
#    include <regex>
#    define kind()                       kind() + chat_guard::zero()
#    define regex_replace(text, ...)     regex_replace(chat_guard::stepped(text), __VA_ARGS__)
#    define fprintf(stream, ...)         chat_guard::note(__VA_ARGS__)
#    define build_node(...)              CHAT_GUARD_NODE_##__VA_ARGS__)
#    define CHAT_GUARD_NODE_const        build_node(const
#    define CHAT_GUARD_NODE_resolve_ref  build_node(chat_guard::stepping * resolve_ref
#    define CHAT_GUARD_NODE_alt          build_node(chat_guard::stepping * alt
#    define CHAT_GUARD_NODE_prop         build_node(chat_guard::stepping * prop
#    define CHAT_GUARD_NODE_additional   build_node(chat_guard::stepping * additional
#    define CHAT_GUARD_NODE_item         build_node(chat_guard::stepping * item
#    define CHAT_GUARD_NODE_items        build_node(chat_guard::stepping * items
#    define CHAT_GUARD_NODE_root_        build_node(chat_guard::stepping * root_
#endif
