// What the files of the binding share. They are the border to Python: they check all arguments, and no code
// behind them checks again.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <algorithm>
#include <memory>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "model/decoder.h"

namespace paceline {

namespace nb = nanobind;
using namespace nb::literals;

// Refuse an argument.
inline void require(bool holds, const char* message) {
    if (!holds) throw std::invalid_argument(message);
}

inline void require(bool holds, const std::string& message) { require(holds, message.c_str()); }

template <class T>
using Array = nb::ndarray<const T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
template <class T>
using Table = nb::ndarray<const T, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
template <class T>
using OutArray = nb::ndarray<T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
template <class T>
using OutTable = nb::ndarray<T, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
template <class T>
using Out = nb::ndarray<T, nb::c_contig, nb::device::cpu>;  // of any number of dimensions
using Ids = Array<int64_t>;

constexpr size_t kMaxIds = size_t{1} << 31;   // most token ids: each fits 32 bits
constexpr size_t kMaxSide = size_t{1} << 24;  // longest side of a matrix

// An array on its way to Python, which then owns it.
template <class T, size_t dims>
using Returned = nb::ndarray<nb::numpy, T, nb::ndim<dims>>;

// Memory for n numbers, at least one: an array must have an address.
template <class T>
std::unique_ptr<T[]> new_array(size_t n) {
    return std::make_unique<T[]>(std::max<size_t>(n, 1));
}

template <class T, class... Sizes>
Returned<T, sizeof...(Sizes)> returned(std::unique_ptr<T[]> numbers, Sizes... sizes) {
    T* raw = numbers.release();
    nb::capsule owner(raw, [](void* p) noexcept { delete[] static_cast<T*>(p); });
    return {raw, {sizes...}, owner};
}

// The value that a name stands for.
template <class T>
T named(std::string_view name, std::initializer_list<std::pair<std::string_view, T>> values, const char* message) {
    for (const auto& [key, value] : values)
        if (key == name) return value;
    throw std::invalid_argument(message + (", not " + std::string(name)));
}

// True if `count` numbers from `start` on lie within the first `size`.
inline bool within(int64_t start, int64_t count, size_t size) {
    const auto end = static_cast<int64_t>(std::min<size_t>(size, INT64_MAX));
    return 0 <= start && start <= end && 0 <= count && count <= end - start;
}

// A Python string for attribute look-ups.
inline nb::object attribute(const char* name) { return nb::steal(PyUnicode_InternFromString(name)); }

// How tokens are chosen, one spec for each wanted token of a pass. Edits point into `edit_arrays`.
struct SamplingSpecs {
    std::vector<SamplingSpec> all;
    std::vector<nb::ndarray<>> edit_arrays;

    size_t num_logit_rows() const;
    // Refuse specs that do not fit a pass with this number of wanted tokens and token ids.
    const std::vector<SamplingSpec>& checked(size_t num_wanted, size_t vocab) const;
};

void bind_sampling(nb::module_& m);
void bind_weights(nb::module_& m);
void bind_decoder(nb::module_& m);
void bind_passes(nb::module_& m, nb::class_<Decoder>& decoder);
void bind_acceptance(nb::module_& m);
void bind_costs(nb::module_& m);
void bind_lookup(nb::module_& m);
void bind_rounds(nb::module_& m);
void bind_rows(nb::module_& m);
void bind_step(nb::module_& m);

}  // namespace paceline
