// Passes over a row of logits. The library is compiled for the oldest CPU it may meet: lanes are chosen at run time.
#include "lcs_row.hpp"

#include "lcs.h"

#include <cmath>
#include <cstring>
#include <limits>

namespace lcs {

namespace {

constexpr float LOWEST = -std::numeric_limits<float>::infinity();

#if defined(__GNUC__)

#    define LCS_INLINE inline __attribute__((always_inline))

template <int N_BYTES>
struct vector_of {
    typedef float type __attribute__((vector_size(N_BYTES)));
};

constexpr int     N_STRIPES = 4; // independent chains, to hide the latency of a maximum
constexpr int32_t N_BLOCK = 1024; // the winner is looked up in one block afterwards

// Vectors stay out of signatures: their calling convention depends on the target.
template <int N_BYTES>
struct stripes {
    using vector = typename vector_of<N_BYTES>::type;
    static constexpr int32_t N_LANES = N_BYTES / static_cast<int32_t>(sizeof(float));
    static constexpr int32_t N_GROUP = N_LANES * N_STRIPES;

    vector most[N_STRIPES];
    vector sum[N_STRIPES];

    LCS_INLINE void clear_most() {
        for (auto & each : most) {
            each = vector{} + LOWEST;
        }
    }

    LCS_INLINE void clear_sum() {
        for (auto & each : sum) {
            each = vector{};
        }
    }

    // A NaN loses: the comparison is false.
    LCS_INLINE void raise(const float * values) {
        for (int i = 0; i < N_STRIPES; ++i) {
            vector x;
            std::memcpy(&x, values + i * N_LANES, sizeof x);
            most[i] = x > most[i] ? x : most[i];
        }
    }

    LCS_INLINE void raise_and_add(const float * values) {
        for (int i = 0; i < N_STRIPES; ++i) {
            vector x;
            std::memcpy(&x, values + i * N_LANES, sizeof x);
            most[i] = x > most[i] ? x : most[i];
            sum[i] += x;
        }
    }

    LCS_INLINE void add(const float * values) {
        for (int i = 0; i < N_STRIPES; ++i) {
            vector x;
            std::memcpy(&x, values + i * N_LANES, sizeof x);
            sum[i] += x;
        }
    }

    LCS_INLINE float largest() const {
        vector all = most[0];
        for (int i = 1; i < N_STRIPES; ++i) {
            all = most[i] > all ? most[i] : all;
        }
        float each[N_LANES];
        std::memcpy(each, &all, sizeof each);
        float found = LOWEST;
        for (const float value : each) {
            found = value > found ? value : found;
        }
        return found;
    }

    LCS_INLINE float total() const {
        const vector all = (sum[0] + sum[1]) + (sum[2] + sum[3]);
        float        each[N_LANES];
        std::memcpy(each, &all, sizeof each);
        float found = 0;
        for (const float value : each) {
            found += value;
        }
        return found;
    }
};

struct scan {
    int32_t index;
    float   total; // NaN if a value is; also if both infinities are there
};

template <int N_BYTES, bool WITH_SUM>
LCS_INLINE scan scan_row(const float * values, int32_t n) {
    using lanes = stripes<N_BYTES>;
    float   best = LOWEST;
    int32_t best_begin = -1;
    int32_t best_end = 0;
    int32_t at = 0;
    lanes   s;
    s.clear_sum();
    while (n - at >= lanes::N_GROUP) {
        const int32_t begin = at;
        const int32_t end = n - at >= N_BLOCK ? at + N_BLOCK : at + (n - at) / lanes::N_GROUP * lanes::N_GROUP;
        s.clear_most();
        for (; at < end; at += lanes::N_GROUP) {
            if (WITH_SUM) {
                s.raise_and_add(values + at);
            } else {
                s.raise(values + at);
            }
        }
        const float block_best = s.largest();
        if (block_best > best) {
            best = block_best;
            best_begin = begin;
            best_end = end;
        }
    }
    float total = WITH_SUM ? s.total() : 0;
    for (; at < n; ++at) {
        total += WITH_SUM ? values[at] : 0;
        if (values[at] > best) {
            best = values[at];
            best_begin = at;
            best_end = at + 1;
        }
    }
    // Nothing above minus infinity: the first that is no NaN is as large as any.
    if (best_begin < 0) {
        best_begin = 0;
        best_end = n;
    }
    for (int32_t i = best_begin; i < best_end; ++i) {
        if (values[i] == best) {
            return {i, total};
        }
    }
    return {-1, total};
}

template <int N_BYTES>
LCS_INLINE float sum_row(const float * values, int32_t n) {
    using lanes = stripes<N_BYTES>;
    int32_t at = 0;
    lanes   s;
    s.clear_sum();
    for (; n - at >= lanes::N_GROUP; at += lanes::N_GROUP) {
        s.add(values + at);
    }
    float total = s.total();
    for (; at < n; ++at) {
        total += values[at];
    }
    return total;
}

template <int N_BYTES>
LCS_INLINE int32_t find_above(const float * values, int32_t from, int32_t n, float threshold) {
    using lanes = stripes<N_BYTES>;
    lanes s;
    s.clear_most();
    for (; n - from >= lanes::N_GROUP; from += lanes::N_GROUP) {
        s.raise(values + from);
        if (s.largest() > threshold) {
            break;
        }
    }
    while (from < n && !(values[from] > threshold)) {
        ++from;
    }
    return from;
}

struct kernels {
    scan    (*row)(const float *, int32_t);
    scan    (*row_with_sum)(const float *, int32_t);
    float   (*sum)(const float *, int32_t);
    int32_t (*above)(const float *, int32_t, int32_t, float);
};

#    define LCS_KERNELS(name, n_bytes, ...)                                                                      \
        __VA_ARGS__ scan row_##name(const float * values, int32_t n) { return scan_row<n_bytes, false>(values, n); } \
        __VA_ARGS__ scan row_with_sum_##name(const float * values, int32_t n) {                                  \
            return scan_row<n_bytes, true>(values, n);                                                           \
        }                                                                                                        \
        __VA_ARGS__ float sum_##name(const float * values, int32_t n) { return sum_row<n_bytes>(values, n); }    \
        __VA_ARGS__ int32_t above_##name(const float * values, int32_t from, int32_t n, float threshold) {       \
            return find_above<n_bytes>(values, from, n, threshold);                                              \
        }                                                                                                        \
        constexpr kernels KERNELS_##name{row_##name, row_with_sum_##name, sum_##name, above_##name};

LCS_KERNELS(portable, 16, )

#    if defined(__x86_64__)
LCS_KERNELS(avx2, 32, __attribute__((target("avx2"))))
LCS_KERNELS(avx512, 64, __attribute__((target("avx512f,avx512dq,avx512bw,avx512vl"))))

kernels choose_kernels() {
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512vl")) {
        return KERNELS_avx512;
    }
    return __builtin_cpu_supports("avx2") ? KERNELS_avx2 : KERNELS_portable;
}
#    else
kernels choose_kernels() {
    return KERNELS_portable;
}
#    endif

const kernels & chosen() {
    static const kernels k = choose_kernels();
    return k;
}

#else // a compiler without vector types

struct scan {
    int32_t index;
    float   total;
};

struct kernels {
    static scan row(const float * values, int32_t n) {
        scan found{-1, 0};
        for (int32_t i = 0; i < n; ++i) {
            found.total += values[i];
            if (!std::isnan(values[i]) && (found.index < 0 || values[i] > values[found.index])) {
                found.index = i;
            }
        }
        return found;
    }
    static scan  row_with_sum(const float * values, int32_t n) { return row(values, n); }
    static float sum(const float * values, int32_t n) { return row(values, n).total; }
    static int32_t above(const float * values, int32_t from, int32_t n, float threshold) {
        while (from < n && !(values[from] > threshold)) {
            ++from;
        }
        return from;
    }
};

const kernels & chosen() {
    static const kernels k;
    return k;
}

#endif

// A sum is NaN for both infinities too.
bool confirm_nan(float total, const float * values, int32_t n) {
    if (!std::isnan(total)) {
        return false;
    }
    for (int32_t i = 0; i < n; ++i) {
        if (std::isnan(values[i])) {
            return true;
        }
    }
    return false;
}

} // namespace

int32_t argmax(const float * values, int32_t n) {
    return chosen().row(values, n).index;
}

int32_t argmax_unless_nan(const float * values, int32_t n) {
    const scan found = chosen().row_with_sum(values, n);
    return confirm_nan(found.total, values, n) ? -1 : found.index;
}

bool has_nan(const float * values, int32_t n) {
    return confirm_nan(chosen().sum(values, n), values, n);
}

int32_t next_above(const float * values, int32_t from, int32_t n, float threshold) {
    return chosen().above(values, from, n, threshold);
}

} // namespace lcs

extern "C" int32_t lcs_argmax(const float * values, int32_t n) {
    return values == nullptr || n <= 0 ? -1 : lcs::argmax(values, n);
}
