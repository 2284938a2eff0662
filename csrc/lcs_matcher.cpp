// Follows an output through a grammar, and finds the tokens that may come next. Knows nothing of logits.
#include "lcs_grammar.hpp"

#include <algorithm>

namespace lcs {

namespace {

// What one character may cost, and one search of the vocabulary: a grammar beyond it is refused where it happens.
constexpr uint64_t MAX_STEP_WORK = 1 << 22;
constexpr uint64_t MAX_SEARCH_WORK = 1 << 30;
constexpr size_t   MAX_FRAMES = 1 << 22;
constexpr size_t   MAX_CALLERS = 1 << 23;

uint64_t key_of(uint32_t high, uint32_t low) {
    return static_cast<uint64_t>(high) << 32 | low;
}

std::shared_ptr<const vocab_walk> make_walk(const model_box & model) {
    auto       made = std::make_shared<vocab_walk>();
    const auto n_vocab = model.info.n_vocab;
    made->kinds.resize(static_cast<size_t>(n_vocab), vocab_walk::EMPTY);
    for (int32_t token = 0; token < n_vocab; ++token) {
        auto & kind = made->kinds[static_cast<size_t>(token)];
        if (llama_vocab_is_eog(model.vocab, token)) {
            kind = vocab_walk::EOG;
            continue;
        }
        const auto text = token_text(model, token);
        if (text.empty()) {
            continue;
        }
        kind = vocab_walk::TEXT;
        const auto   first = made->code_points.size();
        partial_char partial;
        if (decode_utf8(text, partial, made->code_points)) {
            const auto n = static_cast<uint32_t>(made->code_points.size() - first);
            made->entries.push_back({token, static_cast<uint32_t>(first), n, 0, partial});
            made->longest = std::max(made->longest, n);
        } else {
            made->code_points.resize(first);
        }
    }
    const uint32_t * pool = made->code_points.data();
    std::sort(made->entries.begin(), made->entries.end(), [pool](const auto & a, const auto & b) {
        return std::lexicographical_compare(pool + a.first, pool + a.first + a.n, pool + b.first, pool + b.first + b.n);
    });
    for (size_t i = 1; i < made->entries.size(); ++i) {
        const auto & before = made->entries[i - 1];
        auto &       entry = made->entries[i];
        const auto   n = std::min(before.n, entry.n);
        while (entry.n_common < n && pool[before.first + entry.n_common] == pool[entry.first + entry.n_common]) {
            ++entry.n_common;
        }
    }
    return made;
}

std::shared_ptr<const vocab_walk> walk_of(model_box & model) {
    const std::lock_guard<std::mutex> lock(model.mutex);
    if (model.walk == nullptr) {
        model.walk = make_walk(model);
    }
    return model.walk;
}

} // namespace

std::string token_text(const model_box & model, int32_t token) {
    std::string text(32, '\0');
    int32_t     n = llama_token_to_piece(model.vocab, token, text.data(), static_cast<int32_t>(text.size()), 0, true);
    if (n < 0) {
        text.resize(static_cast<size_t>(-n));
        n = llama_token_to_piece(model.vocab, token, text.data(), static_cast<int32_t>(text.size()), 0, true);
    }
    text.resize(static_cast<size_t>(std::max(n, 0)));
    return text;
}

grammar_matcher::grammar_matcher(std::shared_ptr<const compiled_grammar> grammar,
                                 std::shared_ptr<const grammar_triggers> triggers, std::shared_ptr<model_box> model)
    : grammar_(std::move(grammar)), triggers_(std::move(triggers)), model_(std::move(model)),
      awaiting_(triggers_ != nullptr) {
    budget_ = MAX_STEP_WORK;
    begin_step();
    frames_.push_back({grammar_->root, NONE, 0});
    const auto & root = grammar_->rules[grammar_->root];
    for (uint32_t i = 0; i < root.n_alternatives; ++i) {
        scratch_.work.push_back({grammar_->alternatives[root.first_alternative + i], 0});
    }
    close_step(now_);
}

void grammar_matcher::cut(const mark & m) {
    frames_.resize(m.frames);
    callers_.resize(m.callers);
}

void grammar_matcher::spend(uint64_t work) {
    if (work > budget_ || frames_.size() > MAX_FRAMES || callers_.size() > MAX_CALLERS) {
        fail(LCS_STATUS_GRAMMAR, "the grammar is too ambiguous to follow: over " + std::to_string(MAX_STEP_WORK) +
                                     " steps for a character");
    }
    budget_ -= work;
}

void grammar_matcher::begin_visits() {
    ++scratch_.stamp;
    scratch_.n_seen = 0;
}

bool grammar_matcher::first_visit(uint64_t key) {
    auto &     table = scratch_.seen;
    const auto insert = [&](uint64_t k) {
        uint64_t hash = k * 0x9E3779B97F4A7C15u;
        hash ^= hash >> 32;
        for (size_t i = hash & (table.size() - 1);; i = (i + 1) & (table.size() - 1)) {
            if (table[i].second != scratch_.stamp) {
                table[i] = {k, scratch_.stamp};
                return true;
            }
            if (table[i].first == k) {
                return false;
            }
        }
    };
    if (table.size() < 2 * (scratch_.n_seen + 1)) {
        std::vector<std::pair<uint64_t, uint64_t>> old(std::max<size_t>(64, 4 * table.size()));
        old.swap(table);
        for (const auto & [k, stamp] : old) {
            if (stamp == scratch_.stamp) {
                insert(k);
            }
        }
    }
    const bool is_new = insert(key);
    scratch_.n_seen += is_new ? 1 : 0;
    return is_new;
}

void grammar_matcher::begin_step() {
    ++step_;
    step_begin_ = frames_.size();
    scratch_.work.clear();
    scratch_.frame_of_rule.resize(grammar_->rules.size());
    begin_visits();
}

// From the items in work, by predicting and ending rules, to those that wait for a character or a token.
void grammar_matcher::close_step(place & to) {
    to.items.clear();
    to.complete = false;
    auto &   work = scratch_.work;
    uint64_t n_done = 0;
    while (!work.empty()) {
        if (++n_done == 256) {
            spend(n_done);
            n_done = 0;
        }
        const item at = work.back();
        work.pop_back();
        const auto element = grammar_->elements[at.element];
        if (element.type == grammar_element::END) {
            auto & ending = frames_[at.frame];
            if (ending.ended == step_) {
                continue;
            }
            ending.ended = step_;
            to.complete = to.complete || at.frame == 0;
            for (uint32_t c = ending.callers; c != NONE; c = callers_[c].next) {
                work.push_back(callers_[c].next_item);
            }
            continue;
        }
        if (!first_visit(key_of(at.element, at.frame))) {
            continue;
        }
        if (element.type != grammar_element::REF) {
            to.items.push_back(at);
            continue;
        }
        const uint32_t rule = element.value;
        const item     after{at.element + 1, at.frame};
        uint32_t       callee = scratch_.frame_of_rule[rule];
        const bool     exists = callee >= step_begin_ && callee < frames_.size() && frames_[callee].rule == rule;
        if (!exists) {
            callee = static_cast<uint32_t>(frames_.size());
            scratch_.frame_of_rule[rule] = callee;
            frames_.push_back({rule, NONE, 0});
            for (uint32_t i = 0; i < grammar_->rules[rule].n_alternatives; ++i) {
                work.push_back({grammar_->alternatives[grammar_->rules[rule].first_alternative + i], callee});
            }
        } else if (frames_[callee].ended == step_) {
            work.push_back(after); // it ends empty, and did so before it had this caller
        }
        callers_.push_back({after, frames_[callee].callers});
        frames_[callee].callers = static_cast<uint32_t>(callers_.size() - 1);
    }
    spend(n_done);
    for (size_t made = step_begin_; made < frames_.size(); ++made) {
        flatten(static_cast<uint32_t>(made));
    }
}

// A rule called as the last of its caller returns to the caller's callers at once: lists that recurse on their right
// stay as deep as they began.
void grammar_matcher::flatten(uint32_t made) {
    const auto is_tail = [&](const item & next_item) {
        return next_item.frame != 0 && grammar_->elements[next_item.element].type == grammar_element::END;
    };
    bool any = false;
    for (uint32_t c = frames_[made].callers; c != NONE && !any; c = callers_[c].next) {
        any = is_tail(callers_[c].next_item);
    }
    if (!any) {
        return;
    }
    begin_visits();
    auto &   work = scratch_.work;
    uint32_t head = NONE;
    work.push_back({0, made});
    first_visit(key_of(NONE, made));
    while (!work.empty()) {
        const uint32_t from = work.back().frame;
        work.pop_back();
        for (uint32_t c = frames_[from].callers; c != NONE; c = callers_[c].next) {
            const item next_item = callers_[c].next_item;
            spend(1);
            if (is_tail(next_item)) {
                if (first_visit(key_of(NONE, next_item.frame))) {
                    work.push_back({0, next_item.frame});
                }
            } else if (first_visit(key_of(next_item.element, next_item.frame))) {
                callers_.push_back({next_item, head});
                head = static_cast<uint32_t>(callers_.size() - 1);
            }
        }
    }
    frames_[made].callers = head;
}

void grammar_matcher::step(const place & from, uint32_t code_point, place & to) {
    begin_step();
    spend(from.items.size());
    for (const item & at : from.items) {
        if (grammar_->matches(grammar_->elements[at.element], code_point)) {
            scratch_.work.push_back({at.element + 1, at.frame});
        }
    }
    close_step(to);
}

bool grammar_matcher::may_continue(const place & at, const partial_char & partial) const {
    const int      shift = 6 * partial.n_left;
    const uint32_t low = std::max(partial.value << shift, partial.low);
    const uint32_t high = std::min((partial.value << shift) | ((1u << shift) - 1), uint32_t(0x10FFFF));
    return low <= high && std::any_of(at.items.begin(), at.items.end(), [&](const item & i) {
        return grammar_->matches_any(grammar_->elements[i.element], low, high);
    });
}

bool grammar_matcher::follow(int32_t token, std::string_view text, place & to, partial_char & partial) {
    to = {};
    if (partial_.n_left == 0 && token >= 0) {
        begin_step();
        for (const item & at : now_.items) {
            const auto & element = grammar_->elements[at.element];
            const bool   named = element.value == static_cast<uint32_t>(token);
            if ((element.type == grammar_element::TOKEN && named) ||
                (element.type == grammar_element::TOKEN_NOT && !named && !text.empty())) {
                scratch_.work.push_back({at.element + 1, at.frame});
            }
        }
        close_step(to);
    }

    partial = partial_;
    scratch_.code_points.clear();
    place by_text;
    if (!text.empty() && decode_utf8(text, partial, scratch_.code_points)) {
        by_text = now_;
        place next;
        for (const uint32_t code_point : scratch_.code_points) {
            budget_ = MAX_STEP_WORK;
            step(by_text, code_point, next);
            std::swap(by_text, next);
            if (by_text.dead()) {
                break;
            }
        }
        if (partial.n_left > 0 && !may_continue(by_text, partial)) {
            by_text = {};
        }
    }
    if (by_text.dead()) {
        partial = {};
    } else {
        to.items.insert(to.items.end(), by_text.items.begin(), by_text.items.end());
        to.complete = to.complete || by_text.complete;
        std::sort(to.items.begin(), to.items.end(), [](const item & a, const item & b) {
            return key_of(a.element, a.frame) < key_of(b.element, b.frame);
        });
        to.items.erase(std::unique(to.items.begin(), to.items.end(),
                                   [](const item & a, const item & b) {
                                       return a.element == b.element && a.frame == b.frame;
                                   }),
                       to.items.end());
    }
    return !to.dead();
}

bool grammar_matcher::take(int32_t token, std::string_view text) {
    collect();
    budget_ = MAX_STEP_WORK;
    const mark   before = here();
    place        to;
    partial_char partial;
    try {
        if (!follow(token, text, to, partial)) {
            cut(before);
            return false;
        }
    } catch (...) {
        cut(before);
        throw;
    }
    now_ = std::move(to);
    partial_ = partial;
    return true;
}

bool grammar_matcher::accept(int32_t token) {
    const std::string text = token_text(*model_, token);
    if (awaiting_) {
        return wait(token, text);
    }
    if (llama_vocab_is_eog(model_->vocab, token)) {
        return now_.complete && partial_.n_left == 0;
    }
    return take(token, text);
}

bool grammar_matcher::allows(int32_t token) {
    if (llama_vocab_is_eog(model_->vocab, token)) {
        return now_.complete && partial_.n_left == 0;
    }
    budget_ = MAX_STEP_WORK;
    const mark   before = here();
    place        to;
    partial_char partial;
    try {
        const bool may = follow(token, token_text(*model_, token), to, partial);
        cut(before);
        return may;
    } catch (...) {
        cut(before);
        throw;
    }
}

bool grammar_matcher::accept_text(std::string_view text) {
    return take(-1, text);
}

bool grammar_matcher::wait(int32_t token, const std::string & text) {
    const auto & tokens = triggers_->tokens;
    if (std::binary_search(tokens.begin(), tokens.end(), token)) {
        if (!take(token, text)) {
            return false;
        }
        awaiting_ = false;
        output_.clear();
        output_tokens_.clear();
        return true;
    }
    const size_t n_old = output_.size();
    const auto   undo = [&] {
        output_.resize(n_old);
        output_tokens_.pop_back();
    };
    output_tokens_.emplace_back(token, n_old + text.size());
    try {
        output_ += text;
        for (const auto & pattern : triggers_->patterns) {
            const size_t begin = find_trigger(pattern, output_, n_old);
            if (begin == std::string::npos) {
                continue;
            }
            if (!replay(begin)) {
                undo();
                return false;
            }
            awaiting_ = false;
            output_.clear();
            output_tokens_.clear();
            return true;
        }
    } catch (...) {
        undo();
        throw;
    }
    return true;
}

// Takes what was written from begin on. False, or an exception: as it was.
bool grammar_matcher::replay(size_t begin) {
    grammar_matcher after(*this);
    size_t          token_begin = 0;
    for (const auto & [token, token_end] : output_tokens_) {
        const size_t from = std::max(token_begin, begin);
        token_begin = token_end;
        if (token_end > begin && !after.take(token, std::string_view(output_).substr(from, token_end - from))) {
            return false;
        }
    }
    frames_.swap(after.frames_);
    callers_.swap(after.callers_);
    std::swap(now_, after.now_);
    partial_ = after.partial_;
    step_ = after.step_;
    collect_at_ = after.collect_at_;
    return true;
}

void grammar_matcher::allowed(std::vector<int32_t> & tokens) {
    const auto           walk = walk_of(*model_);
    const size_t         n_vocab = walk->kinds.size();
    std::vector<uint8_t> may(n_vocab, 0);
    const mark           before = here();
    const auto           search = [&] {
        if (partial_.n_left == 0) {
            for (const item & at : now_.items) {
                const auto & element = grammar_->elements[at.element];
                if (element.type == grammar_element::TOKEN && walk->kinds[element.value] != vocab_walk::EOG) {
                    may[element.value] = 1;
                } else if (element.type == grammar_element::TOKEN_NOT) {
                    for (size_t token = 0; token < n_vocab; ++token) {
                        if (walk->kinds[token] == vocab_walk::TEXT && token != element.value) {
                            may[token] = 1;
                        }
                    }
                }
            }
        }
        if (now_.complete && partial_.n_left == 0) {
            for (size_t token = 0; token < n_vocab; ++token) {
                if (walk->kinds[token] == vocab_walk::EOG) {
                    may[token] = 1;
                }
            }
        }

        auto & levels = scratch_.levels;
        auto & marks = scratch_.marks;
        levels.resize(std::max<size_t>(levels.size(), walk->longest + 5));
        marks.resize(levels.size());
        levels[0] = now_;
        marks[0] = before;
        budget_ = MAX_SEARCH_WORK;
        size_t     depth = 0;
        const auto enter = [&](uint32_t code_point) {
            step(levels[depth], code_point, levels[depth + 1]);
            if (levels[depth + 1].dead()) {
                cut(marks[depth]);
                return false;
            }
            marks[++depth] = here();
            return true;
        };
        if (partial_.n_left > 0) {
            // In the middle of a character few tokens fit: each is tried.
            auto & code_points = scratch_.code_points;
            for (size_t token = 0; token < n_vocab; ++token) {
                if (walk->kinds[token] != vocab_walk::TEXT) {
                    continue;
                }
                partial_char partial = partial_;
                code_points.clear();
                if (!decode_utf8(token_text(*model_, static_cast<int32_t>(token)), partial, code_points)) {
                    continue;
                }
                depth = 0;
                cut(marks[0]);
                may[token] = std::all_of(code_points.begin(), code_points.end(), enter) &&
                             (partial.n_left == 0 || may_continue(levels[depth], partial));
            }
            return;
        }
        size_t dead = SIZE_MAX; // length of the begin that was refused last
        for (const auto & entry : walk->entries) {
            if (entry.n_common >= dead) {
                continue;
            }
            dead = SIZE_MAX;
            if (entry.n_common < depth) {
                depth = entry.n_common;
                cut(marks[depth]);
            }
            while (depth < entry.n && dead == SIZE_MAX) {
                if (!enter(walk->code_points[entry.first + depth])) {
                    dead = depth + 1;
                }
            }
            if (dead == SIZE_MAX && (entry.partial.n_left == 0 || may_continue(levels[depth], entry.partial))) {
                may[static_cast<size_t>(entry.token)] = 1;
            }
        }
    };
    try {
        search();
    } catch (...) {
        cut(before);
        throw;
    }
    cut(before);
    tokens.clear();
    for (size_t token = 0; token < n_vocab; ++token) {
        if (may[token] != 0) {
            tokens.push_back(static_cast<int32_t>(token));
        }
    }
}

// Drops the frames that no item leads to any more.
void grammar_matcher::collect() {
    if (frames_.size() + callers_.size() < collect_at_) {
        return;
    }
    std::vector<uint32_t> moved(frames_.size(), NONE);
    std::vector<uint32_t> work{0};
    moved[0] = 0;
    const auto reach = [&](uint32_t f) {
        if (moved[f] == NONE) {
            moved[f] = 0;
            work.push_back(f);
        }
    };
    for (const item & at : now_.items) {
        reach(at.frame);
    }
    while (!work.empty()) {
        const uint32_t f = work.back();
        work.pop_back();
        for (uint32_t c = frames_[f].callers; c != NONE; c = callers_[c].next) {
            reach(callers_[c].next_item.frame);
        }
    }
    uint32_t n = 0;
    for (auto & to : moved) {
        to = to != NONE ? n++ : NONE;
    }
    std::vector<frame>  frames;
    std::vector<caller> callers;
    frames.reserve(n);
    for (size_t f = 0; f < frames_.size(); ++f) {
        if (moved[f] == NONE) {
            continue;
        }
        uint32_t head = NONE;
        for (uint32_t c = frames_[f].callers; c != NONE; c = callers_[c].next) {
            const item & next_item = callers_[c].next_item;
            callers.push_back({{next_item.element, moved[next_item.frame]}, head});
            head = static_cast<uint32_t>(callers.size() - 1);
        }
        frames.push_back({frames_[f].rule, head, frames_[f].ended});
    }
    for (item & at : now_.items) {
        at.frame = moved[at.frame];
    }
    frames_.swap(frames);
    callers_.swap(callers);
    collect_at_ = std::max<size_t>(1024, 2 * (frames_.size() + callers_.size()));
}

} // namespace lcs
