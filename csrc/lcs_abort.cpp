// Owns ggml's abort callback: the second line of defence, behind the checks before each call.
#include "lcs_internal.hpp"

#include "ggml.h"

#include <cstdio>
#include <cstring>

namespace lcs {

namespace {

thread_local lcs_status t_trap = LCS_STATUS_OK; // OK: not armed

// "/path/file.cpp:12: GGML_ASSERT(x) failed" without the path, which names the build machine's folders.
const char * without_folders(const char * message) {
    const char * end = std::strchr(message, ' ');
    const char * from = message;
    for (const char * c = message; c != end && *c != '\0'; ++c) {
        if (*c == '/' || *c == '\\') {
            from = c + 1;
        }
    }
    return from;
}

// Called by ggml_abort(), which ends the process if this returns. It is C, but has unwind tables, and its callers take
// it for a function that may throw.
void on_abort(const char * message) {
    if (t_trap != LCS_STATUS_OK) {
        fail(t_trap, std::string("llama.cpp gave up: ") + without_folders(message));
    }
    std::fprintf(stderr, "%s\n", message); // as without a callback: the last words of this process
}

} // namespace

trapped_aborts::trapped_aborts(lcs_status status) noexcept : outer_(t_trap) {
    static const bool installed = [] {
        ggml_set_abort_callback(on_abort);
        return true;
    }();
    static_cast<void>(installed);
    t_trap = status;
}

trapped_aborts::~trapped_aborts() {
    t_trap = outer_;
}

} // namespace lcs
