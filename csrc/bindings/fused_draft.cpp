#include <optional>
#include <tuple>

#include <nanobind/stl/optional.h>

#include "../fused_draft.hpp"
#include "decoder.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace triforce {
namespace {

using Invalid = std::optional<std::tuple<int64_t, double>>;

/// How tokens are drawn: seeded if `noise` has keys; else by rejection with uniforms (count, B), which writes probs
/// (count, B, V).
Draw drawing(const Sampler& sampler, NoiseArg noise, TensorArg probs, int64_t count) {
    const Noise* keyed = nullptr;
    const auto B = static_cast<int64_t>(sampler.rows.size());
    if (nb::try_cast(noise, keyed)) {
        check(keyed->seeds.size() == sampler.rows.size(), "noise must have a key for each row");
        return [=, &sampler](int64_t, const VerificationBatch& batch, InvalidColumn& invalid) {
            return verify_seeded(sampler.rows, batch, {keyed, nullptr}, invalid);
        };
    }
    const double* uniforms = tensor("noise", noise).as<double>({count, B});
    double* out = tensor("probs", probs).as<double>({count, B, sampler.vocabulary});
    return [=, &sampler](int64_t i, const VerificationBatch& batch, InvalidColumn& invalid) {
        const RejectionInputs inputs{uniforms + i * B, nullptr, out + i * B * sampler.vocabulary};
        return verify_by_rejection(sampler.rows, batch, inputs, invalid);
    };
}

Invalid fused_draft(const Decoder& decoder, const std::vector<const Pages*>& memory, Ints positions, TensorArg cos,
              TensorArg sin, const ViewArg& seen, IntArrayArg ids, IntArrayArg lengths, BoolArrayArg live,
              const Sampler& sampler, NoiseArg noise, TensorArg probs, IntArrayArg tokens) {
    check(!memory.empty(), "there must be pages");
    const Tensor texts = tensor("ids", ids), out = tensor("tokens", tokens);
    const auto B = static_cast<int64_t>(sampler.rows.size());
    check(sampler.vocabulary == decoder.head().vocabulary(), "the sampler must have the model's vocabulary");
    check(static_cast<int64_t>(positions.size()) == B, "positions must have one number for each row");
    ForwardBatch forward{};
    forward.rows = B, forward.last_layer = static_cast<int64_t>(memory.size());
    forward.positions = std::move(positions);
    forward.views = {view(seen, B, memory[0]->heads)};
    int64_t table = 0;
    std::tie(forward.rotation, table) = rotation(cos, sin, memory[0]->dim);
    VerificationBatch verification{};
    verification.rows = static_cast<int>(B), verification.vocabulary = sampler.vocabulary;
    int64_t* data = texts.as<int64_t>({B, -1});
    verification.ids = data, verification.capacity = texts[1];
    verification.lengths = tensor("lengths", lengths).as<int64_t>({B});
    verification.live = tensor("live", live).as<bool>({B});
    int64_t* drawn = out.as<int64_t>({B, -1});
    for (int64_t b = 0; b < B; b++)
        check(0 <= forward.positions[b] && verification.lengths[b] + out[1] <= table,
              "positions must lie in the tables");
    const Draw draw = drawing(sampler, noise, probs, out[1]);
    InvalidColumn invalid{};
    const nb::gil_scoped_release released;
    if (decode({decoder, memory, std::move(forward), verification, data, out[1], drawn}, draw, invalid))
        return std::nullopt;
    return std::tuple(invalid.row, invalid.peak);
}

}  // namespace

void bind_fused_draft(nb::module_& m) {
    m.def("fused_draft", &fused_draft, nb::kw_only(), "decoder"_a, "memory"_a, "positions"_a, "cos"_a, "sin"_a, "view"_a, "ids"_a,
          "lengths"_a, "live"_a, "sampler"_a, "noise"_a, "probs"_a, "tokens"_a,
          "Draw K tokens behind each live row of the texts ids (B, S), one after another.\n\nThe model has seen "
          "positions[b] tokens of row b; `view` is that of the first pass. noise: keys for seeded draws; else "
          "uniforms (K, B) float64, with which probs (K, B, V) float64 are written. Out: tokens (B, K), which are "
          "appended to ids, too. Returns row and largest logit of a token without a distribution, or None.");
}

}  // namespace triforce
