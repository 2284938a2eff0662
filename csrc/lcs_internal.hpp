// What the shim's files share: guard(), failures, handles and their life, fault points. Nothing here is installed.
#pragma once

#include "lcs.h"

#include "llama.h"

#include <atomic>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace lcs {

// The one exception of ours. guard() turns it into a status and the thread's lcs_error_info.
struct failure : std::exception {
    lcs_status  status;
    std::string message;
    std::string field;
    std::string expected;
    std::string actual;

    failure(lcs_status status_, std::string message_) : status(status_), message(std::move(message_)) {}
    const char * what() const noexcept override { return message.c_str(); }
};

[[noreturn]] void fail(lcs_status status, std::string message);
[[noreturn]] void fail(
        lcs_status status, std::string message, std::string field, std::string expected = "", std::string actual = "");

// Fails with status and "<what> <value> is outside <low>..<high>" unless low <= value <= high.
void require_range(const char * what, int64_t value, int64_t low, int64_t high, lcs_status status = LCS_STATUS_RANGE);
// ARG unless the float is finite and low <= value <= high.
void require_finite(const char * what, double value, double low, double high);
// ARG: a NULL buffer of more than no bytes.
void require_room(const void * buf, size_t capacity, const char * what);
// Into the caller's buffer; BUFFER where it does not fit. n_out has the size in either case.
void give(std::string_view text, char * buf, size_t capacity, size_t * n_out);

template <class T>
void require(const T * pointer, const char * what) {
    if (pointer == nullptr) {
        fail(LCS_STATUS_ARG, std::string(what) + " is NULL");
    }
}

// Pair i of a file's metadata. ARG, RANGE.
using metadata_pairs = std::vector<std::pair<std::string, std::string>>;
void give_meta(const metadata_pairs & metadata, int32_t i, const char ** key_out, const char ** value_out);

// error.cpp: a call begins with no error and no log line; the exception in flight becomes the thread's error.
void       begin_call() noexcept;
lcs_status end_call_failed() noexcept;

// Where C++ ends. Every function of lcs.h that returns a status is one `return guard([&] { ... });`.
template <class F>
lcs_status guard(F && body) noexcept {
    begin_call();
    try {
        body();
        return LCS_STATUS_OK;
    } catch (...) {
        return end_call_failed();
    }
}

// A fallible step: throws bad_alloc when a test asked for its failure. Put one before each step that can fail by itself.
void fault_point();

// Counts a graph node of this thread's decode; the raw status to inject where a test asked for a failure here, else 0.
int32_t decode_fault_at_node() noexcept;

// log.cpp. The last ERROR (else WARN) line that llama.cpp logged on this thread since begin_call().
void                log_begin_call() noexcept;
const std::string & log_last_line() noexcept;
// While one lives, what llama.cpp logs on this thread goes into errors only.
class quiet_log {
public:
    quiet_log() noexcept;
    ~quiet_log();
    quiet_log(const quiet_log &) = delete;
    quiet_log & operator=(const quiet_log &) = delete;
};
// For text that upstream writes past the log callback (grammar errors go to stderr): nothing of ours prints either.
void                log_line(lcs_log_level level, const std::string & text) noexcept;

// abort.cpp. While one lives, a GGML_ASSERT that fails on this thread throws failure(status) instead of ending the
// process. Only behind our own judgement of the call: what llama.cpp was changing is half changed, so it must be dropped.
class trapped_aborts {
public:
    explicit trapped_aborts(lcs_status status) noexcept;
    ~trapped_aborts();
    trapped_aborts(const trapped_aborts &) = delete;
    trapped_aborts & operator=(const trapped_aborts &) = delete;

private:
    lcs_status outer_;
};

// build.cpp. Once: CPU check, log capture, backends. UNSUPPORTED where the CPU lacks what the build needs.
void init_once();

enum class kind { model, header, context, sampler, adapter, chat_template, string, count };

void count_alive(kind k, int64_t by) noexcept;

template <kind K>
struct counted {
    counted() noexcept { count_alive(K, 1); }
    ~counted() { count_alive(K, -1); }
    counted(const counted &) = delete;
    counted & operator=(const counted &) = delete;
};

// Rises in a forked child, so that a handle knows that it was made before the fork.
uint32_t fork_generation() noexcept;

struct handle {
    const uint32_t    born = fork_generation();
    std::atomic<bool> busy{false};

    bool forked() const noexcept { return born != fork_generation(); }
};

void require_alive(const handle * h, const char * what); // not NULL, not from before a fork

// Holds a single-caller handle for one call: BUSY where another thread is inside.
class entered {
public:
    entered(handle * h, const char * what);
    ~entered() { handle_->busy.store(false, std::memory_order_release); }
    entered(const entered &) = delete;
    entered & operator=(const entered &) = delete;

private:
    handle * handle_;
};

// _free for every handle: nothing happens for NULL, nor in a forked child, whose threads and devices are gone.
template <class H>
void free_handle(H * h) noexcept {
    if (h != nullptr && !h->forked()) {
        delete h;
    }
}

// machine.cpp: what the machine has left for this process, in bytes; UINT64_MAX where it cannot be told.
uint64_t available_memory_bytes();
// fit.cpp: NOMEM with both numbers.
void require_available(const char * what, uint64_t needed, uint64_t available);

struct vocab_walk; // grammar.hpp

// The weights. Shared by every handle that was made from them; freed with the last.
struct model_box {
    llama_model *       model = nullptr;
    const llama_vocab * vocab = nullptr;
    lcs_model_info      info{};
    std::string         description;
    std::string         architecture;
    std::string         path;
    metadata_pairs      metadata;
    lcs_vocab_specials  specials{};
    // vocab.cpp: what tokenising needs beyond llama.cpp's own tables. Set by read_specials().
    std::shared_ptr<const struct tokenizer> tokenizer;
    // Of architecture, shapes and metadata: what state blobs carry to tell models apart.
    uint64_t            fingerprint = 0;
    // llama_init_from_model and adapter init and free write to the model.
    std::mutex          mutex;
    // Made by the first grammar that needs it, under mutex.
    std::shared_ptr<const vocab_walk> walk;

    model_box() = default;
    ~model_box();
    model_box(const model_box &) = delete;
    model_box & operator=(const model_box &) = delete;
};

struct adapter_box {
    std::shared_ptr<model_box> model;
    llama_adapter_lora *       adapter = nullptr;
    metadata_pairs             metadata;

    adapter_box() = default;
    ~adapter_box();
    adapter_box(const adapter_box &) = delete;
    adapter_box & operator=(const adapter_box &) = delete;
};

// model.cpp: LOAD, or NOMEM, in the words of llama.cpp's last error line.
[[noreturn]] void fail_load(const std::string & log_line);

// vocab.cpp: fills specials, and finds out whether add_special can be honoured.
void read_specials(model_box & box);
// UNSUPPORTED ("vocab") where the model has no tokenizer.
void require_vocab(const model_box & box);
void require_token(const model_box & box, int32_t token);

// context.cpp: for the sampler. The handle must be entered; as lcs_context_logits.
const float * logits_row(lcs_context & ctx, int32_t row);

// grammar.cpp: GRAMMAR where the text is no GBNF grammar with a rule "root", or exceeds the limits in lcs.h.
void check_grammar_text(const char * text);

// A new lcs_string owned by the caller.
lcs_string * make_string(std::string text);

} // namespace lcs

struct lcs_model : lcs::handle, lcs::counted<lcs::kind::model> {
    std::shared_ptr<lcs::model_box> box;
};

struct lcs_adapter : lcs::handle, lcs::counted<lcs::kind::adapter> {
    std::shared_ptr<lcs::adapter_box> box;
};

struct lcs_string : lcs::handle, lcs::counted<lcs::kind::string> {
    std::string text;
};
