// Passes over one row of scores, one number per token id.
#include "kernels.h"
#include "simd.h"

namespace paceline::PACELINE_ISA {
namespace {

void scale(const float* x, size_t blocks, float inverse, float* z, float* maxima) {
    for (size_t b = 0; b < blocks; ++b) {
        f32v best = splat(-__builtin_inff());
        for (size_t i = b * kBlock; i < (b + 1) * kBlock; i += kLanes) {
            const f32v v = load(x + i) * inverse;
            store(z + i, v);
            best = larger(v, best);
        }
        maxima[b] = largest(best);
    }
}

float maximum(const float* z, size_t n) {
    f32v best = splat(-__builtin_inff());
    for (size_t i = 0; i < n; i += kLanes) best = larger(load(z + i), best);
    return largest(best);
}

double mass(const float* z, size_t blocks, float top) {
    constexpr size_t few = 4;  // blocks that are summed in float, before the sum is added to a double
    double total = 0.0;
    for (size_t first = 0; first < blocks; first += few) {
        const size_t end = (first + few < blocks ? first + few : blocks) * kBlock;
        f32v sums = splat(0.0f);
        for (size_t i = first * kBlock; i < end; i += kLanes) sums += exp(load(z + i) - top);
        total += sum(sums);
    }
    return total;
}

PACELINE_INLINE u32v lowbias(u32v x) {
    x = (x ^ (x >> 16)) * 0x7FEB352Du;
    x = (x ^ (x >> 15)) * 0x846CA68Bu;
    return x ^ (x >> 16);
}

// An upper bound of the noise: gumbel = -log(-log(1 - v)) <= -log(v) <= 32 log 2 - log(h1). No logarithm is taken: between powers of two
// the bits of a float32, read as an integer, are a straight line below log2. 1e-4 is more than all rounding errors.
PACELINE_INLINE f32v ceiling(u32v h1) {
    constexpr float ln2 = 0.6931471805599453f;
    return to_float((i32v)to_float(h1)) * (-ln2 * 0x1p-23f) + ln2 * (32 + 127 + 1e-4f);
}

// ids_of(i): the vector of token ids from index i on.
template <class IdsOf>
PACELINE_INLINE void bound_all(const float* z, size_t blocks, uint32_t k0, uint32_t k1, IdsOf ids_of, float* bounds, float* maxima) {
    for (size_t b = 0; b < blocks; ++b) {
        f32v best = splat(-__builtin_inff());
        for (size_t i = b * kBlock; i < (b + 1) * kBlock; i += kLanes) {
            const u32v h1 = lowbias(lowbias(ids_of(i) ^ k0) + k1);
            const f32v upper = ceiling(h1) + load(z + i);
            store(bounds + i, upper);
            best = larger(upper, best);
        }
        maxima[b] = largest(best);
    }
}

void bound(const float* z, size_t blocks, uint32_t k0, uint32_t k1, uint32_t first_id, float* bounds, float* maxima) {
    u32v ids;
    for (int lane = 0; lane < kLanes; ++lane) ids[lane] = first_id + (uint32_t)lane;
    bound_all(z, blocks, k0, k1, [ids](size_t i) { return ids + (uint32_t)i; }, bounds, maxima);
}

void bound_ids(const float* z, size_t blocks, uint32_t k0, uint32_t k1, const uint32_t* ids, float* bounds, float* maxima) {
    const auto load_ids = [ids](size_t i) {
        u32v loaded;
        __builtin_memcpy(&loaded, ids + i, sizeof loaded);
        return loaded;
    };
    bound_all(z, blocks, k0, k1, load_ids, bounds, maxima);
}

}  // namespace

extern const VocabularyKernels vocabulary_kernels;
const VocabularyKernels vocabulary_kernels = {scale, maximum, mass, bound, bound_ids};

}  // namespace paceline::PACELINE_ISA
