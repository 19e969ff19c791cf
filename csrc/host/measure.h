// Limits of this machine, to compare kernels with.
#pragma once

#include <memory>
#include <vector>

#include "model/matrix.h"
#include "base/thread_pool.h"

namespace paceline {

// Bytes per second that all threads together read from `bytes` of memory, best of several runs.
double read_bandwidth(ThreadPool& pool, size_t bytes);

// Byte products per second of all threads together, by the dot-product instruction on registers alone.
double dot_peak(ThreadPool& pool);

// Seconds to multiply `num_tokens` rows by all matrices, one after another. [repeats]
std::vector<double> time_products(ThreadPool& pool, const std::vector<std::shared_ptr<Matrix>>& matrices, size_t num_tokens,
                                  size_t repeats);

}  // namespace paceline
