// How renders of one call are told to be the same, and where a template may first ask for add_generation_prompt.
#include "chat_repeat.hpp"

#include "chat-auto-parser.h"
#include "jinja/runtime.h"

namespace chat_guard {

namespace {

using namespace jinja;

constexpr const char * PROMPTS = "add_generation_prompt";

bool same(const common_json & a, const common_json & b) {
    if (a.is_object() || a.is_array()) {
        if (a.is_object() != b.is_object() || a.is_array() != b.is_array() || a.size() != b.size()) {
            return false;
        }
        auto other = b.begin();
        for (auto it = a.begin(); it != a.end(); ++it, ++other) {
            if ((a.is_object() && it.key() != other.key()) || !same(*it, *other)) {
                return false;
            }
        }
        return true;
    }
    if (a.is_string()) {
        return b.is_string() && a.get<std::string>() == b.get<std::string>();
    }
    return !b.is_object() && !b.is_array() && !b.is_string() && a.dump() == b.dump();
}

// But for add_generation_prompt.
bool same_besides(const common_json & a, const common_json & b) {
    auto       other = b.begin();
    const auto end = b.end();
    for (auto it = a.begin(); it != a.end(); ++it) {
        const std::string key = it.key();
        if (key == PROMPTS) {
            continue;
        }
        if (other != end && other.key() == PROMPTS) {
            ++other;
        }
        if (!(other != end) || other.key() != key || !same(*it, *other)) {
            return false;
        }
        ++other;
    }
    if (other != end && other.key() == PROMPTS) {
        ++other;
    }
    return !(other != end);
}

// Whether executing it changes nothing but variables of its own context. What is not listed may.
bool is_pure(const statement_ptr & node);

bool are_pure(const statements & nodes) {
    return std::all_of(nodes.begin(), nodes.end(), is_pure);
}

bool is_pure(const statement_ptr & node) {
    if (node == nullptr || is_stmt<noop_statement>(node) || is_stmt<comment_statement>(node) ||
        is_stmt<string_literal>(node) || is_stmt<integer_literal>(node) || is_stmt<identifier>(node)) {
        return true;
    }
    if (const auto * of = cast_stmt<if_statement>(node)) {
        return is_pure(of->test) && are_pure(of->body) && are_pure(of->alternate);
    }
    if (const auto * of = cast_stmt<set_statement>(node)) {
        return is_stmt<identifier>(of->assignee) && is_pure(of->val) && are_pure(of->body);
    }
    if (const auto * of = cast_stmt<binary_expression>(node)) {
        return is_pure(of->left) && is_pure(of->right);
    }
    if (const auto * of = cast_stmt<unary_expression>(node)) {
        return is_pure(of->argument);
    }
    if (const auto * of = cast_stmt<ternary_expression>(node)) {
        return is_pure(of->condition) && is_pure(of->true_expr) && is_pure(of->false_expr);
    }
    if (const auto * of = cast_stmt<member_expression>(node)) {
        return is_pure(of->object) && is_pure(of->property);
    }
    if (const auto * of = cast_stmt<test_expression>(node)) {
        return is_pure(of->operand) && is_stmt<identifier>(of->test);
    }
    return false;
}

// The first statement that may ask for add_generation_prompt, and none before it: a variable is told by its name, and
// a statement begins after those before it have ended.
size_t first_that_asks(const statements & body, const std::string & source) {
    const size_t at = source.find(PROMPTS);
    size_t       n = 0;
    while (n < body.size() && body[n]->pos <= at) {
        ++n;
    }
    return at == std::string::npos ? body.size() : n > 0 ? n - 1 : 0;
}

} // namespace

struct last_render::state {
    const program * of = nullptr;
    common_json     input;
    bool            mark_input = false;
    bool            prompts = false; // the render that goes on, or went last
    value           texts[2];        // without and with add_generation_prompt; none: not rendered to its end

    size_t                   n_head = 0; // statements before the tail
    std::vector<value>       head;       // what these gave
    std::unique_ptr<context> fork;       // variables as the tail begins, add_generation_prompt the other way; or none
    charges                  before_tail{};
};

last_render::last_render() = default;
last_render::~last_render() = default;

last_render::next last_render::plan(const program & of, const common_json & input, bool mark_input) {
    const bool prompts = input.contains(PROMPTS);
    if (state_ != nullptr && state_->of == &of && state_->mark_input == mark_input &&
        same_besides(state_->input, input)) {
        state_->prompts = prompts;
        if (state_->texts[prompts] != nullptr) {
            return next::known;
        }
        if (state_->texts[!prompts] != nullptr && state_->fork != nullptr) {
            return next::tail;
        }
    }
    state_ = std::make_unique<state>();
    state_->of = &of;
    state_->input = input;
    state_->prompts = prompts;
    state_->mark_input = mark_input;
    return next::anew;
}

value last_render::execute(context & ctx, const std::function<charges()> & charged) {
    state &            own = *state_;
    const statements & body = own.of->body;
    own.n_head = first_that_asks(body, *ctx.src);
    const bool forks = std::all_of(body.begin() + static_cast<ptrdiff_t>(own.n_head), body.end(), is_pure);
    auto       results = mk_val<value_array>();
    for (size_t i = 0; i < body.size() || i == own.n_head; ++i) {
        if (i == own.n_head && forks) {
            own.before_tail = charged();
            own.head = results->as_array();
            own.fork = std::make_unique<context>(ctx);
            const value other = own.prompts ? value(mk_val<value_undefined>(PROMPTS)) : mk_val<value_bool>(true);
            own.fork->set_val(PROMPTS, other);
        }
        if (i < body.size()) {
            results->push_back(body[i]->execute(ctx));
        }
    }
    return results;
}

value last_render::go_on() {
    state & own = *state_;
    auto    results = mk_val<value_array>(std::move(own.head));
    const std::unique_ptr<context> fork = std::move(own.fork);
    for (size_t i = own.n_head; i < own.of->body.size(); ++i) {
        results->push_back(own.of->body[i]->execute(*fork));
    }
    return results;
}

const last_render::charges & last_render::before_tail() const {
    return state_->before_tail;
}

void last_render::end(const value & text) {
    if (state_ != nullptr) {
        state_->texts[state_->prompts] = text;
    }
}

const value & last_render::text() const {
    return state_->texts[state_->prompts];
}

} // namespace chat_guard
