// The limits of an instruction set: memory read, and byte products from registers.
#include "dot.h"
#include "kernels.h"
#if defined(__AMX_INT8__)
#include "tiles.h"
#endif

namespace paceline::PACELINE_ISA {
namespace {

uint64_t read(const uint8_t* p, size_t bytes) {
    i32v sums[4] = {};
    constexpr size_t step = 4 * sizeof(i32v);
    for (size_t i = 0; i + step <= bytes; i += step) {
        for (size_t v = 0; v < 4; ++v) sums[v] += load_bytes(p + i + v * sizeof(i32v));
        for (size_t line = 0; line < step; line += 64) __builtin_prefetch(p + i + kSoon + line, 0, 2);  // without it a third less is read
    }
    const i32v all = sums[0] + sums[1] + sums[2] + sums[3];
    return (uint64_t)(uint32_t)all[0];
}

#if defined(__AMX_INT8__)

size_t dot_products(size_t rounds) {
    load_shapes(kTile);
    for (size_t i = 0; i < rounds; ++i) {
        _tile_dpbsud(PACELINE_SUMS, PACELINE_ROWS, PACELINE_WEIGHTS);
        _tile_dpbsud(PACELINE_MORE_SUMS, PACELINE_MORE_ROWS, PACELINE_WEIGHTS);
        _tile_dpbsud(PACELINE_OTHER_SUMS, PACELINE_ROWS, PACELINE_OTHER_WEIGHTS);
        _tile_dpbsud(PACELINE_MORE_OTHER_SUMS, PACELINE_MORE_ROWS, PACELINE_OTHER_WEIGHTS);
    }
    _tile_release();
    return rounds * 4 * kTile * kTile * kInt8Group;
}

#else

// More sums than both units have stages, as fewer would wait for each other. Single variables, as an array would lie in memory.
size_t dot_products(size_t rounds) {
    const i32v w = splat(0x01020304), a = splat(0x04030201);
    i32v s0 = w, s1 = w, s2 = w, s3 = w, s4 = w, s5 = w, s6 = w, s7 = w, s8 = w, s9 = w, s10 = w, s11 = w;
    for (size_t i = 0; i < rounds; ++i) {
        dot(s0, w, a), dot(s1, w, a), dot(s2, w, a), dot(s3, w, a), dot(s4, w, a), dot(s5, w, a);
        dot(s6, w, a), dot(s7, w, a), dot(s8, w, a), dot(s9, w, a), dot(s10, w, a), dot(s11, w, a);
    }
    const i32v all = s0 + s1 + s2 + s3 + s4 + s5 + s6 + s7 + s8 + s9 + s10 + s11;
    __asm__ volatile("" : : "m"(all));
    return rounds * 12 * kLanes * 4;
}

#endif

}  // namespace

extern const LimitKernels limit_kernels;
const LimitKernels limit_kernels = {read, dot_products};

}  // namespace paceline::PACELINE_ISA
