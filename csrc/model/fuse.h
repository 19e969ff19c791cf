// The features that draft heads read: a token's hidden states after several layers, normed, times one matrix.
#pragma once

#include "model/matrix.h"
#include "base/thread_pool.h"

namespace paceline {

struct Fusing {
    const Matrix* fc;    // [features, num_taps * hidden]
    const float* norms;  // [num_norms, num_taps * hidden / num_norms], each for its part of the states
    size_t num_norms;    // 0: nothing is normed
    float eps;
};

// Compute features [count, fc out] of tokens with states [count, fc in].
void fuse(ThreadPool& pool, const Fusing& fusing, const float* states, size_t count, float* features);

}  // namespace paceline
