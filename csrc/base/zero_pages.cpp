#include "base/zero_pages.h"

#include <algorithm>
#include <cstdlib>
#include <new>

#if defined(__linux__)
#include <sys/mman.h>

#include <cstdint>
#endif

namespace paceline {
namespace {

void* from_heap(size_t bytes) {
    void* p = std::calloc(std::max<size_t>(bytes, 1), 1);
    if (!p) throw std::bad_alloc();
    return p;
}

}  // namespace

#if defined(__linux__)

ZeroPages zero_pages(size_t bytes) {
    constexpr size_t huge = size_t{1} << 21;
    if (bytes < huge) return ZeroPages(from_heap(bytes));
    const size_t size = (bytes + huge - 1) / huge * huge;
    void* all = mmap(nullptr, size + huge, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (all == MAP_FAILED) throw std::bad_alloc();
    char* from = static_cast<char*>(all);
    const size_t before = (huge - reinterpret_cast<uintptr_t>(from) % huge) % huge;
    if (before) munmap(from, before);
    munmap(from + before + size, huge - before);
    madvise(from + before, size, MADV_HUGEPAGE);
    return ZeroPages(from + before, Unmap{size});
}

void Unmap::operator()(void* p) const {
    if (mapped) munmap(p, mapped);
    else std::free(p);
}

#else

ZeroPages zero_pages(size_t bytes) { return ZeroPages(from_heap(bytes)); }

void Unmap::operator()(void* p) const { std::free(p); }

#endif

}  // namespace paceline
