#include "model/kv_store.h"

namespace paceline {

KVStore::KVStore(KVType type, size_t num_layers, size_t num_pages, size_t num_kv_heads, size_t head_dim)
    : type_(type), num_pages_(num_pages), num_kv_heads_(num_kv_heads), head_dim_(head_dim) {
    const size_t bytes = num_pages * num_kv_heads * kernels().page_bytes(padded_dim());
    for (size_t i = 0; i < num_layers; ++i) layers_.emplace_back(zero_pages(bytes), zero_pages(bytes));
}

bool KVStore::fits(KVType type, size_t num_layers, size_t num_pages, size_t num_kv_heads, size_t head_dim) {
    constexpr size_t kMaxBytes = size_t{1} << 56;
    size_t bytes = kernels_of(type).page_bytes(round_up(head_dim, kPageTokens));
    for (size_t times : {num_kv_heads, num_pages, 2 * num_layers})
        if (__builtin_mul_overflow(bytes, times, &bytes) || bytes > kMaxBytes) return false;
    return true;
}

size_t KVStore::bytes_per_token() const {
    return 2 * num_layers() * num_kv_heads_ * kernels().page_bytes(padded_dim()) / kPageTokens;
}

const KVKernels& KVStore::kernels_of(KVType type) {
    const AttentionKernels& all = paceline::kernels().attention;
    switch (type) {
        case KVType::i16: return *all.i16;
        case KVType::i8: return *all.i8;
        case KVType::f16: return all.f16;
        case KVType::f32: break;
    }
    return all.f32;
}

}  // namespace paceline
