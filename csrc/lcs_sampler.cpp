// Samplers. What keeps state (draws, history, Mirostat, the grammar) is ours, so that clone, reset and an error leave
// exactly what lcs.h says; DRY and the filters are llama.cpp's, run on as few candidates as can matter.
#include "lcs_context.hpp"
#include "lcs_grammar.hpp"
#include "lcs_row.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <locale>
#include <random>
#include <sstream>

namespace lcs {

namespace {

constexpr float    FORBIDDEN = -std::numeric_limits<float>::infinity();
constexpr int32_t  MAX_LAST_N = 1000000;
constexpr size_t   MAX_BREAKERS = 256;
constexpr size_t   MAX_BREAKER_BYTES = 40; // llama.cpp cuts longer ones silently
constexpr size_t   MAX_TRIGGERS = 256;
constexpr uint32_t DRAWN_SEED = LLAMA_DEFAULT_SEED;
// exp() of less than this below the largest logit is nothing to a float: it can only turn logarithms into NaN.
constexpr float    NEGLIGIBLE = 80;

struct llama_sampler_free_fn {
    void operator()(llama_sampler * s) const noexcept { llama_sampler_free(s); }
};
using llama_sampler_ptr = std::unique_ptr<llama_sampler, llama_sampler_free_fn>;

llama_sampler_ptr made(llama_sampler * s) {
    llama_sampler_ptr owned(s);
    if (owned == nullptr) {
        fail(LCS_STATUS_INTERNAL, "llama.cpp made no sampler");
    }
    return owned;
}

// What init was told, as far as sampling needs it. Shared by clones.
struct plan {
    bool    greedy = true;
    int32_t top_k = 0; // 0: off
    float   temperature = 0;
    float   dynatemp_range = 0;
    float   xtc_probability = 0;
    float   xtc_threshold = 1;
    float   penalty_repeat = 1;
    float   penalty_freq = 0;
    float   penalty_present = 0;
    int32_t penalty_last_n = 0; // 0: off
    int32_t dry_last_n = 0;     // 0: off
    int32_t mirostat = 0;
    float   mirostat_tau = 0;
    float   mirostat_eta = 0;
    size_t  min_keep = 0;
    bool    typical = false;
    uint32_t seed = 0;
    std::vector<lcs_logit_bias> bias;

    size_t history() const { return static_cast<size_t>(std::max(penalty_last_n, dry_last_n)); }
};

// Everything that a draw changes.
struct draws {
    std::mt19937 choice;
    std::mt19937 xtc;
    float        mirostat_mu;

    explicit draws(const plan & p) : choice(p.seed), xtc(p.seed), mirostat_mu(2 * p.mirostat_tau) {}
};

// llama.cpp's, in the order of the chain. They keep working memory, hence one set a sampler.
struct filters {
    llama_sampler_ptr dry;
    llama_sampler_ptr top_n_sigma;
    llama_sampler_ptr typical;
    llama_sampler_ptr top_p;
    llama_sampler_ptr min_p;
    llama_sampler_ptr temperature;

    filters clone() const {
        const auto copy = [](const llama_sampler_ptr & from) {
            fault_point();
            return from != nullptr ? made(llama_sampler_clone(from.get())) : nullptr;
        };
        return {copy(dry), copy(top_n_sigma), copy(typical), copy(top_p), copy(min_p), copy(temperature)};
    }
};

// The last tokens, oldest overwritten. push() cannot fail.
struct history {
    std::vector<int32_t> ring;
    size_t               n = 0; // ever pushed

    void push(int32_t token) noexcept {
        if (!ring.empty()) {
            ring[n++ % ring.size()] = token;
        }
    }
    size_t size() const { return std::min(n, ring.size()); }
    // 0: the newest
    int32_t back(size_t i) const { return ring[(n - 1 - i) % ring.size()]; }
};

// More likely first; of equals, the lower id, so that ties do not depend on a sorting algorithm.
bool better(const llama_token_data & a, const llama_token_data & b) {
    return a.logit != b.logit ? a.logit > b.logit : a.id < b.id;
}

// Working memory, kept between calls, not copied.
struct workspace {
    std::vector<llama_token_data> candidates;
    std::vector<llama_token_data> touched;
    std::vector<int32_t>          counts;  // of touched, for the penalties
    std::vector<int32_t>          slot_of; // token to 1 + its place in touched
    std::vector<int32_t>          allowed;

    workspace() = default;
    workspace(const workspace &) {}
    workspace & operator=(const workspace &) { return *this; }
};

} // namespace

} // namespace lcs

struct lcs_sampler : lcs::handle, lcs::counted<lcs::kind::sampler> {
    std::shared_ptr<lcs::model_box>             model; // outlives the filters, which point into its vocabulary
    std::shared_ptr<const lcs::plan>            plan;
    std::shared_ptr<const lcs::grammar_matcher> grammar_begin; // null: no grammar
    std::unique_ptr<lcs::grammar_matcher>       grammar;
    lcs::filters                                filters;
    lcs::draws                                  draws;
    lcs::history                                history;
    lcs::workspace                              work;

    lcs_sampler(std::shared_ptr<lcs::model_box> m, std::shared_ptr<const lcs::plan> p, const lcs::draws & d)
        : model(std::move(m)), plan(std::move(p)), draws(d) {}
};

namespace lcs {

namespace {

void require_count(const char * what, const void * pointer, size_t n, size_t limit) {
    if (n > limit) {
        fail(LCS_STATUS_RANGE, std::string(what) + " " + std::to_string(n) + " is over " + std::to_string(limit), what,
             std::to_string(limit), std::to_string(n));
    }
    if (n > 0) {
        require(pointer, what);
    }
}

std::shared_ptr<plan> make_plan(const model_box & model, const lcs_sampler_params & p) {
    const auto n_vocab = static_cast<size_t>(model.info.n_vocab);
    require_finite("temperature", p.temperature, -1e6, 1e6);
    require_finite("dynatemp_range", p.dynatemp_range, 0, 1e6);
    require_finite("dynatemp_exponent", p.dynatemp_exponent, 0, 1e3);
    require_finite("top_p", p.top_p, 0, 1);
    require_finite("min_p", p.min_p, 0, 1);
    require_finite("typical_p", p.typical_p, 0, 1);
    require_finite("top_n_sigma", p.top_n_sigma, -1e6, 1e6);
    require_finite("xtc_probability", p.xtc_probability, 0, 1);
    require_finite("xtc_threshold", p.xtc_threshold, 0, 1);
    require_finite("penalty_repeat", p.penalty_repeat, 1e-6, 1e6);
    require_finite("penalty_freq", p.penalty_freq, -1e6, 1e6);
    require_finite("penalty_present", p.penalty_present, -1e6, 1e6);
    require_range("penalty_last_n", p.penalty_last_n, 0, MAX_LAST_N);
    require_finite("dry_multiplier", p.dry_multiplier, 0, 1e6);
    require_finite("dry_base", p.dry_base, 0, 1e6);
    require_range("dry_allowed_length", p.dry_allowed_length, 0, MAX_LAST_N);
    require_range("dry_penalty_last_n", p.dry_penalty_last_n, 0, MAX_LAST_N);
    require_range("mirostat", p.mirostat, 0, 2);
    require_finite("mirostat_tau", p.mirostat_tau, 0, 1e3);
    require_finite("mirostat_eta", p.mirostat_eta, 0, 1e3);
    require_count("dry_breakers", p.dry_breakers, p.n_dry_breakers, MAX_BREAKERS);
    require_count("logit_bias", p.logit_bias, p.n_logit_bias, static_cast<size_t>(MAX_LAST_N));
    require_count("trigger_patterns", p.trigger_patterns, p.n_trigger_patterns, MAX_TRIGGERS);
    require_count("trigger_tokens", p.trigger_tokens, p.n_trigger_tokens, n_vocab);
    for (size_t i = 0; i < p.n_dry_breakers; ++i) {
        require(p.dry_breakers[i], "dry_breakers entry");
        const size_t n_bytes = strnlen(p.dry_breakers[i], MAX_BREAKER_BYTES + 1);
        require_range("bytes of a DRY breaker", static_cast<int64_t>(n_bytes), 1, MAX_BREAKER_BYTES);
    }
    for (size_t i = 0; i < p.n_trigger_patterns; ++i) {
        require(p.trigger_patterns[i], "trigger_patterns entry");
    }
    for (size_t i = 0; i < p.n_trigger_tokens; ++i) {
        require_token(model, p.trigger_tokens[i]);
    }

    auto made_plan = std::make_shared<plan>();
    auto & out = *made_plan;
    out.greedy = p.temperature <= 0;
    // Of a value as large as the vocabulary nothing is cut.
    out.top_k = p.top_k > 0 && p.top_k < model.info.n_vocab ? p.top_k : 0;
    out.temperature = p.temperature;
    out.dynatemp_range = p.dynatemp_range;
    out.xtc_probability = p.xtc_probability;
    out.xtc_threshold = p.xtc_threshold;
    out.penalty_repeat = p.penalty_repeat;
    out.penalty_freq = p.penalty_freq;
    out.penalty_present = p.penalty_present;
    const bool penalises = p.penalty_repeat != 1 || p.penalty_freq != 0 || p.penalty_present != 0;
    out.penalty_last_n = penalises ? p.penalty_last_n : 0;
    out.dry_last_n = p.dry_multiplier > 0 && p.dry_base >= 1 ? p.dry_penalty_last_n : 0;
    out.mirostat = out.greedy ? 0 : p.mirostat;
    out.mirostat_tau = p.mirostat_tau;
    out.mirostat_eta = p.mirostat_eta;
    out.min_keep = p.min_keep;
    out.typical = p.typical_p < 1;
    if (!out.greedy) {
        out.seed = p.seed;
        while (out.seed == DRAWN_SEED) {
            out.seed = std::random_device{}();
        }
    }
    for (size_t i = 0; i < p.n_logit_bias; ++i) {
        const auto & entry = p.logit_bias[i];
        require_token(model, entry.token);
        if (!(entry.bias < std::numeric_limits<float>::infinity())) {
            fail(LCS_STATUS_ARG,
                 "the bias of token " + std::to_string(entry.token) + " is neither finite nor -infinity", "logit_bias");
        }
        out.bias.push_back(entry);
    }
    int32_t             n_suppressed = 0;
    const llama_token * suppressed = llama_vocab_get_suppress_tokens(model.vocab, &n_suppressed);
    for (int32_t i = 0; i < n_suppressed; ++i) {
        if (suppressed[i] >= 0 && suppressed[i] < model.info.n_vocab) {
            out.bias.push_back({suppressed[i], FORBIDDEN});
        }
    }
    return made_plan;
}

filters make_filters(const model_box & model, const lcs_sampler_params & p, const plan & made_plan) {
    filters out;
    if (made_plan.dry_last_n > 0) {
        fault_point();
        // llama.cpp takes the array as not const, and writes nothing.
        out.dry = made(llama_sampler_init_dry(model.vocab, p.dry_multiplier, p.dry_base, p.dry_allowed_length,
                                              made_plan.dry_last_n, const_cast<const char **>(p.dry_breakers),
                                              p.n_dry_breakers));
    }
    if (made_plan.greedy) {
        return out;
    }
    fault_point();
    if (made_plan.mirostat == 0) {
        if (p.top_n_sigma > 0) {
            out.top_n_sigma = made(llama_sampler_init_top_n_sigma(p.top_n_sigma));
        }
        if (p.typical_p < 1) {
            out.typical = made(llama_sampler_init_typical(p.typical_p, p.min_keep));
        }
        if (p.top_p < 1) {
            out.top_p = made(llama_sampler_init_top_p(p.top_p, p.min_keep));
        }
        if (p.min_p > 0) {
            out.min_p = made(llama_sampler_init_min_p(p.min_p, p.min_keep));
        }
    }
    out.temperature = made(llama_sampler_init_temp_ext(p.temperature, p.dynatemp_range, p.dynatemp_exponent));
    return out;
}

std::shared_ptr<const grammar_matcher> make_grammar(std::shared_ptr<model_box> model, const lcs_sampler_params & p) {
    require_vocab(*model);
    fault_point();
    auto rules = compile_grammar(p.grammar, p.grammar_root, model.get());
    std::shared_ptr<grammar_triggers> triggers;
    if (p.grammar_lazy) {
        triggers = std::make_shared<grammar_triggers>();
        triggers->tokens.assign(p.trigger_tokens, p.trigger_tokens + p.n_trigger_tokens);
        std::sort(triggers->tokens.begin(), triggers->tokens.end());
        for (size_t i = 0; i < p.n_trigger_patterns; ++i) {
            triggers->patterns.push_back(compile_trigger(p.trigger_patterns[i]));
        }
    }
    fault_point();
    auto matcher = std::make_shared<grammar_matcher>(std::move(rules), std::move(triggers), std::move(model));
    if (p.grammar_prefix != nullptr && *p.grammar_prefix != '\0') {
        if (p.grammar_lazy) {
            fail(LCS_STATUS_ARG, "a lazy grammar begins where it is triggered, and has no prefix", "grammar_prefix");
        }
        if (!matcher->accept_text(p.grammar_prefix)) {
            fail(LCS_STATUS_GRAMMAR, "the grammar does not begin with its prefix");
        }
    }
    return matcher;
}

[[noreturn]] void fail_nan() {
    fail(LCS_STATUS_INTERNAL, "the logits hold a NaN");
}

// One choice from one row. Reads the sampler, and changes its draws and working memory alone.
class choice {
public:
    choice(lcs_sampler & s, const float * row)
        : s_(s), plan_(*s.plan), row_(row), n_vocab_(s.model->info.n_vocab), all_(s.work.candidates) {
        touch();
    }
    choice(const choice &) = delete;
    choice & operator=(const choice &) = delete;

    // allowed: by rising id; null: every token.
    int32_t choose(const std::vector<int32_t> * allowed) {
        const auto & touched = s_.work.touched;
        if (plan_.greedy && allowed == nullptr && touched.empty()) {
            const int32_t best = argmax_unless_nan(row_, n_vocab_);
            if (best < 0) {
                fail_nan();
            }
            if (row_[best] == FORBIDDEN) {
                fail(LCS_STATUS_INTERNAL, "every token of the row is forbidden");
            }
            return best;
        }
        gather(allowed);
        if (all_.empty()) {
            fail(LCS_STATUS_INTERNAL, "every token of the row is forbidden");
        }
        if (plan_.greedy) {
            return std::min_element(all_.begin(), all_.end(), better)->id;
        }
        if (std::any_of(all_.begin(), all_.end(), [](const auto & c) { return std::isinf(c.logit); })) {
            fail(LCS_STATUS_INTERNAL, "the logits hold an infinity");
        }
        at_ = {all_.data(), all_.size(), -1, false};
        if (plan_.mirostat != 0) {
            heat();
            return plan_.mirostat == 1 ? mirostat() : mirostat_v2();
        }
        if (s_.filters.top_n_sigma != nullptr) {
            apply(s_.filters.top_n_sigma);
            drop_below(std::numeric_limits<float>::lowest());
        }
        if (plan_.top_k > 0) {
            sort_best(static_cast<size_t>(plan_.top_k));
        }
        if (plan_.typical) {
            drop_below(largest() - NEGLIGIBLE);
            apply(s_.filters.typical);
        }
        apply(s_.filters.top_p);
        apply(s_.filters.min_p);
        exclude_top();
        heat();
        return draw();
    }

    // How many of the best decide the choice; 0: all may.
    int32_t n_best() const {
        if (plan_.greedy) {
            return 1;
        }
        const bool first = plan_.mirostat == 0 && s_.filters.top_n_sigma == nullptr;
        // A heap of more than a part of the row is slower than the row itself.
        return first && plan_.top_k <= n_vocab_ / 8 ? plan_.top_k : 0;
    }

    // The n most likely tokens, the best first.
    void best(int32_t n, std::vector<int32_t> & tokens) {
        gather_best(n);
        std::sort(all_.begin(), all_.end(), better);
        tokens.resize(all_.size());
        std::transform(all_.begin(), all_.end(), tokens.begin(), [](const auto & c) { return c.id; });
    }

private:
    // Bias, penalties and DRY change few tokens: those get their new logits here, the row stays as it is.
    void touch() {
        auto & work = s_.work;
        auto & touched = work.touched;
        for (const auto & token : touched) {
            work.slot_of[static_cast<size_t>(token.id)] = 0;
        }
        touched.clear();
        const size_t n_history = s_.history.size();
        if (plan_.bias.empty() && n_history == 0) {
            return;
        }
        work.slot_of.resize(static_cast<size_t>(n_vocab_));
        const auto slot = [&](int32_t token) {
            int32_t & place = work.slot_of[static_cast<size_t>(token)];
            if (place == 0) {
                touched.push_back({token, row_[token], 0});
                place = static_cast<int32_t>(touched.size());
            }
            return static_cast<size_t>(place - 1);
        };
        for (const auto & entry : plan_.bias) {
            touched[slot(entry.token)].logit += entry.bias;
        }
        work.counts.clear();
        for (size_t i = 0; i < std::min(n_history, static_cast<size_t>(plan_.penalty_last_n)); ++i) {
            const size_t place = slot(s_.history.back(i));
            work.counts.resize(touched.size());
            ++work.counts[place];
        }
        for (size_t i = 0; i < work.counts.size(); ++i) {
            if (work.counts[i] > 0) {
                float & logit = touched[i].logit;
                // Away from likely on both sides of zero.
                logit = logit <= 0 ? logit * plan_.penalty_repeat : logit / plan_.penalty_repeat;
                logit -= static_cast<float>(work.counts[i]) * plan_.penalty_freq + plan_.penalty_present;
            }
        }
        if (s_.filters.dry != nullptr) {
            for (size_t i = 0; i < std::min(n_history, static_cast<size_t>(plan_.dry_last_n)); ++i) {
                slot(s_.history.back(i));
            }
            llama_token_data_array array{touched.data(), touched.size(), -1, false};
            llama_sampler_apply(s_.filters.dry.get(), &array);
        }
        if (std::any_of(touched.begin(), touched.end(), [](const auto & c) { return std::isnan(c.logit); })) {
            fail_nan();
        }
    }

    void add(const llama_token_data & candidate) {
        if (std::isnan(candidate.logit)) {
            fail_nan();
        }
        if (candidate.logit != FORBIDDEN) {
            all_.push_back(candidate);
        }
    }

    const llama_token_data * as_touched(int32_t token) const {
        const auto &  touched = s_.work.touched;
        const int32_t place = touched.empty() ? 0 : s_.work.slot_of[static_cast<size_t>(token)];
        return place > 0 ? &touched[static_cast<size_t>(place - 1)] : nullptr;
    }

    // Candidates: all that may be chosen, by rising id; or, where no more can matter, the best ones.
    void gather(const std::vector<int32_t> * allowed) {
        all_.clear();
        const auto add_token = [&](int32_t token) {
            const auto * changed = as_touched(token);
            add(changed != nullptr ? *changed : llama_token_data{token, row_[token], 0});
        };
        if (allowed != nullptr) {
            all_.reserve(allowed->size());
            std::for_each(allowed->begin(), allowed->end(), add_token);
        } else if (n_best() > 0) {
            gather_best(n_best());
        } else {
            all_.reserve(static_cast<size_t>(n_vocab_));
            for (int32_t token = 0; token < n_vocab_; ++token) {
                add_token(token);
            }
        }
    }

    // A heap of the best: its front is the one that a better candidate replaces.
    void gather_best(int32_t n) {
        if (has_nan(row_, n_vocab_)) {
            fail_nan();
        }
        all_.clear();
        const auto & touched = s_.work.touched;
        const auto full = [&] { return all_.size() == static_cast<size_t>(n); };
        const auto offer = [&](const llama_token_data & candidate) {
            if (full()) {
                if (!better(candidate, all_.front())) {
                    return;
                }
                std::pop_heap(all_.begin(), all_.end(), better);
                all_.pop_back();
            }
            add(candidate);
            std::push_heap(all_.begin(), all_.end(), better);
        };
        for (const auto & candidate : touched) {
            if (candidate.logit != FORBIDDEN) {
                offer(candidate);
            }
        }
        // Ids rise, so that an equal value comes too late, unless it is compared with a touched token.
        const auto threshold = [&] {
            if (!full()) {
                return FORBIDDEN;
            }
            return touched.empty() ? all_.front().logit : std::nextafter(all_.front().logit, FORBIDDEN);
        };
        for (int32_t token = next_above(row_, 0, n_vocab_, threshold()); token < n_vocab_;
             token = next_above(row_, token + 1, n_vocab_, threshold())) {
            if (as_touched(token) == nullptr) {
                offer({token, row_[token], 0});
            }
        }
    }

    void apply(const llama_sampler_ptr & filter) {
        if (filter != nullptr) {
            llama_sampler_apply(filter.get(), &at_);
        }
    }

    float largest() const {
        float found = at_.data[0].logit;
        for (size_t i = 1; i < at_.size; ++i) {
            found = std::max(found, at_.data[i].logit);
        }
        return found;
    }

    void drop_below(float limit) {
        const auto end =
            std::remove_if(at_.data, at_.data + at_.size, [limit](const auto & c) { return c.logit < limit; });
        at_.size = static_cast<size_t>(end - at_.data);
    }

    // Cuts to the n best, the best first.
    void sort_best(size_t n) {
        n = std::min(n, at_.size);
        if (!at_.sorted) {
            if (n < at_.size / 8) {
                std::partial_sort(at_.data, at_.data + n, at_.data + at_.size, better);
            } else {
                if (n < at_.size) {
                    std::nth_element(at_.data, at_.data + n, at_.data + at_.size, better);
                }
                std::sort(at_.data, at_.data + n, better);
            }
        }
        at_.size = n;
        at_.sorted = true;
    }

    // exp(logit - largest), in p; their sum.
    template <class Sum>
    Sum weigh() {
        const float most = largest();
        Sum         sum = 0;
        for (size_t i = 0; i < at_.size; ++i) {
            at_.data[i].p = std::exp(at_.data[i].logit - most);
            sum += at_.data[i].p;
        }
        return sum;
    }

    // XTC: with some probability, of the tokens at or above the threshold only the least likely stays.
    void exclude_top() {
        if (plan_.xtc_probability <= 0 || plan_.xtc_threshold > 0.5f || at_.size < 2) {
            return;
        }
        if (std::uniform_real_distribution<float>(0, 1)(s_.draws.xtc) > plan_.xtc_probability) {
            return;
        }
        const auto               sum = weigh<float>();
        size_t                   n_top = 0;
        const llama_token_data * least = nullptr;
        for (size_t i = 0; i < at_.size; ++i) {
            auto & candidate = at_.data[i];
            candidate.p /= sum;
            if (candidate.p >= plan_.xtc_threshold) {
                ++n_top;
                least = least == nullptr || better(*least, candidate) ? &candidate : least;
            }
        }
        if (n_top < 2 || at_.size - (n_top - 1) < plan_.min_keep) {
            return;
        }
        const llama_token keep = least->id;
        const auto        end = std::remove_if(at_.data, at_.data + at_.size, [&](const auto & c) {
            return c.p >= plan_.xtc_threshold && c.id != keep;
        });
        at_.size = static_cast<size_t>(end - at_.data);
    }

    void heat() {
        // Dividing by next to nothing would make infinities, of which no difference is a number.
        if (plan_.temperature - plan_.dynatemp_range < 1e-6f) {
            const float most = largest();
            for (size_t i = 0; i < at_.size; ++i) {
                at_.data[i].logit -= most;
            }
        }
        apply(s_.filters.temperature);
    }

    // One draw a choice, even from one candidate: the state is the seed and the number of choices.
    int32_t draw() {
        const double sum = weigh<double>();
        const double target = sum * std::uniform_real_distribution<double>(0, 1)(s_.draws.choice);
        double       run = 0;
        int32_t      chosen = -1;
        for (size_t i = 0; i < at_.size && (chosen < 0 || run < target); ++i) {
            run += at_.data[i].p;
            chosen = at_.data[i].p > 0 ? at_.data[i].id : chosen;
        }
        if (chosen < 0) {
            fail(LCS_STATUS_INTERNAL, "no token of " + std::to_string(at_.size) + " has a probability");
        }
        return chosen;
    }

    // From what is left, sorted; and the surprise steers mu.
    int32_t draw_steered() {
        const auto sum = weigh<float>();
        for (size_t i = 0; i < at_.size; ++i) {
            at_.data[i].p /= sum;
        }
        std::vector<double> weights(at_.size);
        std::transform(at_.data, at_.data + at_.size, weights.begin(), [](const auto & c) { return c.p; });
        const int  place = std::discrete_distribution<int>(weights.begin(), weights.end())(s_.draws.choice);
        const auto chosen = at_.data[place];
        const float surprise = -std::log2(chosen.p);
        s_.draws.mirostat_mu -= plan_.mirostat_eta * (surprise - plan_.mirostat_tau);
        return chosen.id;
    }

    // How steeply the most likely tokens fall tells how many of them keep the surprise near tau.
    int32_t mirostat() {
        const size_t n_steep = std::min<size_t>(100, at_.size);
        std::partial_sort(at_.data, at_.data + n_steep, at_.data + at_.size, better);
        float products = 0;
        float squares = 0;
        for (size_t i = 0; i + 1 < n_steep; ++i) {
            const float step = std::log(static_cast<float>(i + 2) / static_cast<float>(i + 1));
            products += step * (at_.data[i].logit - at_.data[i + 1].logit);
            squares += step * step;
        }
        const float slope = products / squares;
        const float excess = slope - 1;
        const float n = std::pow(excess * std::pow(2.0f, s_.draws.mirostat_mu) /
                                     (1 - std::pow(static_cast<float>(n_vocab_), -excess)),
                                 1 / slope);
        // Not a number for one candidate, or equal ones.
        const size_t n_keep = n >= 1 ? (n < static_cast<float>(at_.size) ? static_cast<size_t>(n) : at_.size) : 1;
        sort_best(n_keep);
        return draw_steered();
    }

    // Tokens of a surprise over mu are cut, but for the most likely one.
    int32_t mirostat_v2() {
        const double sum = weigh<double>();
        const auto   best = *std::min_element(at_.data, at_.data + at_.size, better);
        const auto   end = std::remove_if(at_.data, at_.data + at_.size, [&](const auto & c) {
            return !(-std::log2(static_cast<float>(c.p / sum)) <= s_.draws.mirostat_mu);
        });
        at_.size = static_cast<size_t>(end - at_.data);
        if (at_.size == 0) {
            at_.data[0] = best;
            at_.size = 1;
        }
        sort_best(at_.size);
        return draw_steered();
    }

    lcs_sampler &                   s_;
    const plan &                    plan_;
    const float *                   row_;
    const int32_t                   n_vocab_;
    std::vector<llama_token_data> & all_;
    llama_token_data_array          at_{}; // of all_: what is left
};

void remember(lcs_sampler & s, int32_t token) noexcept {
    s.history.push(token);
    llama_sampler_accept(s.filters.dry.get(), token);
}

// Where few tokens decide, they are mostly found among the likely ones: asking those is far cheaper than searching the
// vocabulary. Empty where too few of them are allowed.
void allowed_of_best(lcs_sampler & s, choice & from, std::vector<int32_t> & allowed) {
    allowed.clear();
    const int32_t n = from.n_best();
    if (n == 0) {
        return;
    }
    std::vector<int32_t> likely;
    from.best(std::max(n, std::min(4 * n + 252, s.model->info.n_vocab / 8)), likely);
    for (size_t i = 0; i < likely.size() && allowed.size() < static_cast<size_t>(n); ++i) {
        if (s.grammar->allows(likely[i])) {
            allowed.push_back(likely[i]);
        }
    }
    if (allowed.size() < static_cast<size_t>(n)) {
        allowed.clear();
    }
    std::sort(allowed.begin(), allowed.end());
}

int32_t choose_and_accept(lcs_sampler & s, const float * row) {
    fault_point();
    const draws before = s.draws;
    try {
        choice  from(s, row);
        int32_t token = from.choose(nullptr);
        if (s.grammar != nullptr && !s.grammar->accept(token)) {
            fault_point();
            auto & allowed = s.work.allowed;
            if (s.grammar->awaiting()) {
                // Only a token that triggers the grammar and does not fit it is refused here: others are free.
                allowed.resize(static_cast<size_t>(s.model->info.n_vocab));
                for (size_t i = 0; i < allowed.size(); ++i) {
                    allowed[i] = static_cast<int32_t>(i);
                }
                constexpr int MAX_TRIES = 256;
                for (int i = 0; i < MAX_TRIES; ++i) {
                    allowed.erase(std::lower_bound(allowed.begin(), allowed.end(), token));
                    token = from.choose(&allowed);
                    if (s.grammar->accept(token)) {
                        remember(s, token);
                        return token;
                    }
                }
                fail(LCS_STATUS_GRAMMAR, "the grammar is triggered by every likely token, and allows none of them");
            }
            allowed_of_best(s, from, allowed);
            if (allowed.empty()) {
                s.grammar->allowed(allowed);
            }
            if (allowed.empty()) {
                fail(LCS_STATUS_GRAMMAR, "the grammar allows no token");
            }
            token = from.choose(&allowed);
            if (!s.grammar->accept(token)) {
                fail(LCS_STATUS_INTERNAL, "the grammar refuses token " + std::to_string(token) + ", which it allowed");
            }
        }
        remember(s, token);
        return token;
    } catch (...) {
        s.draws = before;
        throw;
    }
}

} // namespace

} // namespace lcs

using namespace lcs;

extern "C" {

void lcs_sampler_params_init(lcs_sampler_params * params_out) {
    if (params_out == nullptr) {
        return;
    }
    *params_out = {};
    params_out->dynatemp_exponent = 1;
    params_out->top_p = 1;
    params_out->typical_p = 1;
    params_out->top_n_sigma = -1;
    params_out->xtc_threshold = 1;
    params_out->penalty_repeat = 1;
    params_out->dry_base = 1.75f;
    params_out->dry_allowed_length = 2;
    params_out->mirostat_tau = 5;
    params_out->mirostat_eta = 0.1f;
    params_out->seed = LLAMA_DEFAULT_SEED;
}

lcs_status lcs_sampler_init(lcs_model * model, const lcs_sampler_params * params, lcs_sampler ** sampler_out) {
    return guard([&] {
        require_alive(model, "model");
        require(params, "params");
        require(sampler_out, "sampler_out");
        auto box = model->box;
        fault_point();
        const auto p = make_plan(*box, *params);
        if (params->n_dry_breakers > 0) {
            require_vocab(*box);
        }
        fault_point();
        auto made_sampler = std::make_unique<lcs_sampler>(box, p, draws(*p));
        made_sampler->history.ring.resize(p->history());
        made_sampler->filters = make_filters(*box, *params, *p);
        if (params->grammar != nullptr) {
            made_sampler->grammar_begin = make_grammar(box, *params);
            made_sampler->grammar = std::make_unique<grammar_matcher>(*made_sampler->grammar_begin);
        }
        *sampler_out = made_sampler.release();
    });
}

void lcs_sampler_free(lcs_sampler * sampler) {
    free_handle(sampler);
}

lcs_status lcs_sampler_clone(lcs_sampler * sampler, lcs_sampler ** sampler_out) {
    return guard([&] {
        const entered in(sampler, "sampler");
        require(sampler_out, "sampler_out");
        fault_point();
        auto copy = std::make_unique<lcs_sampler>(sampler->model, sampler->plan, sampler->draws);
        copy->filters = sampler->filters.clone();
        copy->grammar_begin = sampler->grammar_begin;
        if (sampler->grammar != nullptr) {
            fault_point();
            copy->grammar = std::make_unique<grammar_matcher>(*sampler->grammar);
        }
        copy->history = sampler->history;
        *sampler_out = copy.release();
    });
}

lcs_status lcs_sampler_sample(lcs_sampler * sampler, lcs_context * ctx, int32_t row, int32_t * token_out) {
    return guard([&] {
        const entered in(sampler, "sampler");
        const entered in_context(ctx, "context");
        require(token_out, "token_out");
        require_range("n_vocab of the context", ctx->model->info.n_vocab, sampler->model->info.n_vocab,
                      sampler->model->info.n_vocab);
        *token_out = choose_and_accept(*sampler, logits_row(*ctx, row));
    });
}

lcs_status lcs_sampler_sample_row(lcs_sampler * sampler, const float * logits, int32_t n_vocab, int32_t * token_out) {
    return guard([&] {
        const entered in(sampler, "sampler");
        require(logits, "logits");
        require(token_out, "token_out");
        require_range("n_vocab", n_vocab, sampler->model->info.n_vocab, sampler->model->info.n_vocab);
        *token_out = choose_and_accept(*sampler, logits);
    });
}

lcs_status lcs_sampler_accept(lcs_sampler * sampler, int32_t token) {
    return guard([&] {
        const entered in(sampler, "sampler");
        require_token(*sampler->model, token);
        fault_point();
        if (sampler->grammar != nullptr && !sampler->grammar->accept(token)) {
            fail(LCS_STATUS_GRAMMAR, "the grammar does not allow token " + std::to_string(token));
        }
        remember(*sampler, token);
    });
}

lcs_status lcs_sampler_reset(lcs_sampler * sampler) {
    return guard([&] {
        const entered in(sampler, "sampler");
        fault_point();
        std::unique_ptr<grammar_matcher> grammar;
        if (sampler->grammar_begin != nullptr) {
            grammar = std::make_unique<grammar_matcher>(*sampler->grammar_begin);
        }
        sampler->grammar = std::move(grammar);
        sampler->draws = draws(*sampler->plan);
        sampler->history.n = 0;
        llama_sampler_reset(sampler->filters.dry.get());
    });
}

lcs_status lcs_sampler_save_draws(const lcs_sampler * sampler, char * buf, size_t capacity, size_t * n_out) {
    return guard([&] {
        require_alive(sampler, "sampler");
        require(n_out, "n_out");
        require_room(buf, capacity, "buf");
        fault_point();
        std::ostringstream out;
        out.imbue(std::locale::classic());
        uint32_t mu = 0;
        std::memcpy(&mu, &sampler->draws.mirostat_mu, sizeof mu);
        out << sampler->draws.choice << '\n' << sampler->draws.xtc << '\n' << mu << " end\n"; // a cut is seen
        give(out.str(), buf, capacity, n_out);
    });
}

lcs_status lcs_sampler_load_draws(lcs_sampler * sampler, const char * buf, size_t n_bytes) {
    return guard([&] {
        const entered in(sampler, "sampler");
        require_room(buf, n_bytes, "buf");
        fault_point();
        std::istringstream text(n_bytes == 0 ? std::string() : std::string(buf, n_bytes));
        text.imbue(std::locale::classic());
        draws    found(*sampler->plan);
        uint32_t mu = 0;
        std::string last;
        text >> found.choice >> found.xtc >> mu >> last;
        const bool whole = !text.fail() && last == "end" && (text >> std::ws).eof();
        std::memcpy(&found.mirostat_mu, &mu, sizeof mu);
        if (!whole || !std::isfinite(found.mirostat_mu)) {
            fail(LCS_STATUS_STATE_CORRUPT, "the saved draws of a sampler are damaged");
        }
        sampler->draws = found;
    });
}

lcs_status lcs_sampler_seed(const lcs_sampler * sampler, uint32_t * seed_out) {
    return guard([&] {
        require_alive(sampler, "sampler");
        require(seed_out, "seed_out");
        *seed_out = sampler->plan->seed;
    });
}

} // extern "C"
