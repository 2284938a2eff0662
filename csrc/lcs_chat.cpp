// Owns chat templates: compiling, rendering and reply parsing. Every call of llama-common runs under chat_guard's
// limits, most on a thread of their own, whose stack is known.
#include "lcs_chat.hpp"

#include "chat-peg-parser.h"
#include "json-schema-to-grammar.h"

#include <nlohmann/json.hpp>

#include <algorithm>
#include <deque>
#include <functional>

#if !defined(_WIN32)
#    include <pthread.h>
#    include <signal.h>
#endif

namespace lcs {

namespace {

constexpr size_t MAX_SOURCE_BYTES = size_t{1} << 20;
constexpr int    MAX_TEMPLATE_NESTING = 200; // of blocks, and of brackets
constexpr int    MAX_TREE_DEPTH = 1000;      // of the syntax tree: a chain of operators is a deep tree too
constexpr size_t STACK_BYTES = size_t{64} << 20;
constexpr size_t GUARDED_STACK_BYTES = size_t{40} << 20; // the rest is for what recurses between two guarded steps
constexpr size_t INLINE_STACK_BYTES = size_t{96} << 10;  // of a thread that is not ours

struct syntax;

// What all templates share. In a forked child it is made anew in place: who held or changed it is not there.
struct shared_state {
    std::mutex mutex; // llama-common's clock and log are not made for threads
    std::mutex syntaxes_mutex;
    std::vector<std::pair<std::string, std::shared_ptr<const syntax>>> syntaxes; // the last ones, newest first
};

alignas(shared_state) unsigned char g_storage[sizeof(shared_state)];
shared_state * g_shared = new (g_storage) shared_state;
#if !defined(_WIN32)
[[maybe_unused]] const int g_at_fork =
        pthread_atfork(nullptr, nullptr, [] { g_shared = new (g_storage) shared_state; });
#endif

struct job {
    std::function<void()> body;
    chat_guard::run &     run;
    std::exception_ptr    error;
    bool                  keep_renders;
};

void work(job & j, size_t max_stack_bytes) noexcept {
    const trapped_aborts trap(LCS_STATUS_TEMPLATE);
    j.run.arm(max_stack_bytes, j.keep_renders);
    try {
        j.body();
    } catch (...) {
        j.error = std::current_exception();
    }
    j.run.disarm();
}

void work_on_own_stack(job & j) {
#if defined(_WIN32)
    work(j, INLINE_STACK_BYTES);
#else
    pthread_attr_t attributes;
    if (pthread_attr_init(&attributes) != 0) {
        throw std::bad_alloc();
    }
    pthread_attr_setstacksize(&attributes, STACK_BYTES);
    // Signals are for the threads that the program knows of.
    sigset_t all;
    sigset_t before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    pthread_t thread;
    const int started = pthread_create(
            &thread, &attributes,
            [](void * data) -> void * {
                work(*static_cast<job *>(data), GUARDED_STACK_BYTES);
                return nullptr;
            },
            &j);
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    pthread_attr_destroy(&attributes);
    if (started != 0) {
        fail(LCS_STATUS_NOMEM, "no thread with a stack of " + std::to_string(STACK_BYTES) + " bytes could be started");
    }
    pthread_join(thread, nullptr);
#endif
}

// "\n---\nWhile executing X at line 1, column 2 in source:\n...\n   ^\nError: text" and its relatives, in one line. Of
// raise_exception() only the template's own words.
std::string template_error(const std::string & what) {
    constexpr std::string_view RAISED = "Jinja Exception: ";
    std::string                text = what;
    std::string                where;
    if (const size_t error = what.rfind("\nError: "); error != std::string::npos) {
        text = what.substr(error + 8);
        const size_t at = what.rfind(" at line ", error);
        const size_t end = what.find(" in source", at == std::string::npos ? error : at);
        if (at != std::string::npos && end < error) {
            where = " (" + what.substr(at + 4, end - at - 4) + ")";
        }
    } else if (const size_t arrow = what.find("\n..."); arrow != std::string::npos) {
        text = what.substr(0, arrow); // a picture of the source follows
    }
    if (text.compare(0, RAISED.size(), RAISED) == 0) {
        return text.substr(RAISED.size());
    }
    return text + where;
}

// Throws what llama-common threw as a failure with this status.
[[noreturn]] void rethrow(const std::exception_ptr & error, lcs_status status) {
    try {
        std::rethrow_exception(error);
    } catch (const failure &) {
        throw;
    } catch (const std::bad_alloc &) {
        throw;
    } catch (const std::exception & e) {
        const std::string text = template_error(e.what());
        if (text.find("std::bad_alloc") != std::string::npos) {
            throw std::bad_alloc(); // the engine gives every exception as text
        }
        fail(status, text);
    }
}

void finish(const job & j, lcs_status status, const char * what) {
    for (const std::string & note : j.run.notes()) {
        log_line(LCS_LOG_LEVEL_WARN, note);
    }
    if (!j.run.broken().empty()) {
        fail(status, std::string(what) + " exceeds its limits: " + j.run.broken());
    }
    if (j.error != nullptr) {
        rethrow(j.error, status);
    }
}

// One call of llama-common under limits. what begins the message where one is exceeded.
void bounded(
        chat_guard::run & run, lcs_status status, const char * what, std::function<void()> body,
        bool keep_renders = false) {
    fault_point();
    job j{std::move(body), run, nullptr, keep_renders};
    {
        const std::lock_guard<std::mutex> lock(g_shared->mutex);
        work_on_own_stack(j);
    }
    finish(j, status, what);
}

//
// Sources.
//

// Depth of the syntax tree that the recursive parser would build from the tokens, counted without recursion.
class source_depth {
public:
    void add(const jinja::token & met) {
        using jinja::token;
        switch (met.t) {
            case token::open_statement:
            case token::open_expression:
                levels_.assign(1, {});
                tag_.clear();
                has_equals_ = false;
                statement_ = met.t == token::open_statement;
                break;
            case token::close_statement:
            case token::close_expression:
                close_tag();
                break;
            case token::open_paren:
            case token::open_square_bracket:
            case token::open_curly_bracket:
                if (levels_.size() > static_cast<size_t>(MAX_TEMPLATE_NESTING)) {
                    refuse();
                }
                levels_.push_back({});
                break;
            case token::close_paren:
            case token::close_square_bracket:
            case token::close_curly_bracket:
                if (levels_.size() > 1) {
                    const int depth = levels_.back().depth() + 1;
                    levels_.pop_back();
                    levels_.back().inner = std::max(levels_.back().inner, depth);
                    link();
                }
                break;
            case token::comma:
                levels_.back().best = levels_.back().depth();
                levels_.back().n_links = 0;
                levels_.back().inner = 0;
                break;
            case token::equals:
                has_equals_ = has_equals_ || levels_.size() == 1;
                link();
                break;
            case token::identifier:
                if (tag_.empty()) {
                    tag_ = met.value;
                    open_block();
                } else if (is_word(met.value)) {
                    link();
                }
                break;
            case token::dot:
            case token::pipe:
            case token::colon:
            case token::additive_binary_operator:
            case token::multiplicative_binary_operator:
            case token::comparison_binary_operator:
            case token::unary_operator:
                link();
                break;
            default:
                break;
        }
    }

private:
    struct level {
        int n_links = 0; // operators since the last comma, each a level of the tree
        int inner = 0;   // deepest bracket since then
        int best = 0;    // before it
        int depth() const { return std::max(best, n_links + inner); }
    };

    [[noreturn]] static void refuse() {
        fail(LCS_STATUS_TEMPLATE, "the template nests over " + std::to_string(MAX_TEMPLATE_NESTING));
    }

    static bool is_word(const std::string & name) {
        return name == "and" || name == "or" || name == "not" || name == "in" || name == "is" || name == "if" ||
               name == "else";
    }

    void link() {
        levels_.back().n_links += 1;
        if (static_cast<int>(blocks_.size()) + levels_.back().depth() > MAX_TREE_DEPTH) {
            fail(LCS_STATUS_TEMPLATE,
                 "an expression of the template is over " + std::to_string(MAX_TREE_DEPTH) + " levels deep");
        }
    }

    void open_block() {
        if (!statement_) {
            return;
        }
        if (tag_ == "if" || tag_ == "for" || tag_ == "macro" || tag_ == "call" || tag_ == "filter") {
            push(1);
        } else if (tag_ == "elif") {
            push(0); // parsed as one more `if` inside
        } else if (tag_.compare(0, 3, "end") == 0) {
            while (!blocks_.empty() && blocks_.back() == 0) {
                blocks_.pop_back();
            }
            if (!blocks_.empty()) {
                blocks_.pop_back();
            }
        }
    }

    void close_tag() {
        if (statement_ && tag_ == "set" && !has_equals_) {
            push(1);
        }
        levels_.assign(1, {});
    }

    void push(char block) {
        blocks_.push_back(block);
        if (blocks_.size() > static_cast<size_t>(MAX_TEMPLATE_NESTING)) {
            refuse();
        }
    }

    std::vector<level> levels_ = std::vector<level>(1);
    std::vector<char>  blocks_; // 1: opened by a statement of its own, 0: by elif
    std::string        tag_;
    bool               statement_ = false;
    bool               has_equals_ = false;
};

std::string with_unix_lines(const std::string & source) {
    std::string lines;
    lines.reserve(source.size());
    for (size_t i = 0; i < source.size(); ++i) {
        if (source[i] != '\r' || i + 1 == source.size() || source[i + 1] != '\n') {
            lines += source[i];
        }
    }
    return lines;
}

// TEMPLATE where llama-common's lexer or parser would take too long or recurse too deeply, or refuses the source.
void check_source(const std::string & source) {
    if (source.size() > MAX_SOURCE_BYTES) {
        fail(LCS_STATUS_TEMPLATE, "a template of " + std::to_string(source.size()) + " bytes, limit " +
                                      std::to_string(MAX_SOURCE_BYTES));
    }
    // The lexer erases each "\r" of "\r\n" from the front of what is left.
    const size_t n_erased = source.size() - with_unix_lines(source).size();
    if (static_cast<double>(n_erased) * static_cast<double>(source.size()) > 2e9) {
        fail(LCS_STATUS_TEMPLATE, "a template of too many lines that end in \\r\\n");
    }
    const auto   tokens = jinja::lexer().tokenize(source);
    source_depth depth;
    for (const jinja::token & token : tokens.tokens) {
        depth.add(token);
    }
    jinja::parse_from_tokens(tokens); // init throws without a reason
}

bool tells_time(const std::string & source) {
    for (const char * name : {"strftime_now", "date_string", "datetime"}) {
        if (source.find(name) != std::string::npos) {
            return true;
        }
    }
    return false;
}

// The last texts by what they were made from.
class text_cache {
public:
    const std::string * find(const std::string & from) {
        for (size_t i = 0; i < entries_.size(); ++i) {
            if (entries_[i].first == from) {
                std::rotate(entries_.begin(), entries_.begin() + static_cast<ptrdiff_t>(i),
                            entries_.begin() + static_cast<ptrdiff_t>(i) + 1);
                return &entries_.front().second;
            }
        }
        return nullptr;
    }

    // Where there is memory for it.
    void add(std::string from, std::string made) {
        const size_t n_bytes = from.size() + made.size();
        if (n_bytes > MAX_BYTES / 2) {
            return;
        }
        try {
            entries_.emplace_front(std::move(from), std::move(made));
        } catch (const std::bad_alloc &) {
            return; // made anew the next time
        }
        n_bytes_ += n_bytes;
        while (entries_.size() > MAX_ENTRIES || n_bytes_ > MAX_BYTES) {
            n_bytes_ -= entries_.back().first.size() + entries_.back().second.size();
            entries_.pop_back();
        }
    }

private:
    static constexpr size_t MAX_ENTRIES = 8;
    static constexpr size_t MAX_BYTES = size_t{16} << 20;

    std::deque<std::pair<std::string, std::string>> entries_;
    size_t                                          n_bytes_ = 0;
};

//
// Syntaxes.
//

constexpr int SYNTAX_VERSION = 1;

struct syntax {
    common_chat_format format = COMMON_CHAT_FORMAT_CONTENT_ONLY;
    std::string        generation_prompt;
    common_peg_arena   parser;
};

std::string syntax_sum(int64_t format, const std::string & generation_prompt, const std::string & parser) {
    const std::string all = std::to_string(SYNTAX_VERSION) + " " + std::to_string(format) + " " +
                            std::to_string(generation_prompt.size()) + " " + generation_prompt + parser;
    return std::to_string(lcs_hash(all.data(), all.size()));
}

std::string write_syntax(const common_chat_params & params) {
    const std::string prompt = valid_utf8(params.generation_prompt.data(), params.generation_prompt.size());
    return common_json{
        {"lcs_chat_syntax", SYNTAX_VERSION},
        {"format", static_cast<int64_t>(params.format)},
        {"generation_prompt", prompt},
        {"parser", params.parser},
        {"sum", syntax_sum(params.format, prompt, params.parser)},
    }.dump_safe();
}

[[noreturn]] void refuse_syntax(const std::string & why) {
    fail(LCS_STATUS_ARG, "the syntax is not one of ours: " + why, "syntax");
}

std::shared_ptr<const syntax> read_syntax(const std::string & text) {
    const common_json json = read_json(text, LCS_STATUS_ARG, "the syntax");
    if (!json.is_object() || json.size() != 5 || !json.contains("lcs_chat_syntax") || !json.contains("format") ||
        !json.contains("generation_prompt") || !json.contains("parser") || !json.contains("sum")) {
        refuse_syntax("members");
    }
    const common_json & version = json.at("lcs_chat_syntax");
    if (!version.is_number_integer() || version.get<int64_t>() != SYNTAX_VERSION) {
        refuse_syntax("version");
    }
    const common_json & format = json.at("format");
    if (!format.is_number_integer() || format.get<int64_t>() < 0 || format.get<int64_t>() >= COMMON_CHAT_FORMAT_COUNT) {
        refuse_syntax("format");
    }
    if (!json.at("generation_prompt").is_string() || !json.at("parser").is_string() || !json.at("sum").is_string()) {
        refuse_syntax("types");
    }
    auto              made = std::make_shared<syntax>();
    const std::string parser = json.at("parser").get<std::string>();
    made->format = static_cast<common_chat_format>(format.get<int64_t>());
    made->generation_prompt = json.at("generation_prompt").get<std::string>();
    if (json.at("sum").get<std::string>() != syntax_sum(made->format, made->generation_prompt, parser)) {
        refuse_syntax("checksum");
    }
    try {
        if (!parser.empty()) {
            made->parser = common_peg_arena::from_json(read_json(parser, LCS_STATUS_ARG, "the parser of the syntax"));
        }
        if (made->parser.empty()) {
            made->parser = build_chat_peg_parser(
                    [](common_chat_peg_builder & p) { return p.content(p.rest()) + p.end(); });
        }
    } catch (const failure &) {
        throw;
    } catch (const std::bad_alloc &) {
        throw;
    } catch (const std::exception & e) {
        refuse_syntax(e.what());
    }
    return made;
}

// A reply is parsed again for every piece that comes in: the last few syntaxes stay read.
std::shared_ptr<const syntax> find_syntax(const std::string & text) {
    constexpr size_t MAX_ENTRIES = 4;
    constexpr size_t MAX_BYTES = size_t{1} << 20;
    {
        const std::lock_guard<std::mutex> lock(g_shared->syntaxes_mutex);
        for (const auto & entry : g_shared->syntaxes) {
            if (entry.first == text) {
                return entry.second;
            }
        }
    }
    auto made = read_syntax(text);
    if (text.size() <= MAX_BYTES) {
        const std::lock_guard<std::mutex> lock(g_shared->syntaxes_mutex);
        auto &                            entries = g_shared->syntaxes;
        entries.emplace(entries.begin(), text, made);
        if (entries.size() > MAX_ENTRIES) {
            entries.pop_back();
        }
    }
    return made;
}

// The mapper keeps a pointer to the tool call it is in, also when that call was closed without a name and dropped.
void check_tool_order(const common_peg_ast_arena & ast, const common_peg_parse_result & result) {
    using tags = common_chat_peg_builder;
    bool pending = false;
    bool dropped = false;
    ast.visit(result, [&](const common_peg_ast_node & node) {
        if (node.tag == tags::TOOL_OPEN) {
            pending = true;
            dropped = false;
            return;
        }
        const bool is_close = node.tag == tags::TOOL_CLOSE;
        const bool is_name = node.tag == tags::TOOL_NAME;
        if (dropped && (is_close || is_name || node.tag == tags::TOOL_ID || node.tag == tags::TOOL_ARGS ||
                        node.tag == tags::TOOL_ARG_NAME || node.tag == tags::TOOL_ARG_VALUE ||
                        node.tag == tags::TOOL_ARG_STRING_VALUE || node.tag == tags::TOOL_ARG_CLOSE)) {
            refuse_syntax("a tool call goes on after its end");
        }
        dropped = dropped || (is_close && pending);
        pending = pending && !is_close && !is_name;
    });
}

common_chat_msg parse_reply(const syntax & how, const std::string & text, bool partial) {
    common_peg_parse_context ctx(how.generation_prompt + text, COMMON_PEG_PARSE_FLAG_LENIENT);
    const auto               result = how.parser.parse(ctx);
    if (result.fail() && !(partial && result.end > 0)) {
        if (partial) {
            return {}; // nothing of it is sure yet
        }
        fail(LCS_STATUS_TEMPLATE, std::string("the reply does not fit the format ") +
                                      common_chat_format_name(how.format) + " from byte " +
                                      std::to_string(result.end));
    }
    common_chat_msg                         message;
    std::unique_ptr<common_chat_peg_mapper> mapper;
    if (how.format == COMMON_CHAT_FORMAT_PEG_GEMMA4) {
        mapper = std::make_unique<common_chat_peg_gemma4_mapper>(message);
    } else if (how.format == COMMON_CHAT_FORMAT_PEG_MINIMAX_M3) {
        mapper = std::make_unique<common_chat_peg_minimax_m3_mapper>(message);
    } else {
        check_tool_order(ctx.ast, result);
        mapper = std::make_unique<common_chat_peg_mapper>(message);
    }
    mapper->from_ast(ctx.ast, result);
    for (const common_chat_tool_call & call : message.tool_calls) {
        // The parser is lenient at the end of a text; a call that was cut is no call.
        if (!partial && !call.arguments.empty() && !nlohmann::json::accept(call.arguments)) {
            fail(LCS_STATUS_TEMPLATE, "what the call of " + call.name + " is given is no JSON: " + call.arguments);
        }
    }
    return message;
}

const char * trigger_name(common_grammar_trigger_type type) {
    switch (type) {
        case COMMON_GRAMMAR_TRIGGER_TYPE_TOKEN:        return "token";
        case COMMON_GRAMMAR_TRIGGER_TYPE_WORD:         return "word";
        case COMMON_GRAMMAR_TRIGGER_TYPE_PATTERN:      return "pattern";
        case COMMON_GRAMMAR_TRIGGER_TYPE_PATTERN_FULL: return "pattern_full";
    }
    return "?";
}

// All but the prompt: what follows from the request without its messages, and from the text that begins a reply.
std::string write_rest(const common_chat_params & params, const chat_request & request) {
    common_json triggers = common_json::array();
    for (const common_grammar_trigger & trigger : params.grammar_triggers) {
        triggers.push_back({{"type", trigger_name(trigger.type)}, {"value", trigger.value}, {"token", trigger.token}});
    }
    // llama-common leaves a grammar of the caller's to the caller.
    const bool own_grammar = params.grammar.empty() && !request.inputs.grammar.empty();
    return common_json{
        {"grammar", own_grammar ? request.inputs.grammar : params.grammar},
        {"grammar_lazy", !own_grammar && params.grammar_lazy},
        {"grammar_triggers", triggers},
        {"generation_prompt", params.generation_prompt},
        {"supports_thinking", params.supports_thinking},
        {"thinking_start", params.thinking_start_tag},
        {"thinking_ends", params.thinking_end_tags},
        {"preserved_tokens", params.preserved_tokens},
        {"additional_stops", params.additional_stops},
        {"format", common_chat_format_name(params.format)},
        {"syntax", write_syntax(params)},
    }.dump_safe();
}

std::string write_message(const common_chat_msg & message) {
    common_json calls = common_json::array();
    for (const common_chat_tool_call & call : message.tool_calls) {
        calls.push_back({{"id", call.id}, {"name", call.name}, {"arguments", call.arguments}});
    }
    return common_json{
        {"role", "assistant"},
        {"content", message.content},
        {"reasoning_content", message.reasoning_content},
        {"tool_calls", calls},
    }.dump_safe();
}

} // namespace

} // namespace lcs

struct lcs_chat_template : lcs::handle, lcs::counted<lcs::kind::chat_template> {
    std::shared_ptr<lcs::model_box> model;
    common_chat_templates_ptr       templates;
    std::string                     info;
    bool                            tells_time = false; // the same request renders anew
    lcs::text_cache                 renders;
    lcs::request_reader             reader;
    chat_guard::analyses            analyses; // of `templates`
    lcs::text_cache                 rests;
};

namespace lcs {

namespace {

void compile(lcs_chat_template & made, std::string source) {
    const llama_model * model = made.model != nullptr ? made.model->model : nullptr;
    if (made.model != nullptr && llama_vocab_type(made.model->vocab) == LLAMA_VOCAB_TYPE_NONE) {
        model = nullptr; // BOS and EOS have no text
    }
    std::vector<std::string> sources;
    if (!source.empty()) {
        source = with_unix_lines(source);
        sources.push_back(source);
    } else {
        for (const char * name : {static_cast<const char *>(nullptr), "tool_use"}) {
            const char * own = made.model != nullptr ? llama_model_chat_template(made.model->model, name) : nullptr;
            if (own != nullptr && *own != '\0') {
                sources.emplace_back(own);
            }
        }
        if (sources.empty()) {
            source = "chatml"; // llama-common's name for it
        } else if (model == nullptr) {
            source = with_unix_lines(sources.front());
            sources.resize(1);
        }
    }
    chat_guard::run           run;
    common_chat_templates_ptr templates;
    std::string               info;
    bounded(run, LCS_STATUS_TEMPLATE, "the template", [&] {
        for (const std::string & text : sources) {
            check_source(text);
        }
        templates = common_chat_templates_init(model, source);
        common_json members = common_json::object();
        members["source"] = common_chat_templates_source(templates.get());
        for (const auto & [name, supported] : common_chat_templates_get_caps(templates.get())) {
            members[name] = supported;
        }
        if (run.broken().empty()) { // the probes above pass over every failure
            members["supports_thinking"] = common_chat_templates_support_enable_thinking(templates.get());
        }
        info = members.dump_safe();
    });
    made.templates = std::move(templates);
    made.info = std::move(info);
    made.tells_time = std::any_of(sources.begin(), sources.end(), tells_time);
}

std::string render(lcs_chat_template & tmpl, const char * text, size_t n_bytes) {
    const chat_request & request = tmpl.reader.read(text, n_bytes);
    const std::string &  rest_of_request = tmpl.reader.rest();
    const auto           key = [&](const std::string & generation_prompt) {
        return std::to_string(rest_of_request.size()) + rest_of_request + generation_prompt;
    };
    const std::string * rest = nullptr;
    chat_guard::run     run(request.variables);
    run.know(tmpl.analyses, [&](const std::string & generation_prompt) {
        rest = rest_of_request.empty() ? nullptr : tmpl.rests.find(key(generation_prompt));
        return rest != nullptr;
    });
    common_chat_params params;
    bounded(
            run, LCS_STATUS_TEMPLATE, "the template",
            [&] {
                try {
                    params = common_chat_templates_apply(tmpl.templates.get(), request.inputs);
                } catch (const chat_guard::enough &) {
                    params.prompt = run.prompted().prompt;
                }
            },
            true);
    fault_point();
    std::string json = write_prompt(params.prompt, run.renders(), [&] { return texts_of_request(text, n_bytes); });
    json += ',';
    if (rest != nullptr) {
        return json.append(*rest, 1);
    }
    std::string made = write_rest(params, request);
    json.append(made, 1); // without its brace
    // A handler that changes the prompts afterwards is asked each time.
    const auto & [prompt, generation_prompt] = run.prompted();
    if (!rest_of_request.empty() && prompt == params.prompt && generation_prompt == params.generation_prompt) {
        tmpl.rests.add(key(generation_prompt), std::move(made));
    }
    return json;
}

} // namespace

} // namespace lcs

extern "C" {

lcs_status lcs_chat_template_init(
        lcs_model * model, const char * source, size_t n_bytes, lcs_chat_template ** template_out) {
    return lcs::guard([&] {
        lcs::require(template_out, "template_out");
        if (model != nullptr) {
            lcs::require_alive(model, "model");
        } else if (source == nullptr) {
            lcs::fail(LCS_STATUS_ARG, "model and source are both NULL");
        }
        if (source != nullptr && n_bytes > lcs::MAX_SOURCE_BYTES) {
            lcs::fail(LCS_STATUS_TEMPLATE, "a template of " + std::to_string(n_bytes) + " bytes, limit " +
                                               std::to_string(lcs::MAX_SOURCE_BYTES));
        }
        lcs::init_once();
        lcs::fault_point();
        auto made = std::make_unique<lcs_chat_template>();
        if (model != nullptr) {
            made->model = model->box;
        }
        lcs::compile(*made, source != nullptr ? lcs::valid_utf8(source, n_bytes) : std::string());
        *template_out = made.release();
    });
}

void lcs_chat_template_free(lcs_chat_template * tmpl) {
    lcs::free_handle(tmpl);
}

lcs_status lcs_chat_template_info(lcs_chat_template * tmpl, lcs_string ** json_out) {
    return lcs::guard([&] {
        const lcs::entered in(tmpl, "template");
        lcs::require(json_out, "json_out");
        *json_out = lcs::make_string(tmpl->info);
    });
}

lcs_status lcs_chat_template_render(
        lcs_chat_template * tmpl, const char * request, size_t n_bytes, lcs_string ** json_out) {
    return lcs::guard([&] {
        const lcs::entered in(tmpl, "template");
        lcs::require(request, "request");
        lcs::require(json_out, "json_out");
        std::string key(request, std::min(n_bytes, lcs::MAX_CHAT_BYTES));
        if (const std::string * rendered = n_bytes == key.size() ? tmpl->renders.find(key) : nullptr) {
            *json_out = lcs::make_string(*rendered);
            return;
        }
        std::string  json = lcs::render(*tmpl, request, n_bytes);
        lcs_string * made = lcs::make_string(json);
        *json_out = made;
        if (!tmpl->tells_time) {
            tmpl->renders.add(std::move(key), std::move(json));
        }
    });
}

lcs_status lcs_chat_parse(
        const char * syntax, size_t n_syntax_bytes, const char * text, size_t n_bytes, bool partial,
        lcs_string ** json_out) {
    return lcs::guard([&] {
        lcs::require(syntax, "syntax");
        lcs::require(text, "text");
        lcs::require(json_out, "json_out");
        if (n_syntax_bytes > lcs::MAX_CHAT_BYTES) {
            lcs::refuse_syntax(std::to_string(n_syntax_bytes) + " bytes");
        }
        if (n_bytes > lcs::MAX_CHAT_BYTES) {
            lcs::fail(LCS_STATUS_TEMPLATE, "a reply of " + std::to_string(n_bytes) + " bytes, limit " +
                                               std::to_string(lcs::MAX_CHAT_BYTES));
        }
        lcs::init_once();
        lcs::fault_point();
        const auto        how = lcs::find_syntax(std::string(syntax, n_syntax_bytes));
        const std::string reply = lcs::valid_utf8(text, partial ? lcs::whole_utf8(text, n_bytes) : n_bytes);
        common_chat_msg   message;
        const auto        body = [&] { message = lcs::parse_reply(*how, reply, partial); };
        // Most replies nest little: no thread for those.
        lcs::fault_point();
        chat_guard::run run;
        lcs::job        here{body, run, nullptr, false};
        lcs::work(here, lcs::INLINE_STACK_BYTES);
        if (run.out_of_stack()) {
            chat_guard::run deep_run;
            lcs::job        deep{body, deep_run, nullptr, false};
            lcs::work_on_own_stack(deep);
            lcs::finish(deep, LCS_STATUS_TEMPLATE, "the reply");
        } else {
            lcs::finish(here, LCS_STATUS_TEMPLATE, "the reply");
        }
        *json_out = lcs::make_string(lcs::write_message(message));
    });
}

lcs_status lcs_json_schema_to_grammar(const char * schema, size_t n_bytes, lcs_string ** grammar_out) {
    return lcs::guard([&] {
        lcs::require(schema, "schema");
        lcs::require(grammar_out, "grammar_out");
        constexpr size_t MAX_BYTES = size_t{1} << 20;
        if (n_bytes > MAX_BYTES) {
            lcs::fail(LCS_STATUS_GRAMMAR, "a schema of " + std::to_string(n_bytes) + " bytes, limit " +
                                              std::to_string(MAX_BYTES));
        }
        lcs::init_once();
        const common_json json = lcs::read_json(lcs::valid_utf8(schema, n_bytes), LCS_STATUS_GRAMMAR, "the schema");
        lcs::check_schema(json, LCS_STATUS_GRAMMAR, "the schema");
        std::string     grammar;
        chat_guard::run run;
        lcs::bounded(run, LCS_STATUS_GRAMMAR, "the schema", [&] { grammar = json_schema_to_grammar(json, true); });
        lcs::check_grammar_text(grammar.c_str()); // the converter writes some that do not parse
        *grammar_out = lcs::make_string(std::move(grammar));
    });
}

} // extern "C"
