// A checksum of bytes in memory, about as fast as they are read.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>

namespace paceline {

// Eight lanes take every eighth word of 64 bits. Each step is one-to-one in its word: a single changed word always changes the sum.
inline uint64_t checksum(const uint8_t* data, size_t size) {
    constexpr uint64_t factor = 0x9E3779B97F4A7C15;
    constexpr size_t num_lanes = 8, block_bytes = num_lanes * sizeof(uint64_t);
    const auto stir = [](uint64_t sum, uint64_t word) { return std::rotl((sum ^ word) * factor, 31); };
    uint64_t lanes[num_lanes] = {1, 2, 3, 4, 5, 6, 7, 8}, words[num_lanes];
    for (size_t at = 0; at < size; at += block_bytes) {
        const size_t left = size - at, count = left < block_bytes ? left : block_bytes;
        if (count < block_bytes) std::memset(words, 0, block_bytes);
        std::memcpy(words, data + at, count);
        for (size_t i = 0; i < num_lanes; ++i) lanes[i] = stir(lanes[i], words[i]);
    }
    uint64_t sum = size;
    for (uint64_t lane : lanes) sum = stir(sum, lane);
    return sum ^ sum >> 32;
}

}  // namespace paceline
