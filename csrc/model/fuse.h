// The features that draft heads read: hidden states of a token after several layers, normed, times one matrix.
#pragma once

#include <cstddef>

#include "model/matrix.h"
#include "base/thread_pool.h"

namespace paceline {

struct Fusing {
    const Matrix* fc;    // [features, num_taps * hidden]
    const float* norms;  // [num_norms, num_taps * hidden / num_norms], each over its part of the states
    size_t num_norms;    // 0: none is normed
    float eps;
};

// features[i] [fc out] = that of a token with the states[i] [fc in].
void fuse(ThreadPool& pool, const Fusing& fusing, const float* states, size_t count, float* features);

}  // namespace paceline
