// What is compiled once per instruction set. Each .cpp in this folder is built several times, with PACELINE_ISA
// naming the namespace; `kernels()` returns the best table that this machine can run.
//
// Functions here must not call templates or inline functions of the standard library that could be left as symbols:
// the linker would keep one copy for all, perhaps that of an instruction set the machine lacks.
#pragma once

#include <cstddef>
#include <cstdint>

namespace paceline {

constexpr size_t kBlock = 64;  // numbers per block of a padded vocabulary row

// Passes over a row of float32 scores. `blocks` counts blocks of 64; the row is padded to whole blocks with -inf.
struct VocabularyKernels {
    // z = x * inverse.
    void (*scale)(const float* x, size_t blocks, float inverse, float* z);
    // maxima[b] = the largest of block b; NaN is skipped. Returns the largest of all.
    float (*maxima)(const float* z, size_t blocks, float* maxima);
    // weights = exp(z - top). Returns their sum.
    double (*weigh)(const float* z, size_t blocks, float top, float* weights);
    // bounds[i] = a number no less than z[i] + gumbel(key, first_id + i), maxima[b] the largest of block b.
    void (*bound)(const float* z, size_t blocks, uint32_t k0, uint32_t k1, float* bounds, float* maxima);
};

struct Kernels {
    const char* name;
    VocabularyKernels vocabulary;
};

// The table for this machine, chosen once; the environment variable PACELINE_ISA names a lesser one.
const Kernels& kernels();

}  // namespace paceline
