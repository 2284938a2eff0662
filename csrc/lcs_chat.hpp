// What the chat files share: requests as llama-common wants them, and text that is safe to put into JSON.
#pragma once

#include "chat_guard.hpp" // before chat.h

#include "chat.h"

#include "lcs_internal.hpp"

namespace lcs {

constexpr size_t MAX_CHAT_BYTES = size_t{64} << 20; // of a request, a reply, a syntax
constexpr int    MAX_JSON_NESTING = 200;

// Every sequence that is no UTF-8 becomes U+FFFD.
std::string valid_utf8(const char * text, size_t n_bytes);
bool        is_utf8(const char * text, size_t n_bytes);
// Length without a character at the end that is cut in the middle.
size_t whole_utf8(const char * text, size_t n_bytes);

// Judged before the parser of llama-common sees it, which takes quadratic time for an object, and whose values are
// copied and written by recursion. `what` begins the message of the failure.
common_json read_json(const std::string & text, lcs_status status, const std::string & what);

// Throws status where the converter would overflow, wrap or recurse without end.
void check_schema(const common_json & schema, lcs_status status, const std::string & path);

struct chat_request {
    common_chat_templates_inputs inputs;
    std::vector<std::string>     variables; // names of the extra variables
};

// Reads one request after the other. A conversation that goes on is read from where it parts from the one before.
class request_reader {
public:
    // Valid until the next. ARG, with the path in the message, for all that lcs_chat_template_render does not take.
    const chat_request & read(const char * text, size_t n_bytes);

    // The text of the last request from the end of its messages; empty where it does not begin with them.
    const std::string & rest() const { return rest_; }

private:
    bool go_on(const char * text, size_t n_bytes);
    void remember(const char * text, size_t n_bytes);
    void forget();

    chat_request        request_;
    std::string         text_; // up to the end of its messages
    size_t              begin_ = 0; // of the first message
    std::vector<size_t> ends_;      // of each message
    std::string         rest_;
};

// What came from the messages and tools of a valid request, for the last resort of marking.
std::vector<std::string> texts_of_request(const char * text, size_t n_bytes);

// {"text", "parts", of a render's JSON, without the brace that ends it. `texts` is for the last resort of marking.
std::string write_prompt(const std::string & prompt, const std::vector<chat_guard::rendered> & renders,
                         const std::function<std::vector<std::string>()> & texts);

} // namespace lcs
