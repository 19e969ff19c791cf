// Blocks in which model files store weights, and their numbers in float32. Every operation is rounded by itself, as the formats'
// definitions are written, so that a weight is the same number whoever unpacks it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

namespace paceline {

struct BlockFormat {
    std::string_view name;  // as GGUF has it
    size_t count;           // weights in a block
    size_t bytes;
    void (*unpack)(const uint8_t* block, float* to);  // to: [count]

    size_t row_bytes(size_t width) const { return width / count * bytes; }
    void unpack_row(const uint8_t* from, size_t width, float* to) const {
        for (size_t i = 0; i < width; i += count, from += bytes) unpack(from, to + i);
    }
};

// The format of a name, null if there is none.
const BlockFormat* block_format(std::string_view name);
std::span<const BlockFormat> block_formats();

}  // namespace paceline
