// Keys and values of some layers, by page.
#pragma once

#include <cstring>
#include <utility>
#include <vector>

#include "base/zero_pages.h"
#include "isa/kernels.h"

namespace paceline {

enum class KVType { i16, i8, f16, f32 };

// Memory is taken only as pages are written.
class KVStore {
  public:
    KVStore(KVType type, size_t num_layers, size_t num_pages, size_t num_kv_heads, size_t head_dim)
        : type_(type), num_pages_(num_pages), num_kv_heads_(num_kv_heads), head_dim_(head_dim) {
        const size_t bytes = num_pages * num_kv_heads * kernels().page_bytes(padded_dim());
        for (size_t i = 0; i < num_layers; ++i) layers_.emplace_back(zero_pages(bytes), zero_pages(bytes));
    }
    // True if the bytes of such a store can be counted: a size that wraps around would be allocated too small.
    static bool fits(KVType type, size_t num_layers, size_t num_pages, size_t num_kv_heads, size_t head_dim) {
        size_t bytes = kernels_of(type).page_bytes(round_up(head_dim, kPageTokens));
        for (size_t times : {num_kv_heads, num_pages, 2 * num_layers})
            if (__builtin_mul_overflow(bytes, times, &bytes) || bytes > size_t{1} << 56) return false;
        return true;
    }
    KVStore(KVStore&&) = default;
    KVStore(const KVStore&) = delete;

    size_t num_layers() const { return layers_.size(); }
    size_t num_pages() const { return num_pages_; }
    size_t num_kv_heads() const { return num_kv_heads_; }
    size_t head_dim() const { return head_dim_; }
    size_t padded_dim() const { return round_up(head_dim_, kPageTokens); }
    size_t bytes_per_token() const { return 2 * num_layers() * num_kv_heads_ * kernels().page_bytes(padded_dim()) / kPageTokens; }
    const KVKernels& kernels() const { return kernels_of(type_); }
    void* keys(size_t layer) const { return layers_[layer].first.get(); }
    void* values(size_t layer) const { return layers_[layer].second.get(); }
    // Bytes from the start of a layer's keys or values to a head's part of a page.
    size_t offset(size_t page, size_t kv_head) const {
        return (page * num_kv_heads_ + kv_head) * kernels().page_bytes(padded_dim());
    }

    // Bytes of one page in all layers: keys, then values, layer after layer.
    size_t page_bytes() const { return kPageTokens * bytes_per_token(); }
    void read_page(size_t page, uint8_t* to) const {
        each_part(page, [&](uint8_t* part, size_t bytes) { std::memcpy(to, part, bytes), to += bytes; });
    }
    void write_page(size_t page, const uint8_t* from) {
        each_part(page, [&](uint8_t* part, size_t bytes) { std::memcpy(part, from, bytes), from += bytes; });
    }

  private:
    template <class Take>
    void each_part(size_t page, const Take& take) const {
        const size_t bytes = offset(1, 0);
        for (size_t layer = 0; layer < num_layers(); ++layer)
            for (void* part : {keys(layer), values(layer)}) take(static_cast<uint8_t*>(part) + page * bytes, bytes);
    }
    static const KVKernels& kernels_of(KVType type) {
        const AttentionKernels& all = paceline::kernels().attention;
        switch (type) {
            case KVType::i16: return *all.i16;
            case KVType::i8: return *all.i8;
            case KVType::f16: return all.f16;
            default: return all.f32;
        }
    }

    KVType type_;
    size_t num_pages_, num_kv_heads_, head_dim_;
    std::vector<std::pair<ZeroPages, ZeroPages>> layers_;
};

}  // namespace paceline
