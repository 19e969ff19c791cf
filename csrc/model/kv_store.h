// Keys and values of some layers, by page.
#pragma once

#include <cstddef>
#include <utility>
#include <vector>

#include "base/zero_pages.h"
#include "isa/kernels.h"

namespace paceline {

enum class KVType { i16, i8, f16, f32 };

// Memory is taken only as pages are written.
class KVStore {
  public:
    KVStore(KVType type, size_t num_layers, size_t num_pages, size_t num_kv_heads, size_t head_dim);
    // True if the bytes of such a store can be counted: a size that wraps around would be allocated too small.
    static bool fits(KVType type, size_t num_layers, size_t num_pages, size_t num_kv_heads, size_t head_dim);
    KVStore(KVStore&&) = default;
    KVStore(const KVStore&) = delete;

    size_t num_layers() const { return layers_.size(); }
    size_t num_pages() const { return num_pages_; }
    size_t num_kv_heads() const { return num_kv_heads_; }
    size_t head_dim() const { return head_dim_; }
    size_t padded_dim() const { return round_up(head_dim_, kPageTokens); }
    size_t bytes_per_token() const;
    const KVKernels& kernels() const { return kernels_of(type_); }
    void* keys(size_t layer) const { return layers_[layer].first.get(); }
    void* values(size_t layer) const { return layers_[layer].second.get(); }
    // Bytes from the start of a layer's keys or values to a head's part of a page.
    size_t offset(size_t page, size_t kv_head) const {
        return (page * num_kv_heads_ + kv_head) * kernels().page_bytes(padded_dim());
    }

  private:
    static const KVKernels& kernels_of(KVType type);

    KVType type_;
    size_t num_pages_, num_kv_heads_, head_dim_;
    std::vector<std::pair<ZeroPages, ZeroPages>> layers_;
};

}  // namespace paceline
