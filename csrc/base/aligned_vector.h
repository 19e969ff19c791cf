// Arrays that start at a cache line: a vector of 64 bytes then never crosses two lines, which would slow a kernel by a third.
#pragma once

#include <cstddef>
#include <new>
#include <vector>

namespace paceline {

template <class T>
struct LineAllocator {
    using value_type = T;
    static constexpr std::align_val_t kLine{64};

    LineAllocator() = default;
    template <class Other>
    LineAllocator(const LineAllocator<Other>&) {}

    T* allocate(size_t count) { return static_cast<T*>(::operator new(count * sizeof(T), kLine)); }
    void deallocate(T* p, size_t) { ::operator delete(p, kLine); }
    bool operator==(const LineAllocator&) const { return true; }
    bool operator!=(const LineAllocator&) const { return false; }
};

template <class T>
using AlignedVector = std::vector<T, LineAllocator<T>>;

}  // namespace paceline
