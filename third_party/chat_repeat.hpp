// What llama-common would do again with the same result, and here does once.
//
// Of a call: it renders a conversation three times and compares two of the texts. A render of what was rendered last is
// not done again, and one that differs in add_generation_prompt alone goes on from the first statement of the template
// that may ask for it. Of a template: the analysis that a parser of replies is derived from. Of a kind of request: what
// follows from the request without its messages, and from the text that begins a reply.
//
// Part of chat_guard.hpp, which says how the calls get here.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <string>

class common_json;
struct common_chat_template;

namespace jinja {
struct context;
struct program;
struct value_t;
} // namespace jinja

namespace autoparser {
struct autoparser;
}

namespace chat_guard {

// Of the templates of one handle. Told by their addresses: it must not outlive them.
using analyses = std::map<const common_chat_template *, std::shared_ptr<const autoparser::autoparser>>;

// The texts of a render that depend on its messages. llama-common makes the rest of its result from the second one, and
// from the request without its messages.
struct prompts {
    std::string prompt;
    std::string generation_prompt;
};

// Thrown where the caller has that rest. No std::exception, which llama-common would make into another error.
struct enough {};

// The last render of a call, for the one after it.
class last_render {
public:
    using value = std::shared_ptr<jinja::value_t>;
    struct charges { // what it has cost so far, in the run's measures
        size_t  value_bytes;
        int64_t n_range;
    };
    enum class next { anew, tail, known };

    last_render();
    ~last_render();

    // How much of a render of this input has to be done: all, by `execute`; the rest, by `go_on`; nothing: it is `text`.
    next            plan(const jinja::program & program, const common_json & input, bool mark_input);
    value           execute(jinja::context & ctx, const std::function<charges()> & charged);
    value           go_on();
    const charges & before_tail() const;
    const value &   text() const;
    // What came of it.
    void end(const value & text);

private:
    struct state;
    std::unique_ptr<state> state_;
};

} // namespace chat_guard
