// Owns the capture of llama.cpp's log: the queue that the caller drains, and the last line that errors carry.
#include "lcs_internal.hpp"

#include <deque>

namespace lcs {

namespace {

constexpr size_t QUEUE_LINES = 1024;

struct line {
    lcs_log_level level;
    std::string   text;
};

struct queue {
    std::mutex       mutex;
    std::deque<line> lines;
};

// Never destroyed: llama.cpp may log from static destructors.
queue & the_queue() {
    static queue * q = new queue;
    return *q;
}

std::atomic<int>     g_level{LCS_LOG_LEVEL_WARN};
std::atomic<int64_t> g_pending{0};

struct thread_log {
    // llama.cpp logs a line in pieces, the later ones with level CONT.
    std::string   partial;
    lcs_log_level partial_level = LCS_LOG_LEVEL_INFO;
    std::string   last;
    lcs_log_level last_level = LCS_LOG_LEVEL_DEBUG;
    int           quiet = 0; // quiet_log objects alive
};
thread_local thread_log t_log;

void finish_line(lcs_log_level level, std::string text) {
    while (!text.empty() && (text.back() == '\n' || text.back() == ' ' || text.back() == '\r')) {
        text.pop_back();
    }
    if (text.empty()) {
        return;
    }
    // A failed load's last error line says nothing that the one before it, with the reason, does not.
    const bool vague = !t_log.last.empty() && text.find("failed to load model") != std::string::npos &&
                       t_log.last_level == LCS_LOG_LEVEL_ERROR;
    if (level >= LCS_LOG_LEVEL_WARN && level >= t_log.last_level && !vague) {
        t_log.last = text;
        t_log.last_level = level;
    }
    if (level < g_level.load(std::memory_order_relaxed) || t_log.quiet > 0) {
        return;
    }
    queue & q = the_queue();
    const std::lock_guard<std::mutex> lock(q.mutex);
    if (q.lines.size() == QUEUE_LINES) {
        q.lines.pop_front();
    }
    q.lines.push_back({level, std::move(text)});
    g_pending.store(static_cast<int64_t>(q.lines.size()), std::memory_order_relaxed);
}

} // namespace

void log_begin_call() noexcept {
    t_log.last.clear();
    t_log.last_level = LCS_LOG_LEVEL_DEBUG;
}

const std::string & log_last_line() noexcept {
    return t_log.last;
}

quiet_log::quiet_log() noexcept {
    ++t_log.quiet;
}

quiet_log::~quiet_log() {
    --t_log.quiet;
}

void log_line(lcs_log_level level, const std::string & text) noexcept {
    try {
        finish_line(level, text);
    } catch (...) {
        // A line that does not fit in memory is lost; the call that logged it goes on.
    }
}

// ggml_log_callback; installed by init_once().
void log_callback(ggml_log_level level, const char * text, void * /* data */) {
    try {
        if (level != GGML_LOG_LEVEL_CONT) {
            // A new line began: what was left of the last one is complete.
            if (!t_log.partial.empty()) {
                finish_line(t_log.partial_level, std::exchange(t_log.partial, {}));
            }
            switch (level) {
                case GGML_LOG_LEVEL_ERROR: t_log.partial_level = LCS_LOG_LEVEL_ERROR; break;
                case GGML_LOG_LEVEL_WARN:  t_log.partial_level = LCS_LOG_LEVEL_WARN; break;
                case GGML_LOG_LEVEL_INFO:  t_log.partial_level = LCS_LOG_LEVEL_INFO; break;
                default:                   t_log.partial_level = LCS_LOG_LEVEL_DEBUG; break;
            }
        }
        t_log.partial += text;
        if (!t_log.partial.empty() && t_log.partial.back() == '\n') {
            finish_line(t_log.partial_level, std::exchange(t_log.partial, {}));
        }
    } catch (...) {
        // As in log_line().
    }
}

} // namespace lcs

extern "C" {

void lcs_log_set_level(lcs_log_level level) {
    lcs::g_level.store(level, std::memory_order_relaxed);
}

int64_t lcs_log_pending(void) {
    return lcs::g_pending.load(std::memory_order_relaxed);
}

lcs_status lcs_log_next(lcs_log_level * level_out, lcs_string ** line_out) {
    return lcs::guard([&] {
        lcs::require(level_out, "level_out");
        lcs::require(line_out, "line_out");
        lcs::queue & q = lcs::the_queue();
        const std::lock_guard<std::mutex> lock(q.mutex);
        if (q.lines.empty()) {
            *line_out = nullptr;
            return;
        }
        lcs_string * text = lcs::make_string(q.lines.front().text);
        *level_out = q.lines.front().level;
        *line_out = text;
        q.lines.pop_front();
        lcs::g_pending.store(static_cast<int64_t>(q.lines.size()), std::memory_order_relaxed);
    });
}

} // extern "C"
