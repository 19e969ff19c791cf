// What the binding's files share.
#pragma once

#include <nanobind/nanobind.h>

namespace paceline {

void bind_control(nanobind::module_& m);
void bind_lookup(nanobind::module_& m);

}  // namespace paceline
