// Owns the strict reading of chat requests and JSON schemas: what llama-common would assert on, throw on or choke on.
#include "lcs_chat.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <iterator>
#include <limits>
#include <set>

namespace lcs {

namespace {

// Length of the UTF-8 sequence at text, 0 where there is none; cut: the text ends within it.
size_t utf8_sequence(const char * text, size_t n_bytes, bool & cut) {
    cut = false;
    const auto byte = [&](size_t i) { return static_cast<unsigned char>(text[i]); };
    const unsigned char first = byte(0);
    if (first < 0x80) {
        return 1;
    }
    const size_t n = first < 0xC2 || first > 0xF4 ? 0 : first < 0xE0 ? 2 : first < 0xF0 ? 3 : 4;
    for (size_t i = 1; i < n; ++i) {
        if (i == n_bytes) {
            cut = true;
            return 0;
        }
        unsigned char low = 0x80;
        unsigned char high = 0xBF;
        if (i == 1) {
            low = first == 0xE0 ? 0xA0 : first == 0xF0 ? 0x90 : low;
            high = first == 0xED ? 0x9F : first == 0xF4 ? 0x8F : high;
        }
        if (byte(i) < low || byte(i) > high) {
            return 0;
        }
    }
    return n;
}

} // namespace

bool is_utf8(const char * text, size_t n_bytes) {
    for (size_t i = 0; i < n_bytes;) {
        uint64_t eight = 0;
        if (n_bytes - i >= sizeof eight) {
            std::memcpy(&eight, text + i, sizeof eight);
            if ((eight & 0x8080808080808080U) == 0) {
                i += sizeof eight;
                continue;
            }
        }
        bool         cut = false;
        const size_t n = utf8_sequence(text + i, n_bytes - i, cut);
        if (n == 0) {
            return false;
        }
        i += n;
    }
    return true;
}

std::string valid_utf8(const char * text, size_t n_bytes) {
    if (is_utf8(text, n_bytes)) {
        return {text, n_bytes};
    }
    std::string valid;
    valid.reserve(n_bytes);
    for (size_t i = 0; i < n_bytes;) {
        bool         cut = false;
        const size_t n = utf8_sequence(text + i, n_bytes - i, cut);
        if (n > 0) {
            valid.append(text + i, n);
            i += n;
        } else {
            valid += "\xEF\xBF\xBD";
            i = cut ? n_bytes : i + 1;
        }
    }
    return valid;
}

size_t whole_utf8(const char * text, size_t n_bytes) {
    for (size_t back = 1; back <= 3 && back <= n_bytes; ++back) {
        const auto c = static_cast<unsigned char>(text[n_bytes - back]);
        if (c >= 0xC0) {
            bool cut = false;
            utf8_sequence(text + n_bytes - back, back, cut);
            return cut ? n_bytes - back : n_bytes;
        }
        if (c < 0x80) {
            break;
        }
    }
    return n_bytes;
}

namespace {

// Nesting, and the comparisons that a parser makes whose objects are lists: each name against those before it.
struct json_cost {
    int    depth = 0;
    double comparisons = 0;
};

json_cost measure_json(const std::string & text) {
    json_cost           cost;
    std::vector<double> names; // of each open bracket
    bool                in_string = false;
    for (size_t i = 0; i < text.size(); ++i) {
        const char c = text[i];
        if (in_string) {
            i += c == '\\' ? 1 : 0;
            in_string = c != '"';
        } else if (c == '"') {
            in_string = true;
        } else if (c == '{' || c == '[') {
            names.push_back(0);
            cost.depth = std::max(cost.depth, static_cast<int>(std::min<size_t>(names.size(), 1 << 20)));
        } else if ((c == '}' || c == ']') && !names.empty()) {
            names.pop_back();
        } else if (c == ':' && !names.empty()) {
            cost.comparisons += names.back();
            names.back() += 1;
        }
    }
    return cost;
}

} // namespace

common_json read_json(const std::string & text, lcs_status status, const std::string & what) {
    constexpr double MAX_COMPARISONS = 2e8;
    const json_cost  cost = measure_json(text);
    if (cost.depth > MAX_JSON_NESTING) {
        fail(status, what + " nests over " + std::to_string(MAX_JSON_NESTING));
    }
    if (cost.comparisons > MAX_COMPARISONS) {
        fail(status, what + " has an object of too many members");
    }
    try {
        return common_json::parse(text);
    } catch (const common_json_error & e) {
        std::string reason = e.what();
        if (const size_t end = reason.find("] "); end != std::string::npos) {
            reason.erase(0, end + 2); // "[json.exception.parse_error.101] "
        }
        fail(status, what + " is no JSON: " + reason);
    }
}

namespace {

constexpr size_t MAX_NAME_BYTES = 4096; // of a member of a schema: llama-common matches them by a recursive regex
constexpr size_t MAX_PATTERN_BYTES = size_t{64} << 10;

bool is_one_of(const std::string & name, std::initializer_list<const char *> names) {
    return std::any_of(names.begin(), names.end(), [&](const char * other) { return name == other; });
}

} // namespace

void check_schema(const common_json & schema, lcs_status status, const std::string & path) {
    if (schema.is_array()) {
        size_t i = 0;
        for (const auto & item : schema) {
            check_schema(item, status, path + "[" + std::to_string(i++) + "]");
        }
        return;
    }
    if (!schema.is_object()) {
        return;
    }
    for (const auto & [name, value] : schema.items()) {
        if (name.size() > MAX_NAME_BYTES) {
            fail(status, path + ": a name of " + std::to_string(name.size()) + " bytes, limit " +
                             std::to_string(MAX_NAME_BYTES));
        }
        const std::string here = path + "." + name;
        if (value.is_number()) {
            const double number = value.get<double>();
            if (is_one_of(name, {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"}) &&
                !(std::fabs(number) < 9e18)) {
                fail(status, here + " is outside -9e18..9e18");
            }
            if (is_one_of(name, {"minItems", "maxItems", "minLength", "maxLength"}) &&
                !(number >= 0 && number < std::numeric_limits<int32_t>::max() && number == std::floor(number))) {
                fail(status, here + " is no whole number in 0.." +
                                 std::to_string(std::numeric_limits<int32_t>::max() - 1));
            }
        } else if (name == "pattern" && value.is_string() && value.get<std::string>().size() > MAX_PATTERN_BYTES) {
            fail(status, here + " is longer than " + std::to_string(MAX_PATTERN_BYTES) + " bytes");
        } else {
            check_schema(value, status, here);
        }
    }
}

namespace {

// One place in the request, for reading and for saying where something is wrong.
class place {
public:
    place(const common_json & json, std::string path) : json_(json), path_(std::move(path)) {}

    const common_json & json() const { return json_; }
    const std::string & path() const { return path_; }

    [[noreturn]] void refuse(const std::string & what) const {
        fail(LCS_STATUS_ARG, (path_.empty() ? "the request" : path_) + " " + what, path_);
    }

    bool has(const char * name) const { return json_.contains(name) && !json_.at(name).is_null(); }

    place at(const std::string & name) const {
        if (!json_.contains(name)) {
            fail(LCS_STATUS_ARG, (path_.empty() ? "" : path_ + ".") + name + " is missing", name);
        }
        return {json_.at(name), path_.empty() ? name : path_ + "." + name};
    }

    std::vector<place> items() const {
        if (!json_.is_array()) {
            refuse("is no list");
        }
        std::vector<place> all;
        for (const auto & item : json_) {
            all.emplace_back(item, path_ + "[" + std::to_string(all.size()) + "]");
        }
        return all;
    }

    void require_members(std::initializer_list<const char *> names) const {
        if (!json_.is_object()) {
            refuse("is no object");
        }
        for (const auto & [name, value] : json_.items()) {
            if (!is_one_of(name, names)) {
                refuse("has an unknown member \"" + name.substr(0, 64) + "\"");
            }
        }
    }

    std::string text() const {
        if (!json_.is_string()) {
            refuse("is no text");
        }
        return json_.get<std::string>();
    }

    std::string name() const {
        constexpr size_t  MAX_BYTES = 256;
        std::string       name = text();
        if (name.empty() || name.size() > MAX_BYTES) {
            refuse("has " + std::to_string(name.size()) + " bytes, not 1.." + std::to_string(MAX_BYTES));
        }
        return name;
    }

    bool flag() const {
        if (!json_.is_boolean()) {
            refuse("is neither true nor false");
        }
        return json_.get<bool>();
    }

private:
    const common_json & json_;
    std::string         path_;
};

void check_nested_text(const place & where, const std::string & text) {
    if (measure_json(text).depth > MAX_JSON_NESTING) {
        where.refuse("nests over " + std::to_string(MAX_JSON_NESTING));
    }
}

common_chat_tool_call read_tool_call(const place & call) {
    call.require_members({"id", "type", "function"});
    common_chat_tool_call read;
    if (call.has("id")) {
        read.id = call.at("id").text();
    }
    if (call.has("type") && call.at("type").text() != "function") {
        call.at("type").refuse("is not \"function\"");
    }
    const place function = call.at("function");
    function.require_members({"name", "arguments"});
    read.name = function.at("name").name();
    const place arguments = function.at("arguments");
    if (arguments.json().is_object()) {
        read.arguments = arguments.json().dump_safe();
    } else {
        read.arguments = arguments.text();
        check_nested_text(arguments, read.arguments); // some templates want it as JSON
        if (measure_json(read.arguments).comparisons > 2e8) {
            arguments.refuse("has an object of too many members");
        }
    }
    return read;
}

common_chat_msg read_message(const place & message) {
    message.require_members({"role", "content", "tool_calls", "reasoning_content", "name", "tool_call_id"});
    common_chat_msg read;
    read.role = message.at("role").name();
    if (message.has("content")) {
        const place content = message.at("content");
        if (content.json().is_string()) {
            read.content = content.text();
            if (read.role == "tool" || read.role == "function") {
                check_nested_text(content, read.content); // some handlers try it as JSON
            }
        } else if (content.json().is_array()) {
            for (const place & part : content.items()) {
                part.require_members({"type", "text"});
                if (part.at("type").text() != "text") {
                    part.at("type").refuse("is not \"text\"");
                }
                read.content_parts.push_back({"text", part.at("text").text()});
            }
        } else {
            content.refuse("is neither text, nor a list of parts, nor null");
        }
    }
    if (message.has("tool_calls")) {
        for (const place & call : message.at("tool_calls").items()) {
            read.tool_calls.push_back(read_tool_call(call));
        }
    }
    if (!message.json().contains("content") && read.tool_calls.empty()) {
        message.refuse("has neither content nor tool_calls");
    }
    if (message.has("reasoning_content")) {
        read.reasoning_content = message.at("reasoning_content").text();
    }
    if (message.has("name")) {
        read.tool_name = message.at("name").text();
    }
    if (message.has("tool_call_id")) {
        read.tool_call_id = message.at("tool_call_id").text();
    }
    return read;
}

common_chat_tool read_tool(const place & tool) {
    tool.require_members({"type", "function"});
    if (tool.at("type").text() != "function") {
        tool.at("type").refuse("is not \"function\"");
    }
    const place function = tool.at("function");
    function.require_members({"name", "description", "parameters", "strict"});
    common_chat_tool read;
    read.name = function.at("name").name();
    if (function.has("description")) {
        read.description = function.at("description").text();
    }
    read.parameters = "{}";
    if (function.has("parameters")) {
        const place parameters = function.at("parameters");
        if (!parameters.json().is_object()) {
            parameters.refuse("is no object");
        }
        check_schema(parameters.json(), LCS_STATUS_ARG, parameters.path());
        read.parameters = parameters.json().dump_safe();
    }
    if (function.has("strict")) {
        function.at("strict").flag();
    }
    return read;
}

common_reasoning_format read_reasoning_format(const place & where) {
    const std::string name = where.text();
    for (const common_reasoning_format format :
         {COMMON_REASONING_FORMAT_NONE, COMMON_REASONING_FORMAT_AUTO, COMMON_REASONING_FORMAT_DEEPSEEK,
          COMMON_REASONING_FORMAT_DEEPSEEK_LEGACY}) {
        if (name == common_reasoning_format_name(format)) {
            return format;
        }
    }
    where.refuse("is none of \"none\", \"auto\", \"deepseek\", \"deepseek-legacy\"");
}

common_chat_tool_choice read_tool_choice(const place & where) {
    const std::string name = where.text();
    if (name == "auto") {
        return COMMON_CHAT_TOOL_CHOICE_AUTO;
    }
    if (name == "none") {
        return COMMON_CHAT_TOOL_CHOICE_NONE;
    }
    if (name == "required") {
        return COMMON_CHAT_TOOL_CHOICE_REQUIRED;
    }
    where.refuse("is none of \"auto\", \"none\", \"required\"");
}

void collect_texts(const common_json & json, std::vector<std::string> & texts) {
    if (json.is_string()) {
        texts.push_back(json.get<std::string>());
    } else if (json.is_array() || json.is_object()) {
        for (const auto & item : json) {
            collect_texts(item, texts);
        }
    }
}

chat_request read_all(const char * text, size_t n_bytes) {
    const common_json json = read_json(valid_utf8(text, n_bytes), LCS_STATUS_ARG, "the request");
    const place       root(json, "");
    root.require_members({"messages", "tools", "tool_choice", "parallel_tool_calls", "add_generation_prompt",
                          "enable_thinking", "reasoning_format", "grammar", "json_schema", "kwargs"});
    chat_request request;
    auto &       inputs = request.inputs;
    inputs.use_jinja = true;
    inputs.reasoning_format = COMMON_REASONING_FORMAT_AUTO;
    for (const place & message : root.at("messages").items()) {
        inputs.messages.push_back(read_message(message));
    }
    if (root.has("tools")) {
        std::set<std::string> names;
        for (const place & tool : root.at("tools").items()) {
            inputs.tools.push_back(read_tool(tool));
            if (!names.insert(inputs.tools.back().name).second) {
                tool.refuse("has the name of a tool before it");
            }
        }
    }
    if (root.has("tool_choice")) {
        inputs.tool_choice = read_tool_choice(root.at("tool_choice"));
    }
    if (root.has("parallel_tool_calls")) {
        inputs.parallel_tool_calls = root.at("parallel_tool_calls").flag();
    }
    if (root.has("add_generation_prompt")) {
        inputs.add_generation_prompt = root.at("add_generation_prompt").flag();
    }
    if (root.has("enable_thinking")) {
        inputs.enable_thinking = root.at("enable_thinking").flag();
    }
    if (root.has("reasoning_format")) {
        inputs.reasoning_format = read_reasoning_format(root.at("reasoning_format"));
    }
    if (root.has("grammar")) {
        inputs.grammar = root.at("grammar").text();
        if (!inputs.tools.empty() && inputs.tool_choice != COMMON_CHAT_TOOL_CHOICE_NONE) {
            root.at("grammar").refuse("cannot go with tools, which have a grammar of their own");
        }
        if (root.has("json_schema")) {
            root.at("grammar").refuse("cannot go with json_schema");
        }
    }
    if (root.has("json_schema")) {
        const place schema = root.at("json_schema");
        if (!schema.json().is_object()) {
            schema.refuse("is no object");
        }
        check_schema(schema.json(), LCS_STATUS_ARG, schema.path());
        inputs.json_schema = schema.json().dump_safe();
    }
    if (root.has("kwargs")) {
        const place kwargs = root.at("kwargs");
        if (!kwargs.json().is_object()) {
            kwargs.refuse("is no object");
        }
        for (const auto & [name, value] : kwargs.json().items()) {
            if (is_one_of(name, {"messages", "tools", "bos_token", "eos_token", "add_generation_prompt"})) {
                kwargs.refuse("may not set " + name);
            }
            if (name == "enable_thinking") {
                inputs.enable_thinking = kwargs.at(name).flag();
            }
            inputs.chat_template_kwargs[name] = value.dump_safe();
            request.variables.push_back(name);
        }
    }
    return request;
}

// Where the first message begins in a request whose first member they are; npos in another.
size_t messages_begin(const std::string & text) {
    size_t at = 0;
    for (const char * token : {"{", "\"messages\"", ":", "["}) {
        at = text.find_first_not_of(" \t\r\n", at);
        if (at == std::string::npos || text.compare(at, std::strlen(token), token) != 0) {
            return std::string::npos;
        }
        at += std::strlen(token);
    }
    return at;
}

// Where the list of messages ends that goes on at `at`, and where each of them does; npos: it does not end.
size_t find_ends(const char * text, size_t n_bytes, size_t at, std::vector<size_t> & ends) {
    int  depth = 0;
    bool in_string = false;
    for (size_t i = at; i < n_bytes; ++i) {
        const char c = text[i];
        if (in_string) {
            i += c == '\\' ? 1 : 0;
            in_string = c != '"';
        } else if (c == '"') {
            in_string = true;
        } else if (c == '{' || c == '[') {
            ++depth;
        } else if (c == '}' || c == ']') {
            if (--depth < 0) {
                return i;
            }
            if (depth == 0) {
                ends.push_back(i + 1);
            }
        }
    }
    return std::string::npos;
}

} // namespace

const chat_request & request_reader::read(const char * text, size_t n_bytes) {
    if (n_bytes > MAX_CHAT_BYTES) {
        fail(LCS_STATUS_ARG,
             "a request of " + std::to_string(n_bytes) + " bytes, limit " + std::to_string(MAX_CHAT_BYTES));
    }
    if (go_on(text, n_bytes)) {
        request_.inputs.now = std::chrono::system_clock::now();
    } else {
        forget();
        request_ = read_all(text, n_bytes);
        remember(text, n_bytes);
    }
    return request_;
}

// Whether it could: only the messages differ, from some message on. Where it could not, reading all says why.
bool request_reader::go_on(const char * text, size_t n_bytes) {
    if (rest_.empty()) {
        return false;
    }
    const size_t n_same = static_cast<size_t>(
            std::mismatch(text, text + std::min(n_bytes, text_.size()), text_.data()).first - text);
    if (n_same < begin_) {
        return false;
    }
    const auto          first = std::upper_bound(ends_.begin(), ends_.end(), n_same);
    const auto          n_kept = static_cast<size_t>(first - ends_.begin());
    const size_t        from = n_kept > 0 ? ends_[n_kept - 1] : begin_;
    std::vector<size_t> ends;
    const size_t        end = find_ends(text, n_bytes, from, ends);
    if (end == std::string::npos || rest_.compare(0, std::string::npos, text + end, n_bytes - end) != 0 ||
        !is_utf8(text + from, end - from)) {
        return false;
    }
    std::string more(text + from, end - from);
    more.erase(0, more.find_first_not_of(" \t\r\n"));
    if (n_kept > 0 && !more.empty()) {
        if (more[0] != ',' || more.find_first_not_of(" \t\r\n", 1) == std::string::npos) {
            return false;
        }
        more.erase(0, 1);
    }
    std::vector<common_chat_msg> messages;
    try {
        const common_json json = read_json("{\"messages\": [" + more + "]}", LCS_STATUS_ARG, "the request");
        for (const place & message : place(json, "").at("messages").items()) {
            messages.push_back(read_message(message));
        }
    } catch (const failure &) {
        return false;
    }
    if (messages.size() != ends.size()) {
        return false;
    }
    auto & all = request_.inputs.messages;
    ends_.reserve(n_kept + ends.size());
    all.reserve(n_kept + messages.size());
    text_.reserve(end); // from here on nothing fails
    ends_.resize(n_kept);
    ends_.insert(ends_.end(), ends.begin(), ends.end());
    all.resize(n_kept);
    all.insert(all.end(), std::make_move_iterator(messages.begin()), std::make_move_iterator(messages.end()));
    text_.resize(from);
    text_.append(text + from, end - from);
    return true;
}

void request_reader::remember(const char * text, size_t n_bytes) {
    constexpr size_t MAX_BYTES = size_t{8} << 20;
    if (n_bytes > MAX_BYTES || !is_utf8(text, n_bytes)) {
        return;
    }
    std::string head(text, n_bytes);
    begin_ = messages_begin(head);
    const size_t end = begin_ == std::string::npos ? begin_ : find_ends(text, n_bytes, begin_, ends_);
    if (end == std::string::npos || ends_.size() != request_.inputs.messages.size()) {
        return;
    }
    std::string rest(text + end, n_bytes - end);
    if (read_json("{\"\": [" + rest, LCS_STATUS_ARG, "the request").contains("messages")) {
        return; // a second list of messages, which is the one that counts
    }
    head.resize(end);
    text_ = std::move(head);
    rest_ = std::move(rest);
}

void request_reader::forget() {
    text_.clear();
    ends_.clear();
    rest_.clear();
}

std::vector<std::string> texts_of_request(const char * text, size_t n_bytes) {
    const common_json        json = read_json(valid_utf8(text, n_bytes), LCS_STATUS_ARG, "the request");
    std::vector<std::string> texts;
    for (const char * name : {"messages", "tools"}) {
        if (json.contains(name)) {
            collect_texts(json.at(name), texts);
        }
    }
    return texts;
}

} // namespace lcs
