// Owns the thread's last error, guard()'s other half, the life of handles (counts, fork, busy), strings and fault points.
#include "lcs_internal.hpp"

#include <array>
#include <cmath>
#include <cstring>
#include <new>
#include <sstream>
#include <stdexcept>

#if !defined(_WIN32)
#    include <pthread.h>
#endif

namespace lcs {

namespace {

struct last_error {
    lcs_status  status = LCS_STATUS_OK;
    std::string message;
    std::string log;
    std::string field;
    std::string expected;
    std::string actual;
};
thread_local last_error t_error;

struct armed_fault {
    int64_t n = 0; // steps left until the failing one; 0: none
    int64_t decode_nodes = 0;
    int32_t decode_status = 0; // 0: none
    bool    fired = false;
};
thread_local armed_fault t_fault;

// Faults are rare: one load of this tells whether any thread has one armed.
std::atomic<int> g_faults_armed{0};

std::array<std::atomic<int64_t>, static_cast<size_t>(kind::count)> g_alive{};

std::atomic<uint32_t> g_fork_generation{1};

#if !defined(_WIN32)
[[maybe_unused]] const int g_at_fork = pthread_atfork(nullptr, nullptr, [] { g_fork_generation.fetch_add(1); });
#endif

constexpr size_t MAX_MESSAGE_BYTES = 2000;

// One line that can be read, whatever upstream, or a template, put into what().
std::string one_line(std::string text) {
    if (text.size() > MAX_MESSAGE_BYTES) {
        size_t end = MAX_MESSAGE_BYTES;
        while (end > 0 && (static_cast<unsigned char>(text[end]) & 0xC0) == 0x80) {
            --end; // not within a character
        }
        text.resize(end);
        text += "\xE2\x80\xA6"; // an ellipsis
    }
    for (char & c : text) {
        if (c == '\n' || c == '\r' || c == '\t') {
            c = ' ';
        }
    }
    const auto first = text.find_first_not_of(' ');
    if (first == std::string::npos) {
        return "";
    }
    return text.substr(first, text.find_last_not_of(' ') - first + 1);
}

void set_error(lcs_status status, const char * what) {
    t_error.status = status;
    t_error.message = one_line(what);
}

} // namespace

void fail(lcs_status status, std::string message) {
    throw failure(status, std::move(message));
}

void fail(lcs_status status, std::string message, std::string field, std::string expected, std::string actual) {
    failure f(status, std::move(message));
    f.field = std::move(field);
    f.expected = std::move(expected);
    f.actual = std::move(actual);
    throw f;
}

void require_range(const char * what, int64_t value, int64_t low, int64_t high, lcs_status status) {
    if (value < low || value > high) {
        const std::string limits = std::to_string(low) + ".." + std::to_string(high);
        fail(status, std::string(what) + " " + std::to_string(value) + " is outside " + limits, what, limits,
             std::to_string(value));
    }
}

void require_room(const void * buf, size_t capacity, const char * what) {
    if (buf == nullptr && capacity != 0) {
        fail(LCS_STATUS_ARG, std::string(what) + " is NULL");
    }
}

void give(std::string_view text, char * buf, size_t capacity, size_t * n_out) {
    *n_out = text.size();
    if (text.size() > capacity) {
        fail(LCS_STATUS_BUFFER, std::to_string(text.size()) + " bytes do not fit " + std::to_string(capacity));
    }
    if (!text.empty()) {
        std::memcpy(buf, text.data(), text.size());
    }
}

void give_meta(const metadata_pairs & metadata, int32_t i, const char ** key_out, const char ** value_out) {
    require(key_out, "key_out");
    require(value_out, "value_out");
    require_range("i", i, 0, static_cast<int64_t>(metadata.size()) - 1);
    *key_out = metadata[i].first.c_str();
    *value_out = metadata[i].second.c_str();
}

void require_finite(const char * what, double value, double low, double high) {
    if (!std::isfinite(value) || value < low || value > high) {
        std::ostringstream limits;
        limits << low << ".." << high;
        std::ostringstream actual;
        actual << value;
        fail(LCS_STATUS_ARG, std::string(what) + " " + actual.str() + " is outside " + limits.str(), what, limits.str(),
             actual.str());
    }
}

void begin_call() noexcept {
    t_error.status = LCS_STATUS_OK;
    t_error.message.clear();
    t_error.log.clear();
    t_error.field.clear();
    t_error.expected.clear();
    t_error.actual.clear();
    log_begin_call();
}

lcs_status end_call_failed() noexcept {
    try {
        try {
            throw;
        } catch (failure & f) {
            set_error(f.status, f.message.c_str());
            t_error.field = std::move(f.field);
            t_error.expected = std::move(f.expected);
            t_error.actual = std::move(f.actual);
        } catch (const std::bad_alloc &) {
            set_error(LCS_STATUS_NOMEM, "out of memory");
        } catch (const std::length_error & e) {
            set_error(LCS_STATUS_NOMEM, e.what());
        } catch (const std::exception & e) {
            set_error(LCS_STATUS_INTERNAL, e.what());
        } catch (...) {
            set_error(LCS_STATUS_INTERNAL, "an exception that is no std::exception");
        }
        t_error.log = log_last_line();
    } catch (...) {
        // Out of memory while telling of an error: the status alone must do.
        if (t_error.status == LCS_STATUS_OK) {
            t_error.status = LCS_STATUS_NOMEM;
        }
    }
    return t_error.status;
}

void fault_point() {
    if (g_faults_armed.load(std::memory_order_relaxed) != 0 && t_fault.n > 0 && --t_fault.n == 0) {
        g_faults_armed.fetch_sub(1);
        t_fault.fired = true;
        throw std::bad_alloc();
    }
}

int32_t decode_fault_at_node() noexcept {
    if (g_faults_armed.load(std::memory_order_relaxed) == 0 || t_fault.decode_status == 0 ||
        --t_fault.decode_nodes > 0) {
        return 0;
    }
    g_faults_armed.fetch_sub(1);
    t_fault.fired = true;
    return std::exchange(t_fault.decode_status, 0);
}

void count_alive(kind k, int64_t by) noexcept {
    g_alive[static_cast<size_t>(k)].fetch_add(by, std::memory_order_relaxed);
}

uint32_t fork_generation() noexcept {
    return g_fork_generation.load(std::memory_order_relaxed);
}

void require_alive(const handle * h, const char * what) {
    require(h, what);
    if (h->forked()) {
        fail(LCS_STATUS_FORKED, std::string(what) + " was made before fork()");
    }
}

entered::entered(handle * h, const char * what) : handle_(h) {
    require_alive(h, what);
    if (h->busy.exchange(true, std::memory_order_acquire)) {
        fail(LCS_STATUS_BUSY, std::string(what) + " is inside another call");
    }
}

lcs_string * make_string(std::string text) {
    fault_point();
    auto string = std::make_unique<lcs_string>();
    string->text = std::move(text);
    return string.release();
}

} // namespace lcs

extern "C" {

const char * lcs_status_name(lcs_status status) {
    switch (status) {
        case LCS_STATUS_OK:              return "OK";
        case LCS_STATUS_ARG:             return "ARG";
        case LCS_STATUS_RANGE:           return "RANGE";
        case LCS_STATUS_BUFFER:          return "BUFFER";
        case LCS_STATUS_NOMEM:           return "NOMEM";
        case LCS_STATUS_UNSUPPORTED:     return "UNSUPPORTED";
        case LCS_STATUS_BUSY:            return "BUSY";
        case LCS_STATUS_FORKED:          return "FORKED";
        case LCS_STATUS_LOAD:            return "LOAD";
        case LCS_STATUS_CANCELLED:       return "CANCELLED";
        case LCS_STATUS_BATCH_TOO_LARGE: return "BATCH_TOO_LARGE";
        case LCS_STATUS_NO_KV_SLOT:      return "NO_KV_SLOT";
        case LCS_STATUS_ABORTED:         return "ABORTED";
        case LCS_STATUS_INVALID_BATCH:   return "INVALID_BATCH";
        case LCS_STATUS_ALLOC_FAILED:    return "ALLOC_FAILED";
        case LCS_STATUS_COMPUTE_FAILED:  return "COMPUTE_FAILED";
        case LCS_STATUS_DECODE_FATAL:    return "DECODE_FATAL";
        case LCS_STATUS_STATE_CORRUPT:   return "STATE_CORRUPT";
        case LCS_STATUS_STATE_MISMATCH:  return "STATE_MISMATCH";
        case LCS_STATUS_TEMPLATE:        return "TEMPLATE";
        case LCS_STATUS_GRAMMAR:         return "GRAMMAR";
        case LCS_STATUS_INTERNAL:        return "INTERNAL";
        case LCS_STATUS_COUNT:           break;
    }
    return "?";
}

void lcs_last_error(lcs_error_info * info_out) {
    if (info_out == nullptr) {
        return;
    }
    const auto & e = lcs::t_error;
    *info_out = {e.status,           e.message.c_str(),  e.log.c_str(),
                 e.field.c_str(),    e.expected.c_str(), e.actual.c_str()};
}

void lcs_live(lcs_live_counts * counts_out) {
    if (counts_out == nullptr) {
        return;
    }
    const auto alive = [](lcs::kind k) { return lcs::g_alive[static_cast<size_t>(k)].load(std::memory_order_relaxed); };
    counts_out->models = alive(lcs::kind::model);
    counts_out->headers = alive(lcs::kind::header);
    counts_out->contexts = alive(lcs::kind::context);
    counts_out->samplers = alive(lcs::kind::sampler);
    counts_out->adapters = alive(lcs::kind::adapter);
    counts_out->chat_templates = alive(lcs::kind::chat_template);
    counts_out->strings = alive(lcs::kind::string);
}

const char * lcs_string_data(const lcs_string * string) {
    return string == nullptr ? "" : string->text.c_str();
}

size_t lcs_string_bytes(const lcs_string * string) {
    return string == nullptr ? 0 : string->text.size();
}

void lcs_string_free(lcs_string * string) {
    lcs::free_handle(string);
}

void lcs_fault_arm(int64_t n) {
    auto & fault = lcs::t_fault;
    lcs::g_faults_armed.fetch_add((n > 0 ? 1 : 0) - (fault.n > 0 ? 1 : 0));
    fault.n = n > 0 ? n : 0;
    fault.fired = false;
}

bool lcs_fault_fired(void) {
    return lcs::t_fault.fired;
}

void lcs_fault_arm_decode(int32_t raw_status, int64_t n_nodes) {
    auto & fault = lcs::t_fault;
    lcs::g_faults_armed.fetch_add((raw_status != 0 ? 1 : 0) - (fault.decode_status != 0 ? 1 : 0));
    fault.decode_status = raw_status;
    fault.decode_nodes = n_nodes;
    fault.fired = false;
}

} // extern "C"
