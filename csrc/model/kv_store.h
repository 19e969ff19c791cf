// Keys and values of some layers, by page.
#pragma once

#include <algorithm>
#include <cstring>
#include <utility>
#include <vector>

#include "base/zero_pages.h"
#include "isa/kernels.h"

namespace paceline {

enum class KVType { i16, i8, f16, f32 };

// KV heads of a layer, and the numbers of each of its heads.
struct HeadShape {
    size_t num_kv = 0, dim = 0;
    size_t kv_size() const { return num_kv * dim; }
    bool operator==(const HeadShape&) const = default;
};

// Except the first page's, memory is taken only as pages are written. Where some layers have a window, their parts of a page lie side
// by side, and so do the other layers' parts: each of the two can be dropped without the other.
class KVStore {
  public:
    // heads: of each layer; sliding: layers whose part of a page can be dropped. Sliding layers have equal heads, and so have the others
    KVStore(KVType type, size_t num_pages, std::vector<HeadShape> heads, const std::vector<size_t>& sliding = {})
        : type_(type), heads_(std::move(heads)), places_(heads_.size()), memory_(num_pages) {
        for (size_t layer : sliding) places_[layer].slides = true, window_bytes_ += 2 * part_bytes(layer);
        rest_bytes_ = sliding.empty() ? 0 : page_bytes() - window_bytes_;
        uint8_t* const sides[] = {memory_.add(rest_bytes_), memory_.add(window_bytes_, false)};  // few pages hold a window part
        size_t of_rest = 0, of_windows = 0;  // bytes before a layer's part, within a page
        for (size_t layer = 0; layer < heads_.size(); ++layer) {
            const size_t part = part_bytes(layer);
            Place& place = places_[layer];
            const size_t beside = place.slides ? sliding.size() : heads_.size() - sliding.size();
            place.heads_per_page = heads_[layer].num_kv * (sliding.empty() ? 1 : 2 * beside);
            size_t& at = place.slides ? of_windows : of_rest;
            for (uint8_t** to : {&place.keys, &place.values}) {
                *to = sliding.empty() ? memory_.add(part) : sides[place.slides] + at;
                at += part;
            }
        }
        expect(0);
    }
    // True if the bytes of such a store fit size_t: a size that wraps around would be allocated too small.
    static bool fits(KVType type, size_t num_pages, const std::vector<HeadShape>& heads) {
        constexpr size_t most = size_t{1} << 56;
        size_t total = 0;
        for (const HeadShape& own : heads) {
            size_t bytes = kernels_of(type).page_bytes(round_up(own.dim, kPageTokens));
            for (size_t times : {own.num_kv, num_pages, size_t{2}})
                if (__builtin_mul_overflow(bytes, times, &bytes) || bytes > most) return false;
            if ((total += bytes) > most) return false;
        }
        return true;
    }
    void expect(size_t first) const { memory_.expect(first); }  // pages from `first` on are written soon
    size_t num_layers() const { return heads_.size(); }
    size_t num_pages() const { return memory_.num_pages(); }
    const HeadShape& heads(size_t layer) const { return heads_[layer]; }
    size_t padded_dim(size_t layer) const { return round_up(heads_[layer].dim, kPageTokens); }
    size_t bytes_per_token() const { return page_bytes() / kPageTokens; }
    const KVKernels& kernels() const { return kernels_of(type_); }
    void* keys(size_t layer) const { return places_[layer].keys; }
    void* values(size_t layer) const { return places_[layer].values; }
    size_t heads_per_page(size_t layer) const { return places_[layer].heads_per_page; }  // from a page's first head to the next one's
    // Bytes from the start of a layer's keys or values to a head's part of a page.
    size_t offset(size_t layer, size_t page, size_t kv_head) const {
        return (page * places_[layer].heads_per_page + kv_head) * kernels().page_bytes(padded_dim(layer));
    }

    // Bytes of one page in all layers: keys, then values, layer after layer.
    size_t page_bytes() const {
        size_t bytes = 0;
        for (size_t layer = 0; layer < num_layers(); ++layer) bytes += 2 * part_bytes(layer);
        return bytes;
    }
    size_t window_bytes() const { return window_bytes_; }  // bytes of a page that `drop_window` gives back
    // Give back the memory of what sliding layers hold of a page, until it is written again.
    void drop_window(size_t page) { memory_.drop(1, page); }
    void drop_rest(size_t page) { memory_.drop(0, page); }  // the same for the other layers
    void read_page(size_t page, uint8_t* to) const {
        each_part(page, [&](uint8_t* part, size_t bytes) { std::memcpy(to, part, bytes), to += bytes; });
    }
    void copy_page(size_t from, size_t to) {
        for (size_t layer = 0; layer < num_layers(); ++layer)
            for (void* part : {keys(layer), values(layer)}) {
                auto* const all = static_cast<uint8_t*>(part);
                std::memmove(all + offset(layer, to, 0), all + offset(layer, from, 0), part_bytes(layer));
            }
    }
    void write_page(size_t page, const uint8_t* from) {
        each_part(page, [&](uint8_t* part, size_t bytes) { std::memcpy(part, from, bytes), from += bytes; });
    }

  private:
    struct Place {
        uint8_t *keys = nullptr, *values = nullptr;  // of page 0
        size_t heads_per_page = 0;
        bool slides = false;
    };

    // Bytes of a layer's keys in one page, and of its values.
    size_t part_bytes(size_t layer) const { return heads_[layer].num_kv * kernels().page_bytes(padded_dim(layer)); }
    template <class Take>
    void each_part(size_t page, const Take& take) const {
        for (size_t layer = 0; layer < num_layers(); ++layer)
            for (void* part : {keys(layer), values(layer)})
                take(static_cast<uint8_t*>(part) + offset(layer, page, 0), part_bytes(layer));
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
    std::vector<HeadShape> heads_;
    size_t window_bytes_ = 0, rest_bytes_ = 0;  // of a page, in sliding layers and in those beside them
    std::vector<Place> places_;
    PageMemory memory_;  // regions: of layers that do not slide, of sliding layers; then of each layer's keys and values where none slides
};

}  // namespace paceline
