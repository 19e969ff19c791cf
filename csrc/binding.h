// What the binding's files share.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <stdexcept>
#include <vector>

#include "decoder.h"

namespace paceline {

// Refuses what a caller has given.
inline void require(bool holds, const char* message) {
    if (!holds) throw std::invalid_argument(message);
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
void bind_lookup(nanobind::module_& m);
void bind_rounds(nanobind::module_& m);
void bind_rows(nanobind::module_& m);

}  // namespace paceline
