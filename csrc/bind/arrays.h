// What the binding's files share.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <algorithm>
#include <memory>
#include <stdexcept>
#include <vector>

#include "model/decoder.h"

namespace paceline {

// Refuses what a caller has given.
inline void require(bool holds, const char* message) {
    if (!holds) throw std::invalid_argument(message);
}

// Numbers on their way to Python, which keeps them.
template <class T, size_t dims>
using Handed = nanobind::ndarray<nanobind::numpy, T, nanobind::ndim<dims>>;

// Room for so many numbers, one at least: no array begins nowhere.
template <class T>
std::unique_ptr<T[]> room_for(size_t n) {
    return std::make_unique<T[]>(std::max<size_t>(n, 1));
}

template <class T, class... Sizes>
Handed<T, sizeof...(Sizes)> handed(std::unique_ptr<T[]> numbers, Sizes... sizes) {
    T* raw = numbers.release();
    nanobind::capsule owner(raw, [](void* p) noexcept { delete[] static_cast<T*>(p); });
    return {raw, {sizes...}, owner};
}

// How tokens are chosen, one for each wanted token of a pass. Edits point into arrays that are kept.
struct ChooseList {
    std::vector<Choose> all;
    std::vector<nanobind::ndarray<>> kept;

    size_t num_logit_rows() const;

    // Refuses what does not fit a pass with so many wanted tokens, over so many token ids.
    const std::vector<Choose>& checked(size_t num_wanted, size_t vocab) const;
};

std::vector<std::vector<double>> told(const ChooseList& list);

void bind_control(nanobind::module_& m);
void bind_costs(nanobind::module_& m);
void bind_lookup(nanobind::module_& m);
void bind_rounds(nanobind::module_& m);
void bind_rows(nanobind::module_& m);

}  // namespace paceline
