// Rows of a GGUF file in blocks, put into panels without a change of any value.
#pragma once

#include "isa/blocks.h"

namespace paceline {

// A superblock of one row in any file's form. Groups of 16 have 16 scales, groups of 32 have 8.
struct FileBlock {
    uint8_t values[kSuper];  // values plus the form's offset; 4-bit codes are kept as codes
    int8_t scales[16];
    uint16_t float_scales[8];  // in 16 bits, as the form has them
    uint8_t minima[8];
    uint16_t scale, minimum_scale;  // float16
};

// Bytes of `width` inputs of a row in the file; width: a multiple of `file_block`.
size_t file_row_bytes(size_t form, size_t width);
size_t file_block(size_t form);  // inputs: 32 or 256

// Write row `lane` of a panel. row: as the file has it.
void put_file_row(size_t form, const uint8_t* row, size_t width, uint8_t* panel, size_t lane);
// Read row `lane` of a panel as float32 [width].
void read_block_row(size_t form, const uint8_t* panel, size_t lane, size_t width, float* to);

}  // namespace paceline
