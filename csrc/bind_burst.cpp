#include <optional>
#include <tuple>

#include <nanobind/stl/optional.h>

#include "bind_decoder.hpp"
#include "burst.hpp"
#include "tensor.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace triforce {
namespace {

using Answer = std::optional<std::tuple<int64_t, double>>;

/// Noise: keys, for `seeded`; or uniforms (count, B), for `rejection`, which wants its laws (count, B, V).
Draw drawing(const Sampler& sampler, nb::handle noise, nb::handle laws, int64_t count) {
    const Noise* keyed = nullptr;
    const auto B = static_cast<int64_t>(sampler.rows.size());
    if (nb::try_cast(noise, keyed)) {
        check(keyed->seeds.size() == sampler.rows.size(), "noise must have a key for each row");
        return [=, &sampler](int64_t, const Pass& pass, Refusal& refusal) {
            return verify_seeded(sampler.rows, pass, {keyed, nullptr}, refusal);
        };
    }
    const double* uniforms = tensor("noise", noise).as<double>({count, B});
    double* all = tensor("laws", laws).as<double>({count, B, sampler.vocabulary});
    return [=, &sampler](int64_t behind, const Pass& pass, Refusal& refusal) {
        double* of_pass = all + behind * B * sampler.vocabulary;
        return verify_by_rejection(sampler.rows, pass, {uniforms + behind * B, nullptr, of_pass}, refusal);
    };
}

Answer burst(const Decoder& decoder, const std::vector<const Pages*>& memory, Ints positions, nb::handle cos,
             nb::handle sin, const Seen& seen, nb::handle texts, nb::handle lengths, nb::handle live,
             const Sampler& sampler, nb::handle noise, nb::handle laws, nb::handle tokens) {
    check(!memory.empty(), "there must be pages");
    const Tensor ids = tensor("texts", texts), out = tensor("tokens", tokens);
    const auto B = static_cast<int64_t>(sampler.rows.size());
    check(sampler.vocabulary == decoder.head().vocabulary(), "the sampler must have the model's vocabulary");
    check(static_cast<int64_t>(positions.size()) == B, "positions must have one number for each row");
    Feed feed{};
    feed.rows = B, feed.last_layer = static_cast<int64_t>(memory.size());
    feed.positions = std::move(positions);
    feed.views = {view(seen, B, memory[0]->heads)};
    int64_t table = 0;
    std::tie(feed.rotation, table) = rotation(cos, sin, memory[0]->dim);
    Pass pass{};
    pass.rows = static_cast<int>(B), pass.vocabulary = sampler.vocabulary;
    int64_t* data = ids.as<int64_t>({B, -1});
    pass.ids = data, pass.capacity = ids[1];
    pass.lengths = tensor("lengths", lengths).as<int64_t>({B});
    pass.live = tensor("live", live).as<bool>({B});
    int64_t* drawn = out.as<int64_t>({B, -1});
    for (int64_t b = 0; b < B; b++)
        check(0 <= feed.positions[b] && pass.lengths[b] + out[1] <= table, "positions must lie in the tables");
    const Draw draw = drawing(sampler, noise, laws, out[1]);
    Refusal refusal{};
    const nb::gil_scoped_release released;
    if (run({decoder, memory, std::move(feed), pass, data, out[1], drawn}, draw, refusal)) return std::nullopt;
    return std::tuple(refusal.row, refusal.peak);
}

}  // namespace

void bind_burst(nb::module_& m) {
    m.def("burst", &burst, "decoder"_a, "memory"_a, "positions"_a, "cos"_a, "sin"_a, "view"_a, "texts"_a, "lengths"_a,
          "live"_a, "sampler"_a, "noise"_a, "laws"_a, "tokens"_a,
          "tokens (B, n) = what follows each live row of texts (B, S), of which positions[b] tokens were seen, drawn "
          "one after another and written behind it. None, or row and largest logit of a column without a law.");
}

}  // namespace triforce
