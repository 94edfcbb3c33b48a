// Arguments that bindings of forward passes share.
#pragma once

#include <tuple>
#include <vector>

#include <nanobind/nanobind.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "../decoder.hpp"
#include "../tensor.hpp"

namespace triforce {

using Ints = std::vector<int64_t>;
/// A View as Python makes it.
struct ViewArg {
    int64_t layers;
    nanobind::object lists;
    Ints starts;
    int64_t sinks, window;
    Ints coarse;
    std::tuple<Ints, Ints, Ints> search;  // first, last, picks
};

/// Checks and borrows the lists.
View view(const ViewArg& from, int64_t rows, int64_t heads);

/// Tables (positions, D / 2), and their number of positions.
std::pair<Rotation, int64_t> rotation(TensorArg cos, TensorArg sin, int64_t dim);

}  // namespace triforce
