// What the bindings of passes have in common.
#pragma once

#include <tuple>
#include <vector>

#include <nanobind/nanobind.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "decoder.hpp"

namespace triforce {

using Ints = std::vector<int64_t>;
// As View; the object is its lists, and the last three are its search.
using Seen = std::tuple<int64_t, nanobind::object, Ints, int64_t, int64_t, Ints, std::tuple<Ints, Ints, Ints>>;

/// The lists stay their owner's.
View view(const Seen& seen, int64_t rows, int64_t heads);

/// Tables (positions, D / 2), and for how many positions.
std::pair<Rotation, int64_t> rotation(nanobind::handle cos, nanobind::handle sin, int64_t dim);

}  // namespace triforce
