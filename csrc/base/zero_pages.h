// Zeros that the system provides at first touch: in huge pages where it has them, as what lies scattered over many pages
// is looked up in them for longer than it is read.
#pragma once

#include <cstddef>
#include <memory>

namespace paceline {

struct Unmap {
    size_t mapped = 0;  // bytes; 0: it came from the heap
    void operator()(void* p) const;
};

using ZeroPages = std::unique_ptr<void, Unmap>;

ZeroPages zero_pages(size_t bytes);

}  // namespace paceline
