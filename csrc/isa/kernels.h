// What is compiled once per instruction set. Each .cpp in this folder is built several times, with PACELINE_ISA
// naming the namespace; `kernels()` returns the best table that this machine can run.
//
// Functions here must not call templates or inline functions of the standard library that could be left as symbols:
// the linker would keep one copy for all, perhaps that of an instruction set the machine lacks.
#pragma once

#include <cstddef>
#include <cstdint>

namespace paceline {

constexpr size_t round_up(size_t n, size_t multiple) { return (n + multiple - 1) / multiple * multiple; }

constexpr size_t kBlock = 64;       // numbers per block of a padded vocabulary row
constexpr size_t kPanel = 32;       // outputs of a matrix that are packed and computed together
constexpr size_t kTileLanes = 16;   // sums side by side in a tile
constexpr size_t kInt8Group = 64;   // to whose multiples rows beside spread weights are padded: what one tile takes in
constexpr size_t hadamard_block(size_t width) { return width & (~width + 1); }  // the largest power of two that divides it
constexpr size_t kInt4Group = 32;   // inputs that share an activation scale beside int4 weights, whose blocks are as long
constexpr size_t kInt4BlockBytes = kPanel * 4 + kPanel * kInt4Group / 2;  // of a panel, scales and minima included
constexpr size_t kPageTokens = 16;  // KV slots of one page, as core/nouns.py
constexpr size_t kKeysAtOnce = 64;  // keys of a span whose values a kernel sums up at once
constexpr size_t kSpan = 256;       // keys whose softmax is taken at once; spans start at multiples of it

// Passes over a row of float32 scores. `blocks` counts blocks of 64; the row is padded to whole blocks with -inf.
struct VocabularyKernels {
    // z = x * inverse, maxima[b] = the largest of block b; NaN is skipped.
    void (*scale)(const float* x, size_t blocks, float inverse, float* z, float* maxima);
    // The largest of n numbers, n a multiple of 16; NaN is skipped.
    float (*maximum)(const float* z, size_t n);
    // The sum of exp(z - top).
    double (*mass)(const float* z, size_t blocks, float top);
    // bounds[i] = a number no less than z[i] + gumbel(key, first_id + i), maxima[b] the largest of block b.
    void (*bound)(const float* z, size_t blocks, uint32_t k0, uint32_t k1, uint32_t first_id, float* bounds,
                  float* maxima);
    // The same where the token ids are `ids`, one for each number.
    void (*bound_ids)(const float* z, size_t blocks, uint32_t k0, uint32_t k1, const uint32_t* ids, float* bounds,
                      float* maxima);
};

// Activations of some token rows as a matrix product reads them, `width` numbers a row.
struct FloatRows {
    const float* values;
    size_t width;
};

// In 8 bits, a scale for each group of inputs: beside int4 weights.
struct QuantisedRows {
    const int8_t* values;
    size_t width, num_groups;
    const float* scales;  // [num_rows, num_groups]
    const int32_t* sums;  // [num_rows, num_groups] sum of the values
};

// In 8 bits, spread by `hadamard` and with one scale a row: beside weights of int8 and int4_row, which are spread alike. All
// products of a row and an output are then summed up exactly, in whole numbers, and scaled once.
struct SpreadRows {
    const int8_t* values;  // [num_rows, width]
    size_t width;          // a multiple of 64
    const float* scales;   // [num_rows]
    const int32_t* sums;   // [num_rows, 16] sum of the values, times -128, as weights are kept plus 128: 16 times, for tiles
};
constexpr size_t kMaxInputs = size_t{1} << 16;  // of a row, for 32 bits to hold every sum

struct SpreadPanel {
    const uint8_t* weights;
    const float* scales;  // [32]; of int4_row half of what its steps are worth
};

// How far ahead kernels fetch weights: how long memory takes under load. With 2048 bytes five rows took a tenth longer.
constexpr size_t kSoon = 6144;

// Whether what a pass reads once is fetched past the larger caches, by the processor's non-temporal hint, rather than into the
// second level. A Zen 5 gains up to an eighth by it; a Zen 4 loses as much, since its first level waits for fewer lines at once.
extern const bool kFetchesPastCaches;

// out[(row - first) * stride + o] for rows first..end and the 32 outputs of one panel, or of panels side by side.
struct GemmKernels {
    using Spread = void (*)(const SpreadPanel& panel, size_t num_panels, const SpreadRows& rows, size_t first, size_t end, float* out,
                            size_t stride);
    Spread int8, int4_row;
    void (*int4)(const uint8_t* panel, const QuantisedRows& rows, size_t first, size_t end, float* out, size_t stride);
    void (*f32)(const float* panel, const FloatRows& rows, size_t first, size_t end, float* out, size_t stride);
    void (*bf16)(const uint16_t* panel, const FloatRows& rows, size_t first, size_t end, float* out, size_t stride);
    void (*leave)();  // lets go of what products hold in a thread; a team calls it at the end of each run
};

struct LayerKernels {
    void (*rms_norm)(const float* x, const float* weight, size_t n, float eps, float* out);
    void (*add)(float* x, const float* y, size_t n);
    void (*scale)(const float* x, size_t n, float factor, float* out);
    void (*quantise)(const float* x, size_t width, size_t group, int8_t* q, float* scales, int32_t* sums);
    // The Walsh-Hadamard transform of each `hadamard_block` of x, not scaled: twice is once times the block's length.
    // The width is a multiple of 64.
    void (*hadamard)(const float* x, size_t width, float* out);
    void (*rotate)(const float* x, const float* cosines, const float* sines, size_t n, float scale, float* out);
    void (*silu_mul)(float* gate, const float* up, size_t n);
    void (*gelu_mul)(float* gate, const float* up, size_t n);
    void (*to_halves)(const float* x, size_t n, uint16_t* out);
    void (*from_halves)(const uint16_t* x, size_t n, float* out);
};

// Floats from one query to the next: known beforehand, as a kernel has no registers for the addresses of twelve, and no
// multiple of the distance at which a cache confuses them.
constexpr size_t kQueryStride = 272;
constexpr size_t query_stride(size_t head_dim) { return head_dim <= 256 ? kQueryStride : head_dim; }

// Some queries of one row and KV head, and the keys start..end of that row, all in one span.
struct AttentionSpan {
    const void *keys, *values;  // of one layer
    const int64_t* pages;       // [num_pages] of the row
    size_t num_pages;
    size_t num_kv_heads, kv_head, head_dim;
    size_t num_queries, start, end;
    const float* queries;   // [num_queries, query_stride(head_dim)], as `prepare` left them
    const float* query_units;  // [num_queries] of `prepare`
    const int64_t* starts;  // [num_queries] the first of the row's keys that each one sees
    const int64_t* limits;  // [num_queries] and the one behind the last
    float* scores;          // [num_queries, kSpan] scratch
    float* units;           // [num_queries] scratch
    float *tops, *totals;   // [num_queries] largest score, and sum of exp(score - largest)
    float* mixed;           // [num_queries, head_dim] sum of exp(score - largest) * value
};

struct KVKernels {
    // Bring queries [num_queries, query_stride(head_dim)], scaled, into the form that `attend` reads.
    void (*prepare)(float* queries, size_t num_queries, size_t head_dim, float* units);
    void (*attend)(const AttentionSpan& span);
    // One token's key and value [size] of one head, to where the head's page of keys and values begins.
    void (*write)(void* keys, void* values, size_t offset, size_t head_dim, size_t size, const float* key,
                  const float* value);
    size_t (*page_bytes)(size_t head_dim);  // of one head's keys or values in one page
};

struct AttentionKernels {
    KVKernels f32, f16;
    const KVKernels *i16, *i8;
    void (*merge)(float top, float total, const float* mixed, size_t head_dim, float* top_so_far, float* total_so_far,
                  float* mixed_so_far);
};

// For measuring what the machine can do.
struct LimitKernels {
    uint64_t (*read)(const uint8_t* p, size_t bytes);
    size_t (*dot)(size_t rounds);  // returns how many products of bytes it made
};

struct Kernels {
    const char* name;
    VocabularyKernels vocabulary;
    GemmKernels gemm;
    LayerKernels layer;
    AttentionKernels attention;
    LimitKernels limits;
};

// The table for this machine, chosen once; the environment variable PACELINE_ISA names a lesser one.
const Kernels& kernels();

}  // namespace paceline
