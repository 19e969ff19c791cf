// What the binding's files share.
#pragma once

#include <nanobind/nanobind.h>

#include <stdexcept>

namespace paceline {

// Refuses what a caller has given.
inline void require(bool holds, const char* message) {
    if (!holds) throw std::invalid_argument(message);
}

void bind_control(nanobind::module_& m);
void bind_lookup(nanobind::module_& m);

}  // namespace paceline
