// Bindings beside module.cpp's own.
#pragma once

#include <nanobind/nanobind.h>

namespace chairlift {

// The kernels one by one, for tests and measurements: submodule `kernels`. PackedMatrix must be bound.
void bind_kernels(nanobind::module_& module);

}  // namespace chairlift
