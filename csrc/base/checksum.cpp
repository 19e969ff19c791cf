#include "base/checksum.h"

#include <algorithm>
#include <cstring>

namespace paceline {
namespace {

constexpr size_t kLanes = kSumBlock / sizeof(uint64_t);
constexpr uint64_t kFactor = 0x9E3779B97F4A7C15;  // odd, so that every step can be undone: a changed word always changes its lane

uint64_t mixed(uint64_t sum, uint64_t word) {
    sum = (sum ^ word) * kFactor;
    return sum ^ sum >> 32;
}

}  // namespace

uint64_t checksum(const uint8_t* data, size_t size) {
    uint64_t lanes[kLanes] = {1, 2, 3, 4, 5, 6, 7, 8};  // different starts, so that zeros in another place give another sum
    const auto add = [&](const uint8_t* block) {
        uint64_t words[kLanes];
        std::memcpy(words, block, sizeof words);
        for (size_t i = 0; i < kLanes; ++i) lanes[i] = mixed(lanes[i], words[i]);
    };
    const size_t whole = size / kSumBlock * kSumBlock;
    for (size_t at = 0; at < whole; at += kSumBlock) add(data + at);
    uint8_t rest[kSumBlock] = {};
    std::copy_n(data + whole, size - whole, rest);
    add(rest);
    uint64_t sum = size;
    for (uint64_t lane : lanes) sum = mixed(sum, lane);
    return sum;
}

std::vector<uint64_t> checksums(ThreadPool& pool, const uint8_t* data, size_t size, size_t piece) {
    std::vector<uint64_t> sums((size + piece - 1) / piece);
    pool.run([&](size_t) {
        pool.each(sums.size(), [&](size_t i) { sums[i] = checksum(data + i * piece, std::min(piece, size - i * piece)); });
    });
    return sums;
}

}  // namespace paceline
