// Passes over a row of logits: one load of each value, as many lanes as the CPU has.
#pragma once

#include <cstdint>

namespace lcs {

// First of the largest, NaNs left out; -1: no value, or NaNs alone.
int32_t argmax(const float * values, int32_t n);

// The same where a NaN makes the row invalid: -1 for a single one.
int32_t argmax_unless_nan(const float * values, int32_t n);

bool has_nan(const float * values, int32_t n);

// First index at or after from whose value is above the threshold; n where there is none.
int32_t next_above(const float * values, int32_t from, int32_t n, float threshold);

} // namespace lcs
