#include "base/zero_pages.h"

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <new>

#if defined(__linux__)
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>
#endif

namespace paceline {

#if defined(__linux__)
static size_t page_bytes() { return static_cast<size_t>(sysconf(_SC_PAGESIZE)); }
#endif

ZeroPages zero_pages(size_t bytes) {
#if defined(__linux__)
    if (constexpr size_t huge = size_t{1} << 21; bytes >= huge) {
        if (bytes > SIZE_MAX - 2 * huge) throw std::bad_alloc();
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
#endif
    void* p = std::calloc(std::max<size_t>(bytes, 1), 1);
    if (!p) throw std::bad_alloc();
    return ZeroPages(p);
}

void release([[maybe_unused]] const ZeroPages& all, [[maybe_unused]] size_t first, [[maybe_unused]] size_t bytes) {
#if defined(__linux__)
    if (!all.get_deleter().mapped) return;
    const size_t page = page_bytes();  // madvise rounds a length up, which would reach into the next page
    const size_t from = (first + page - 1) / page * page, to = (first + bytes) / page * page;
    if (from < to) madvise(static_cast<char*>(all.get()) + from, to - from, MADV_DONTNEED);
#endif
}

void provide([[maybe_unused]] const ZeroPages& all, [[maybe_unused]] size_t first, [[maybe_unused]] size_t bytes) {
#if defined(__linux__)
    constexpr int populate_write = 23;  // MADV_POPULATE_WRITE, which older headers lack
    setpriority(PRIO_PROCESS, 0, 5);  // lower the priority of this thread: it takes a quarter of a core that passes need, too
    const size_t from = first / page_bytes() * page_bytes();
    if (all.get_deleter().mapped && bytes) madvise(static_cast<char*>(all.get()) + from, first + bytes - from, populate_write);
#endif
}

void Unmap::operator()(void* p) const {
#if defined(__linux__)
    if (mapped) return (void)munmap(p, mapped);
#endif
    std::free(p);
}

}  // namespace paceline
