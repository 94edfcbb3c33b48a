// Arguments of passes, as Python gives them.
#pragma once

#include <optional>
#include <tuple>
#include <utility>
#include <vector>

#include <nanobind/nanobind.h>

#include "../fused_draft.hpp"
#include "arguments.hpp"

namespace triforce {

using Ints = std::vector<int64_t>;
/// Row and largest logit of a token without a distribution.
using InvalidRowTuple = std::optional<std::tuple<int64_t, double>>;

/// A View, as Python gives it.
struct ViewArg {
    int64_t layers;
    nanobind::object lists;
    Ints starts;
    int64_t sinks, window;
    Ints coarse;
    std::tuple<Ints, Ints, Ints> search;  // first, last, picks
};

/// The texts of a FusedDraft, as Python gives them.
struct DraftedTexts {
    Ints positions;
    nanobind::object cos, sin;
    ViewArg view;
    nanobind::object ids, lengths, live;
    const Sampler* sampler;
    nanobind::object noise, probs, tokens;
};

/// Checks the page lists and borrows them.
View view(const ViewArg& from, int64_t rows, int64_t heads);
/// Rotation tables (positions, R * D / 2), and their number of positions.
std::pair<Rotation, int64_t> rotation(TensorArg cos, TensorArg sin, int64_t dim);
/// Draws tokens by passes of a model with pages `memory` and `vocabulary` tokens.
InvalidRowTuple draft_by(const Pass& pass, const std::vector<const Pages*>& memory, int64_t vocabulary,
                         const DraftedTexts& from);

}  // namespace triforce
