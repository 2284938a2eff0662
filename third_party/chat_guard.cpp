// The steps that chat_guard.hpp puts into llama-common: they judge sizes before the work, and mark what is input.
#include "chat_guard.hpp"

#include "chat-auto-parser.h"

#include <typeinfo>

#if defined(_MSC_VER)
#    include <intrin.h>
#else
#    include <time.h>
#endif

namespace chat_guard {

namespace {

using jinja::cast_val;
using jinja::func_args;
using jinja::is_val;
using jinja::string;
using jinja::value_array;
using jinja::value_func;
using jinja::value_int;
using jinja::value_object;
using jinja::value_string;

// What a value costs beside its bytes, and a part of a string beside its text.
constexpr size_t VALUE_BYTES = sizeof(jinja::value_t) + 32;
constexpr size_t PART_BYTES = sizeof(jinja::string_part);
constexpr size_t LARGE_TEXT_BYTES = size_t{64} << 10;

thread_local run * t_armed = nullptr;

uintptr_t frame_address() {
#if defined(__GNUC__)
    return reinterpret_cast<uintptr_t>(__builtin_frame_address(0));
#else
    return reinterpret_cast<uintptr_t>(_AddressOfReturnAddress());
#endif
}

// Of this thread, so that a busy machine does not cut a template short.
std::chrono::nanoseconds cpu_time() {
#if defined(_MSC_VER)
    return std::chrono::steady_clock::now().time_since_epoch();
#else
    timespec time{};
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
    return std::chrono::seconds(time.tv_sec) + std::chrono::nanoseconds(time.tv_nsec);
#endif
}

size_t weight(const string & text) {
    return text.length() + text.parts.size() * PART_BYTES;
}

size_t weight(const value & v) {
    return is_val<value_string>(v) ? VALUE_BYTES + weight(v->val_str) : VALUE_BYTES;
}

void require_output(run & r, double n_bytes) {
    if (n_bytes > static_cast<double>(MAX_OUTPUT_BYTES)) {
        r.give_up("a text over " + std::to_string(MAX_OUTPUT_BYTES) + " bytes");
    }
}

void require_work(run & r, double n_comparisons) {
    if (n_comparisons > MAX_COMPARISONS) {
        r.give_up("a search that compares too many bytes");
    }
}

bool has_input(const string & text) {
    return std::any_of(text.parts.begin(), text.parts.end(),
                       [](const jinja::string_part & part) { return part.is_input && !part.val.empty(); });
}

// Whether any text in it came from the messages.
bool has_input(const value & v) {
    step();
    if (v == nullptr) {
        return false;
    }
    if (is_val<value_string>(v)) {
        return has_input(v->val_str);
    }
    if (const auto * kwarg = cast_val<jinja::value_kwarg>(v)) {
        return has_input(kwarg->val);
    }
    return std::any_of(v->val_arr.begin(), v->val_arr.end(), [](const value & item) { return has_input(item); }) ||
           std::any_of(v->val_obj.begin(), v->val_obj.end(), [](const std::pair<value, value> & item) {
               return has_input(item.first) || has_input(item.second);
           });
}

struct marked_text {
    std::string       text;
    std::vector<bool> is_input;

    explicit marked_text(const string & from) : text(from.str()) {
        is_input.reserve(text.size());
        for (const jinja::string_part & part : from.parts) {
            is_input.insert(is_input.end(), part.val.size(), part.is_input);
        }
    }
};

string to_parts(const std::string & text, const std::vector<bool> & is_input) {
    string made;
    for (size_t from = 0; from < text.size();) {
        size_t to = from;
        while (to < text.size() && is_input[to] == is_input[from]) {
            ++to;
        }
        made.parts.push_back({is_input[from], text.substr(from, to - from)});
        from = to;
    }
    return made;
}

// str.replace keeps no marks where only part of the text is input: the same walk, with them.
string replaced_marks(const string & in, const string & old_text, const string & new_text) {
    const marked_text from(in);
    const marked_text to(new_text);
    const std::string search = old_text.str();
    std::string       text;
    std::vector<bool> is_input;
    size_t            pos = 0;
    while (pos < from.text.size()) {
        const size_t found = from.text.find(search, pos);
        const size_t end = std::min(found, from.text.size());
        text.append(from.text, pos, end - pos);
        is_input.insert(is_input.end(), from.is_input.begin() + static_cast<ptrdiff_t>(pos),
                        from.is_input.begin() + static_cast<ptrdiff_t>(end));
        if (found == std::string::npos) {
            break;
        }
        text += to.text;
        is_input.insert(is_input.end(), to.is_input.begin(), to.is_input.end());
        pos = found + search.size();
    }
    return to_parts(text, is_input);
}

// join keeps no marks.
string joined_marks(const std::vector<value> & items, const value & separator) {
    string made;
    for (size_t i = 0; i < items.size(); ++i) {
        made.append(items[i]->as_string());
        if (i + 1 < items.size() && is_val<value_string>(separator)) {
            made.append(separator->val_str);
        }
    }
    return made;
}

// The pieces of a split lie one behind the other, a separator apart.
void mark_pieces(const string & in, size_t separator, const std::vector<value> & pieces) {
    const marked_text from(in);
    size_t            pos = 0;
    for (const value & piece : pieces) {
        const size_t n = piece->val_str.length();
        bool         input = false;
        for (size_t i = pos; i < std::min(pos + n, from.is_input.size()); ++i) {
            input = input || from.is_input[i];
        }
        if (input) {
            piece->val_str.mark_input();
        }
        pos += n + separator;
    }
}

size_t count(const std::string & text, const std::string & search) {
    size_t n = 0;
    for (size_t pos = text.find(search); pos != std::string::npos; pos = text.find(search, pos + search.size())) {
        ++n;
    }
    return n;
}

std::string text_of(const value & v) {
    return is_val<value_string>(v) ? v->val_str.str() : std::string();
}

void before_range(run & r, const func_args & args) {
    int64_t      numbers[3] = {0, 0, 1};
    const size_t n = args.count();
    if (n < 1 || n > 3) {
        return; // it will say so itself
    }
    for (size_t i = 0; i < n; ++i) {
        if (!is_val<value_int>(args.get_pos(i))) {
            return;
        }
        numbers[n == 1 ? 1 : i] = args.get_pos(i)->as_int();
    }
    const auto [start, stop, step] = numbers;
    if (step == 0 || (step > 0 ? start >= stop : start <= stop)) {
        return;
    }
    // As doubles, since the difference of two int64_t may be none. The last addition must not overflow either.
    const auto   first = static_cast<double>(start);
    const double items = std::ceil((static_cast<double>(stop) - first) / static_cast<double>(step));
    const double last = first + items * static_cast<double>(step);
    if (items > static_cast<double>(MAX_RANGE_ITEMS) || std::fabs(last) > 9e18) {
        r.give_up("a range over " + std::to_string(MAX_RANGE_ITEMS) + " items");
    }
    r.count_range(static_cast<int64_t>(items));
    r.charge(static_cast<size_t>(items) * VALUE_BYTES);
}

void before_search(run & r, const func_args & args, bool replace) {
    const std::string text = text_of(args.get_pos(0));
    const std::string search = args.count() > 1 ? text_of(args.get_pos(1)) : " ";
    const auto        n = static_cast<double>(text.size());
    require_work(r, n * static_cast<double>(search.size()));
    const double       found = search.empty() ? n + 1 : static_cast<double>(count(text, search));
    if (replace) {
        const auto n_new = static_cast<double>(args.count() > 2 ? text_of(args.get_pos(2)).size() : 0);
        require_output(r, n + found * n_new);
        require_work(r, search.size() == static_cast<size_t>(n_new) || search.empty() ? 0 : found * n);
    } else {
        require_work(r, found * n); // each piece is cut off the front
        r.charge(static_cast<size_t>(found) * VALUE_BYTES + text.size());
    }
}

void before_indent(run & r, const func_args & args) {
    const std::string text = text_of(args.get_pos(0));
    const value       width = args.get_kwarg_or_pos("width", 1);
    const auto        lines = static_cast<double>(std::count(text.begin(), text.end(), '\n') + 1);
    double            n = 4;
    if (is_val<value_int>(width)) {
        n = static_cast<double>(width->as_int());
        if (n < 0) {
            throw std::runtime_error("indent: the width is negative");
        }
    } else if (is_val<value_string>(width)) {
        n = static_cast<double>(width->val_str.length());
    }
    require_output(r, static_cast<double>(text.size()) + lines * n);
}

void before_join(run & r, const func_args & args) {
    const value  items = args.get_pos(0);
    const value  separator = args.get_kwarg_or_pos("d", 1);
    const auto   between = static_cast<double>(is_val<value_string>(separator) ? separator->val_str.length() : 0);
    double       total = 0;
    for (const value & item : items->val_arr) {
        total += between + static_cast<double>(weight(item));
        for (const auto & member : item->val_obj) { // attribute=
            total += static_cast<double>(weight(member.second));
        }
    }
    require_output(r, total / 4); // mostly what values cost, not bytes of text
}

// Each blank part is erased off the front.
void before_strip(run & r, const func_args & args) {
    const auto & parts = args.get_pos(0)->val_str.parts;
    size_t       blank = 0;
    while (blank < parts.size() && parts[blank].val.find_first_not_of(" \t\r\n") == std::string::npos) {
        ++blank;
    }
    require_work(r, static_cast<double>(blank) * static_cast<double>(parts.size()) * PART_BYTES);
}

void before_json(run & r, const func_args & args) {
    const value indent = args.get_kwarg_or_pos("indent", 2);
    if (is_val<value_int>(indent) && indent->as_int() > 1000) {
        r.give_up("an indent over 1000");
    }
}

} // namespace

run * armed() noexcept {
    return t_armed;
}

run::~run() {
    disarm();
    let_go();
}

void run::arm(size_t max_stack_bytes, bool keep_renders) {
    stack_base_ = frame_address();
    max_stack_bytes_ = max_stack_bytes;
    keep_renders_ = keep_renders;
    cpu_begin_ = cpu_time();
    deadline_ = std::chrono::steady_clock::now() + std::chrono::seconds(MAX_SECONDS);
    t_armed = this;
}

void run::disarm() {
    if (t_armed == this) {
        t_armed = nullptr;
    }
}

void run::give_up(const std::string & limit) {
    if (broken_.empty()) {
        broken_ = limit;
    }
    throw std::runtime_error(broken_);
}

void run::step() {
    if (!broken_.empty()) {
        throw std::runtime_error(broken_);
    }
    const uintptr_t here = frame_address();
    if ((here > stack_base_ ? here - stack_base_ : stack_base_ - here) > max_stack_bytes_) {
        out_of_stack_ = true;
        give_up("it nests too deeply");
    }
    // Between two looks at the clock lie at most as many steps as the largest text allows in a fraction of a second.
    if (++n_steps_ % 8 == 0 && std::chrono::steady_clock::now() > deadline_) {
        const auto left = std::chrono::seconds(MAX_SECONDS) - (cpu_time() - cpu_begin_);
        if (left <= left.zero()) {
            give_up("it takes over " + std::to_string(MAX_SECONDS) + " s");
        }
        deadline_ = std::chrono::steady_clock::now() + left;
    }
}

void run::charge(size_t n_bytes) {
    value_bytes_ += n_bytes;
    if (value_bytes_ > MAX_VALUE_BYTES) {
        give_up("values over " + std::to_string(MAX_VALUE_BYTES) + " bytes");
    }
}

void run::pass(size_t n_bytes) {
    node_bytes_ += n_bytes;
    if (node_bytes_ > 2 * MAX_OUTPUT_BYTES) {
        give_up("a value over " + std::to_string(2 * MAX_OUTPUT_BYTES) + " bytes");
    }
}

// A text that grows by a piece at a time is made anew each time: what counts is what is still there.
void run::track(const value & text, size_t n_bytes) {
    texts_.emplace_back(text, n_bytes);
    text_bytes_ += n_bytes;
    if (text_bytes_ <= MAX_TEXT_BYTES) {
        return;
    }
    texts_.erase(std::remove_if(texts_.begin(), texts_.end(), [](const auto & entry) { return entry.first.expired(); }),
                 texts_.end());
    text_bytes_ = 0;
    for (const auto & entry : texts_) {
        text_bytes_ += entry.second;
    }
    if (text_bytes_ > MAX_TEXT_BYTES) {
        give_up("texts over " + std::to_string(MAX_TEXT_BYTES) + " bytes");
    }
}

void run::know(analyses & found, std::function<bool(const std::string &)> has_rest) {
    analyses_ = &found;
    has_rest_ = std::move(has_rest);
}

void run::prompt(const std::string & prompt, const std::string & generation_prompt) {
    prompts_ = {prompt, generation_prompt};
    if (has_rest_ && has_rest_(generation_prompt)) {
        throw enough();
    }
}

void run::count_range(int64_t n) {
    n_range_ += n;
    if (n_range_ > MAX_RANGE_ITEMS) {
        give_up("ranges over " + std::to_string(MAX_RANGE_ITEMS) + " items");
    }
}

void run::begin_render() {
    let_go(); // the render before has given its contexts back
    node_bytes_ = 0;
    value_bytes_ = 0;
    texts_.clear();
    text_bytes_ = 0;
    n_range_ = 0;
    repr_of_input = false;
}

const common_json & run::begin_render(const jinja::program & program, const common_json & input, bool mark_input) {
    static const common_json nothing = common_json::object();
    next_ = keep_renders_ ? last_.plan(program, input, mark_input) : last_render::next::anew;
    if (next_ == last_render::next::anew) {
        begin_render();
        return input;
    }
    node_bytes_ = 0;
    if (next_ == last_render::next::tail) { // as if all before it had been done again
        value_bytes_ = last_.before_tail().value_bytes;
        n_range_ = last_.before_tail().n_range;
    }
    return nothing;
}

value run::execute(jinja::context & ctx, const jinja::program & program) {
    if (next_ == last_render::next::known) {
        return last_.text();
    }
    if (next_ == last_render::next::tail) {
        return last_.go_on();
    }
    if (keep_renders_) {
        return last_.execute(ctx, [this] { return last_render::charges{value_bytes_, n_range_}; });
    }
    return jinja::runtime(ctx).execute(program);
}

void run::end_render(const value & text) {
    if (next_ != last_render::next::known) {
        keep(text->val_str);
    }
    if (keep_renders_) {
        last_.end(text);
    }
}

void run::hold(const value & v) {
    if (held_.empty() || held_.back() != v) {
        held_.push_back(v);
    }
}

void run::let_go() {
    while (!held_.empty()) {
        const value v = std::move(held_.back());
        held_.pop_back();
        std::vector<value>().swap(v->val_arr);
        std::vector<std::pair<value, value>>().swap(v->val_obj);
        v->val_func = nullptr;
        if (auto * object = dynamic_cast<jinja::value_object_t *>(v.get())) {
            object->unordered.clear();
        }
    }
}

void run::keep(const string & text) {
    const size_t n_bytes = text.length();
    require_output(*this, static_cast<double>(n_bytes));
    if (!keep_renders_) {
        return;
    }
    kept_bytes_ += n_bytes;
    if (kept_bytes_ > 4 * MAX_OUTPUT_BYTES) {
        give_up("renders over " + std::to_string(4 * MAX_OUTPUT_BYTES) + " bytes");
    }
    rendered kept;
    kept.text.reserve(n_bytes);
    for (const jinja::string_part & part : text.parts) {
        if (part.val.empty()) {
            continue;
        }
        if (kept.stretches.empty() || kept.stretches.back().is_input != part.is_input) {
            kept.stretches.push_back({0, part.is_input});
        }
        kept.text += part.val;
        kept.stretches.back().end = kept.text.size();
    }
    renders_.push_back(std::move(kept));
}

void run::note(std::string text) {
    notes_.push_back(std::move(text));
}

jinja::context & entered(jinja::context & ctx) {
    if (run * r = armed()) {
        r->enter();
    }
    return ctx;
}

value operator->*(value result, leaving how) {
    run * r = armed();
    if (r == nullptr || result == nullptr) {
        return result;
    }
    const std::type_info & node = typeid(*how.node);
    const bool             fresh = result.use_count() == 1;
    if (is_val<value_string>(result)) {
        string &     text = result->val_str;
        const size_t n = text.length();
        require_output(*r, static_cast<double>(n));
        if (fresh) {
            if (weight(text) > LARGE_TEXT_BYTES) {
                r->track(result, weight(text));
            } else {
                r->charge(VALUE_BYTES + weight(text));
            }
            const bool index = node == typeid(jinja::member_expression) && n == 1;      // text[i]
            const bool repr = node == typeid(jinja::binary_expression) && r->repr_of_input; // text ~ container
            if (index || repr) {
                text.mark_input();
            }
            r->repr_of_input = r->repr_of_input && !repr;
        }
        return result;
    }
    if (is_val<value_array>(result) || is_val<value_object>(result)) {
        const size_t n = std::max(result->val_arr.size(), result->val_obj.size());
        if (n > static_cast<size_t>(MAX_RANGE_ITEMS)) {
            r->give_up("a list over " + std::to_string(MAX_RANGE_ITEMS) + " items");
        }
        if (fresh) {
            r->charge(VALUE_BYTES + n * sizeof(std::pair<value, value>));
            for (const value & item : result->val_arr) {
                r->charge(is_val<value_string>(item) ? weight(item->val_str) : 0);
            }
            for (const auto & item : result->val_obj) {
                r->charge(is_val<value_string>(item.second) ? weight(item.second->val_str) : 0);
            }
        }
    } else if (!is_val<value_func>(result)) {
        r->charge(fresh ? VALUE_BYTES : 0);
        return result;
    }
    // `loop` and `caller` are made without passing here, and can be put into a container from then on.
    const auto * name = dynamic_cast<const jinja::identifier *>(how.node);
    if (fresh || (name != nullptr && (name->val == "loop" || name->val == "caller"))) {
        r->hold(result);
        r->charge(name != nullptr ? 10 * VALUE_BYTES : 0);
    }
    return result;
}

const string & appended(const string & text) {
    if (run * r = armed()) {
        r->step();
        r->pass(weight(text));
    }
    return text;
}

const std::string & appended(const std::string & text) {
    if (run * r = armed()) {
        r->pass(text.size() + PART_BYTES);
    }
    return text;
}

void weigh_membership(const value & needle, const value & haystack) {
    run * r = armed();
    if (r == nullptr) {
        return;
    }
    r->step();
    const double n = is_val<value_string>(haystack) ? static_cast<double>(haystack->val_str.length())
                                                    : static_cast<double>(haystack->val_arr.size());
    require_work(*r, n * static_cast<double>(is_val<value_string>(needle) ? needle->val_str.length() : 1));
}

const func_args & tested(const std::string & name, const func_args & args) {
    step();
    if (name == "test_is_in" && args.count() == 2) {
        weigh_membership(args.get_pos(0), args.get_pos(1));
    }
    return args;
}

void before_call(const std::string & name, const func_args & args) {
    run * r = armed();
    if (r == nullptr) {
        return;
    }
    r->step();
    if (name == "range") {
        before_range(*r, args);
    }
    if (args.count() == 0) {
        return;
    }
    const value self = args.get_pos(0);
    if (name == "append" && args.count() == 2) {
        r->charge(sizeof(value) + weight(args.get_pos(1)));
    } else if (name == "join" && is_val<value_array>(self)) {
        before_join(*r, args);
    } else if (name == "tojson" || name == "string" || name == "safe") {
        before_json(*r, args);
    } else if (is_val<value_string>(self)) {
        if (name == "replace" || name == "split" || name == "rsplit") {
            before_search(*r, args, name == "replace");
        } else if (name == "indent") {
            before_indent(*r, args);
        } else if (name == "strip" || name == "lstrip" || name == "rstrip") {
            before_strip(*r, args);
        } else if (name == "format") {
            double total = 0;
            for (const value & arg : args.get_args()) {
                total += static_cast<double>(weight(arg));
            }
            require_output(*r, total / 4);
        }
    }
}

value after_call(const std::string & name, bool bound, const func_args & args, value result) {
    run * r = armed();
    if (r == nullptr || result == nullptr) {
        return result;
    }
    r->repr_of_input = false;
    // What a macro gives back keeps the marks of its pieces.
    if (!bound && jinja::global_builtins().find(name) == jinja::global_builtins().end()) {
        return result;
    }
    const value self = args.count() > 0 ? args.get_pos(0) : value();
    const bool  of_text = self != nullptr && is_val<value_string>(self);
    if (of_text && (name == "split" || name == "rsplit") && is_val<value_array>(result)) {
        mark_pieces(self->val_str, args.count() > 1 ? text_of(args.get_pos(1)).size() : 1, result->val_arr);
    } else if (is_val<value_string>(result) && result.use_count() == 1 && !has_input(result->val_str)) {
        static const std::set<std::string> by_part = {"upper",  "lower",  "title", "capitalize", "strip", "lstrip",
                                                      "rstrip", "format", "safe",  "string",     "default"};
        if (of_text && by_part.count(name) != 0) {
            return result; // these keep the marks themselves
        }
        if (of_text && name == "replace" && args.count() > 2 && !text_of(args.get_pos(1)).empty()) {
            result->val_str = replaced_marks(self->val_str, args.get_pos(1)->val_str, args.get_pos(2)->val_str);
        } else if (std::any_of(args.get_args().begin(), args.get_args().end(),
                               [](const value & arg) { return has_input(arg); })) {
            const bool plain_join = name == "join" && is_val<value_array>(self) &&
                                    args.get_kwarg_or_pos("attribute", 2)->is_undefined();
            string     joined = plain_join ? joined_marks(self->val_arr, args.get_kwarg_or_pos("d", 1)) : string();
            if (plain_join && joined.str() == result->val_str.str()) {
                result->val_str = std::move(joined);
            } else {
                result->val_str.mark_input();
            }
        }
    }
    return result;
}

std::string repr_of(const value & v) {
    run * r = armed();
    if (r == nullptr) {
        return jinja::value_to_string_repr(v);
    }
    r->step();
    std::string text = jinja::value_to_string_repr(v);
    r->repr_of_input = r->repr_of_input || (is_val<value_string>(v) && has_input(v->val_str));
    r->pass(text.size());
    return text;
}

std::ostringstream & grown(std::ostringstream & text) {
    if (run * r = armed()) {
        r->step();
        require_output(*r, static_cast<double>(static_cast<std::streamoff>(text.tellp())));
    }
    return text;
}

jinja::context & begun(jinja::context & ctx) {
    if (run * r = armed()) {
        r->step();
        r->begin_render();
    }
    return ctx;
}

const common_json & begun(const jinja::program & program, const common_json & input, bool mark_input) {
    run * r = armed();
    if (r == nullptr) {
        return input;
    }
    r->step();
    return r->begin_render(program, input, mark_input);
}

const jinja::program & no_program() {
    static const jinja::program none{{}};
    return none;
}

value operator->*(const value & nothing, executing how) {
    (void)nothing;
    run * r = armed();
    return r != nullptr ? r->execute(how.ctx, how.program) : jinja::runtime(how.ctx).execute(how.program);
}

// An analysis passes over every failure, and so over a limit: such a one is not kept.
void analyse(autoparser::autoparser & analysis, const common_chat_template & tmpl) {
    run *      r = armed();
    analyses * found = r != nullptr ? r->known_analyses() : nullptr;
    if (found != nullptr && found->count(&tmpl) != 0) {
        analysis = *found->at(&tmpl);
        return;
    }
    analysis.analyze_template(tmpl);
    if (found != nullptr && r->broken().empty()) {
        (*found)[&tmpl] = std::make_shared<autoparser::autoparser>(analysis);
    }
}

after prompted(const std::string & prompt, const std::string & generation_prompt) {
    if (run * r = armed()) {
        r->prompt(prompt, generation_prompt);
    }
    return {};
}

namespace {

// Names of JSON members are as much the caller's as their values are.
void take_input(run & r, const value & v) {
    r.step();
    if (!is_val<value_array>(v) && !is_val<value_object>(v)) {
        return;
    }
    r.hold(v);
    for (const value & item : v->val_arr) {
        take_input(r, item);
    }
    for (const auto & member : v->val_obj) {
        member.first->val_str.mark_input();
        take_input(r, member.second);
    }
}

void unmark(const value & v) {
    if (is_val<value_string>(v)) {
        for (jinja::string_part & part : v->val_str.parts) {
            part.is_input = false;
        }
    }
}

} // namespace

// Everything llama-common gives to a template is marked as input, the names of special tokens and of roles included.
void loaded(jinja::context & ctx) {
    run * r = armed();
    if (r == nullptr) {
        return;
    }
    static const std::set<std::string> roles = {"system", "developer", "user",     "assistant", "tool",
                                                "model",  "function",  "ipython",  "observation"};
    static const value                 role = jinja::mk_val<value_string>(std::string("role"));
    const value                        messages = ctx.get_val("messages");
    take_input(*r, messages);
    take_input(*r, ctx.get_val("tools"));
    take_input(*r, ctx.get_val("response_format"));
    for (const std::string & name : r->variables()) {
        take_input(*r, ctx.get_val(name));
    }
    for (const value & message : messages->val_arr) {
        if (is_val<value_object>(message) && message->has_key(role)) {
            const value & who = message->at(role);
            // A role is often part of a special token: <|user|>. An unknown one could be forged to be.
            if (is_val<value_string>(who) && roles.count(who->val_str.str()) != 0) {
                unmark(who);
            }
        }
    }
    for (const char * name : {"bos_token", "eos_token", "datetime", "date_string"}) {
        if (std::find(r->variables().begin(), r->variables().end(), name) == r->variables().end()) {
            unmark(ctx.get_val(name));
        }
    }
}

std::shared_ptr<jinja::value_string_t> operator->*(std::shared_ptr<jinja::value_string_t> text, keeping_t) {
    if (run * r = armed()) {
        r->end_render(text);
    }
    return text;
}

void note(const char * format, ...) {
    run * r = armed();
    if (r == nullptr) {
        return;
    }
    char    line[1024];
    va_list args;
    va_start(args, format);
    std::vsnprintf(line, sizeof line, format, args);
    va_end(args);
    r->note(line);
}

} // namespace chat_guard
