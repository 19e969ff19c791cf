// Zeroed memory that the system provides at first touch, in huge pages where it has them: pages of keys and values lie scattered. With
// small pages of the system, looking up their addresses takes longer than reading them.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <system_error>
#include <thread>
#include <vector>

namespace paceline {

struct Unmap {
    size_t mapped = 0;  // mapped bytes; 0: the memory came from the heap
    void operator()(void* p) const;
};

using ZeroPages = std::unique_ptr<void, Unmap>;

ZeroPages zero_pages(size_t bytes);

// Give memory of `zero_pages` back to the system, as far as it lies in whole pages of the system. It may read as zeros from then on.
void release(const ZeroPages& all, size_t first, size_t bytes);

// Have the system provide memory of `zero_pages` now, which may be read and written meanwhile; older systems do it later. The thread that
// calls has a lower priority from then on.
void provide(const ZeroPages& all, size_t first, size_t bytes);

// Zeroed memory of pages, in regions: each has its part of every page.
class PageMemory {
  public:
    explicit PageMemory(size_t num_pages) : num_pages_(num_pages) {}
    ~PageMemory() { wait(); }
    size_t num_pages() const { return num_pages_; }
    // Add a region with `bytes` bytes of each page. expected: `expect` provides its memory.
    uint8_t* add(size_t bytes, bool expected = true) {
        wait();
        regions_.push_back({zero_pages(num_pages_ * bytes), bytes, expected});
        if (bytes && expected)  // pages of large models are written slowly, and cost more memory
            ahead_ = std::clamp<size_t>((size_t{1} << 21) / bytes, 16, ahead_);
        return static_cast<uint8_t*>(regions_.back().memory.get());
    }
    // Give a page's part of a region back, until it is written again.
    void drop(size_t region, size_t page) { release(regions_[region].memory, page * regions_[region].bytes, regions_[region].bytes); }
    // Have the system provide the memory of pages from `first` on, beside the passes: some hosts take milliseconds for each huge page, and
    // all regions need a new huge page at the same page.
    void expect(size_t first) const {
        const size_t from = std::max(first, provided_), to = std::min(first + 2 * ahead_, num_pages_);
        if (from >= std::min(first + ahead_, num_pages_) || provides_.exchange(true)) return;
        wait();
        provided_ = to;
        try {
            provider_ = std::thread([this, from, to] {
                for (const Region& own : regions_)
                    if (own.expected) provide(own.memory, from * own.bytes, (to - from) * own.bytes);
                provides_ = false;
            });
        } catch (const std::system_error&) {  // no thread is left: passes wait for their memory
        }
    }

  private:
    struct Region {
        ZeroPages memory;
        size_t bytes;  // bytes of a page in this region
        bool expected;
    };

    void wait() const { if (provider_.joinable()) provider_.join(); }

    size_t num_pages_;
    std::vector<Region> regions_;
    mutable std::thread provider_;
    mutable std::atomic<bool> provides_ = false;
    mutable size_t provided_ = 0;  // pages whose memory is there, or on its way
    size_t ahead_ = 128;           // pages from the expected one on whose memory should be there, or on its way
};

}  // namespace paceline
