// What this machine can do at most: the floor that kernels are compared with.
#pragma once

#include <cstddef>
#include <memory>
#include <vector>

#include "model/matrix.h"
#include "base/thread_pool.h"

namespace paceline {

// Bytes per second of all threads together, reading `bytes` of memory again and again: best of several times.
double read_bandwidth(ThreadPool& pool, size_t bytes);

// Products of bytes per second of all threads together, by the dot-product instruction from registers alone.
double dot_peak(ThreadPool& pool);

// Seconds to multiply `num_tokens` rows by each matrix in turn, one pass over all of them: [repeats]
std::vector<double> time_products(ThreadPool& pool, const std::vector<std::shared_ptr<Matrix>>& matrices, size_t num_tokens,
                                  size_t repeats);

}  // namespace paceline
