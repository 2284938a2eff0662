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
    std::vector<std::string>     texts;     // what came from the messages and tools, for the last resort of marking
};

// ARG, with the path in the message, for everything that lcs_chat_template_render does not take.
chat_request read_chat_request(const char * text, size_t n_bytes);

} // namespace lcs
