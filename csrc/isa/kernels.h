// Kernels, compiled once per instruction set: each .cpp in this folder is built several times, with PACELINE_ISA as its namespace.
// `kernels()` returns the best table that this machine can run. Functions here must not call templates or inline functions of the
// standard library that may become symbols: the linker keeps one copy for all, perhaps one for instructions that the machine lacks.
#pragma once

#include <cstddef>
#include <cstdint>

namespace paceline {

constexpr size_t round_up(size_t n, size_t multiple) { return (n + multiple - 1) / multiple * multiple; }

constexpr size_t kBlock = 64;       // numbers per block of a padded vocabulary row
constexpr size_t kPanel = 32;       // outputs of a matrix that are packed and computed together
constexpr size_t kTileLanes = 16;   // sums side by side in a tile
constexpr size_t kInt8Group = 64;   // inputs of one tile; rows that are multiplied with spread weights are padded to a multiple
constexpr size_t hadamard_block(size_t width) { return width & (~width + 1); }  // the largest power of two that divides it
constexpr size_t kInt4Group = 32;   // inputs of a block of int4 weights, which share an activation scale
constexpr size_t kInt4BlockBytes = kPanel * 4 + kPanel * kInt4Group / 2;  // of a block of a panel, with scales and minima
constexpr size_t kPageTokens = 16;  // KV slots of one page, as in core/nouns.py
constexpr size_t kKeysAtOnce = 64;  // keys whose values a kernel sums up at once
constexpr size_t kSpan = 256;       // keys that share a softmax pass; spans start at its multiples

// Passes over a row of float32 scores. `blocks` counts blocks of 64; the row is padded to whole blocks with -inf.
struct VocabularyKernels {
    // z = x * inverse, maxima[b] = the largest of block b; NaN is skipped.
    void (*scale)(const float* x, size_t blocks, float inverse, float* z, float* maxima);
    // The largest of n numbers, n a multiple of 16; NaN is skipped.
    float (*maximum)(const float* z, size_t n);
    // The sum of exp(z - top).
    double (*mass)(const float* z, size_t blocks, float top);
    // bounds[i] = an upper bound of z[i] + gumbel(key, first_id + i), maxima[b] = the largest of block b.
    void (*bound)(const float* z, size_t blocks, uint32_t k0, uint32_t k1, uint32_t first_id, float* bounds, float* maxima);
    // The same for token ids `ids` [blocks * 64].
    void (*bound_ids)(const float* z, size_t blocks, uint32_t k0, uint32_t k1, const uint32_t* ids, float* bounds, float* maxima);
};

// Activations of some token rows as a matrix product reads them. [num_rows, width]
struct FloatRows {
    const float* values;
    size_t width;
};

// Activations as int8 with a scale for each group of 32 inputs, for int4 weights.
struct QuantisedRows {
    const int8_t* values;
    size_t width, num_groups;
    const float* scales;  // [num_rows, num_groups]
    const int32_t* sums;  // [num_rows, num_groups] sum of the values
};

// Activations as int8, spread by `hadamard`, with one scale per row, for int8 and int4_row weights, spread alike. The products of a row and
// an output are then summed up exactly, as integers, and scaled once.
struct SpreadRows {
    const int8_t* values;  // [num_rows, width]
    size_t width;          // a multiple of 64
    const float* scales;   // [num_rows]
    const int32_t* sums;   // [num_rows, 16] -128 times the sum of the values, as weights are stored plus 128; 16 copies, for tiles
};
constexpr size_t kMaxInputs = size_t{1} << 16;  // most inputs of a row, so that every sum fits 32 bits

struct SpreadPanel {
    const uint8_t* weights;
    const float* scales;  // [32]; of int4_row: half of its step
};

// Bytes that kernels prefetch ahead, to hide the latency of loaded memory.
constexpr size_t kSoon = 6144;

// True if data that a pass reads once is prefetched past the larger caches, by the non-temporal hint, instead of into L2. A Zen 5 gains
// up to an eighth by it; a Zen 4 loses as much, as its L1 waits for fewer lines at once.
extern const bool kFetchesPastCaches;

// How one piece of rows prefetches weights, by its number of rows. The best differs between machines, even of the same
// processor, so the target's is measured at the first start.
struct Prefetching {
    size_t bytes = kSoon;  // bytes to prefetch ahead; 0: none, where the processor's own prefetching is better
    bool past = kFetchesPastCaches;
};
constexpr size_t kMostInPiece = 12;
extern Prefetching prefetching[kMostInPiece + 1];

// Keys and values that the next layer's attention reads, by page. Pages lie scattered, so attention waits for memory, while products of
// many rows leave it idle: they prefetch a thread's share of these pages beside their weights.
struct PagesAhead {
    const uint8_t *keys = nullptr, *values = nullptr;  // of page 0
    const int64_t *next = nullptr, *end = nullptr;     // page ids
    size_t bytes = 0;                                  // of a page's keys, and of its values
};
extern constinit thread_local PagesAhead pages_ahead;

// out[(row - first) * stride + o] for rows first..end and the 32 outputs of one panel, or of adjacent panels.
struct GemmKernels {
    using Spread = void (*)(const SpreadPanel& panel, size_t num_panels, const SpreadRows& rows, size_t first, size_t end, float* out,
                            size_t stride);
    Spread int8, int4_row;
    void (*int4)(const uint8_t* panel, const QuantisedRows& rows, size_t first, size_t end, float* out, size_t stride);
    void (*f32)(const float* panel, const FloatRows& rows, size_t first, size_t end, float* out, size_t stride);
    void (*bf16)(const uint16_t* panel, const FloatRows& rows, size_t first, size_t end, float* out, size_t stride);
    void (*leave)();  // releases tile registers of this thread; the thread pool calls it at the end of each run
};

// Facts of a stretch, 32 inputs of activations. An activation is its byte times 2**exponent times the unit of its superblock.
struct StretchFacts {
    int32_t exponent;
    int32_t exponent_pair;  // the exponent as a word of 16 bits, and above it the next stretch's
    int32_t start;          // -32 times the sum of the bytes
    int32_t starts[2];      // the same for the first and the last 16
};

// Facts of a superblock, 256 inputs.
struct SuperFacts {
    StretchFacts stretches[8];
    float unit;
    int32_t sums_shift;
    int8_t sums[16];  // of stretches, shifted left by the exponent, right by `sums_shift`: their 128ths [8], then the rests [8]
};

// Int8 activations, for weights in a file's blocks (blocks.h).
struct BlockRows {
    const int8_t* values;  // [num_rows, num_supers * 256]
    size_t num_supers, num_stretches;
    const SuperFacts* facts;  // [num_rows, num_supers]
};
constexpr size_t kNumBlockForms = 9;

struct BlockKernels {
    // By form, as `GemmKernels` for one panel.
    void (*multiply[kNumBlockForms])(const uint8_t* panel, const BlockRows& rows, size_t first, size_t end, float* out, size_t stride);
    // Make one row of `BlockRows`; width: a multiple of 64. Values behind the width stay.
    void (*quantise)(const float* x, size_t width, int8_t* values, SuperFacts* facts);
};

struct LayerKernels {
    void (*rms_norm)(const float* x, const float* weight, size_t n, float eps, float* out);
    void (*add)(float* x, const float* y, size_t n);
    void (*scale)(const float* x, size_t n, float factor, float* out);
    void (*quantise)(const float* x, size_t width, size_t group, int8_t* q, float* scales, int32_t* sums);
    void (*to_int4)(const float* x, size_t n, float step, int8_t* q, double* products, int32_t* squares);
    // The Walsh-Hadamard transform of each `hadamard_block` of x, unscaled: applied twice it multiplies by the block's length.
    // width: a multiple of 64.
    void (*hadamard)(const float* x, size_t width, float* out);
    void (*rotate)(const float* x, const float* cosines, const float* sines, size_t n, float scale, float* out);
    void (*silu_mul)(float* gate, const float* up, size_t n);
    void (*gelu_mul)(float* gate, const float* up, size_t n);
    void (*clamped_mul)(float* gate, const float* up, size_t n);
    void (*cap)(float* x, size_t n, float cap);  // x = cap * tanh(x / cap); n is a multiple of 16
    void (*to_halves)(const float* x, size_t n, uint16_t* out);
    void (*from_halves)(const uint16_t* x, size_t n, float* out);
};

// Floats between queries. It is a constant, as a kernel has no registers for twelve addresses. It is no power of two, as queries
// would then compete for the same cache lines.
constexpr size_t kQueryStride = 272;
constexpr size_t query_stride(size_t head_dim) { return head_dim <= 256 ? kQueryStride : head_dim; }

// Some queries of one row and KV head, and the keys start..end of the row, which lie in one span.
struct AttentionSpan {
    const void *keys, *values;  // of one layer
    const int64_t* pages;       // [num_pages] of the row
    size_t num_pages;
    size_t heads_per_page, kv_head, head_dim;  // heads_per_page: heads from a page's begin to the next page's
    size_t num_queries, start, end;
    const float* queries;   // [num_queries, query_stride(head_dim)], as `prepare` left them
    const float* query_units;  // [num_queries] of `prepare`
    const int64_t* starts;  // [num_queries] first key that each query attends to
    const int64_t* limits;  // [num_queries] end of those keys
    float* scores;          // [num_queries, kSpan] scratch
    float* units;           // [num_queries] scratch
    float *tops, *totals;   // [num_queries] largest score, and sum of exp(score - largest)
    float* mixed;           // [num_queries, head_dim] sum of exp(score - largest) * value
    float cap;              // scores become cap * tanh(score / cap); 0: they stay
};

struct KVKernels {
    // Convert scaled queries [num_queries, query_stride(head_dim)] in place to the form that `attend` reads.
    void (*prepare)(float* queries, size_t num_queries, size_t head_dim, float* units);
    void (*attend)(const AttentionSpan& span);
    // Write a token's key and value [size] of one head. keys, values: start of the head's page. offset: token in the page.
    void (*write)(void* keys, void* values, size_t offset, size_t head_dim, size_t size, const float* key, const float* value);
    size_t (*page_bytes)(size_t head_dim);  // of one head's keys or values in one page
};

struct AttentionKernels {
    KVKernels f32, f16;
    const KVKernels *i16, *i8;
    void (*merge)(float top, float total, const float* mixed, size_t head_dim, float* top_so_far, float* total_so_far, float* mixed_so_far);
};

// To measure the limits of the machine.
struct LimitKernels {
    uint64_t (*read)(const uint8_t* p, size_t bytes);
    size_t (*dot)(size_t rounds);  // returns the number of byte products
};

struct Kernels {
    const char* name;
    VocabularyKernels vocabulary;
    GemmKernels gemm;
    BlockKernels blocks;
    LayerKernels layer;
    AttentionKernels attention;
    LimitKernels limits;
};

// The table for this machine, chosen once. The environment variable PACELINE_ISA selects one for fewer instructions.
const Kernels& kernels();

}  // namespace paceline
