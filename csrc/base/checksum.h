// Checksums that notice a damaged file as fast as memory is read. They do not protect against a forged file.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "base/thread_pool.h"

namespace paceline {

constexpr size_t kSumBlock = 64;  // bytes

uint64_t checksum(const uint8_t* data, size_t size);

// A sum for each `piece` bytes, a multiple of `kSumBlock`; the last piece may be shorter.
std::vector<uint64_t> checksums(ThreadPool& pool, const uint8_t* data, size_t size, size_t piece);

}  // namespace paceline
