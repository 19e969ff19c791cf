// Zeroed memory that the system provides at first touch, in huge pages where it has them: pages of keys and values lie scattered, and
// with small pages looking up their addresses takes longer than reading them.
#pragma once

#include <cstddef>
#include <memory>

namespace paceline {

struct Unmap {
    size_t mapped = 0;  // bytes; 0: the memory came from the heap
    void operator()(void* p) const;
};

using ZeroPages = std::unique_ptr<void, Unmap>;

ZeroPages zero_pages(size_t bytes);

// Give memory of `zero_pages` back to the system, as far as it lies in whole pages of the system. It may read as zeros from then on.
void release(const ZeroPages& all, size_t first, size_t bytes);

// Have the system provide memory of `zero_pages` now, which may be read and written meanwhile; older systems do it later. The thread that
// calls has a lower priority from then on.
void provide(const ZeroPages& all, size_t first, size_t bytes);

}  // namespace paceline
