#include <algorithm>
#include <optional>
#include <tuple>

#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "sampler.hpp"
#include "tensor.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace triforce {
namespace {

using Answer = std::optional<std::tuple<int, int, double>>;

/// The arrays of a pass as the bindings take them, in this order. A law has no entries under `seeded`.
struct Arrays {
    nb::handle logits, ids, lengths, live;
    nb::handle tokens, laws, origins, counts;
    nb::handle out_tokens, out_laws, out_origins, out_counts;
    int64_t tier;
};

void check_guesses(const Pass& p) {
    for (int b = 0; b < p.rows; b++) {
        check(p.counts[b] >= 0 && p.counts[b] < p.columns, "counts must be from 0 to K");
        for (int64_t k = 0; k < p.counts[b]; k++) {
            const int64_t token = p.tokens[static_cast<int64_t>(b) * (p.columns - 1) + k];
            check(token >= 0 && token < p.vocabulary, "tokens must be in the vocabulary");
        }
    }
}

Pass checked(const Sampler& sampler, const Arrays& a) {
    const Tensor logits = tensor("logits", a.logits), ids = tensor("ids", a.ids);
    const auto B = static_cast<int64_t>(sampler.rows.size()), J = std::max<int64_t>(logits.dims > 1 ? logits[1] : 1, 1);
    const bool wide = logits.type == Type::f64;
    Pass p{};
    p.rows = static_cast<int>(B);
    p.columns = static_cast<int>(J);
    p.vocabulary = sampler.vocabulary;
    p.logits_f32 = wide ? nullptr : logits.as<float>({B, J, p.vocabulary});
    p.logits_f64 = wide ? logits.as<double>({B, J, p.vocabulary}) : nullptr;
    p.ids = ids.as<int64_t>({B, -1});
    p.capacity = ids[1];
    p.lengths = tensor("lengths", a.lengths).as<int64_t>({B});
    p.live = tensor("live", a.live).as<bool>({B});
    p.tokens = tensor("tokens", a.tokens).as<int64_t>({B, J - 1});
    p.origins = tensor("origins", a.origins).as<int64_t>({B, J - 1});
    p.counts = tensor("counts", a.counts).as<int64_t>({B});
    p.tier = a.tier;
    p.out_tokens = tensor("out_tokens", a.out_tokens).as<int64_t>({B, J});
    p.out_origins = tensor("out_origins", a.out_origins).as<int64_t>({B, J});
    p.out_counts = tensor("out_counts", a.out_counts).as<int64_t>({B});
    check_guesses(p);
    return p;
}

template <class Verify, class Source>
Answer run(Verify verify, const Sampler& sampler, const Pass& pass, const Source& noise) {
    Refusal refusal{};
    const nb::gil_scoped_release released;
    if (verify(sampler.rows, pass, noise, refusal)) return std::nullopt;
    return std::tuple(refusal.row, refusal.column, refusal.peak);
}

void add(Sampler& sampler, double temperature, int64_t top_k, double top_p, double min_p, double repetition,
         double presence, double frequency, std::vector<std::pair<int64_t, double>> bias, int64_t prompt) {
    for (const auto& [token, value] : bias)
        check(token >= 0 && token < sampler.vocabulary, "a bias is outside of the vocabulary");
    sampler.rows.push_back(
        {temperature, top_k, top_p, min_p, repetition, presence, frequency, std::move(bias), prompt});
}

Answer seeded(const Sampler& sampler, const Arrays& arrays, nb::handle noise) {
    const Pass p = checked(sampler, arrays);
    const Noise* keyed = nullptr;
    if (!nb::try_cast(noise, keyed))
        return run(verify_seeded, sampler, p,
                   Exponentials{nullptr, tensor("noise", noise).as<double>({p.rows, p.columns, p.vocabulary})});
    check(keyed->seeds.size() == sampler.rows.size(), "noise must have a key for each row");
    return run(verify_seeded, sampler, p, Exponentials{keyed, nullptr});
}

Answer rejection(const Sampler& sampler, const Arrays& arrays, nb::handle noise) {
    const Pass p = checked(sampler, arrays);
    const Trial trial{tensor("noise", noise).as<double>({p.rows, p.columns}),
                      tensor("laws", arrays.laws).as<double>({p.rows, p.columns - 1, p.vocabulary}),
                      tensor("out_laws", arrays.out_laws).as<double>({p.rows, p.columns, p.vocabulary})};
    return run(verify_by_rejection, sampler, p, trial);
}

template <Answer verify(const Sampler&, const Arrays&, nb::handle)>
Answer call(const Sampler& sampler, nb::handle logits, nb::handle ids, nb::handle lengths, nb::handle live,
            nb::handle tokens, nb::handle laws, nb::handle origins, nb::handle counts, nb::handle out_tokens,
            nb::handle out_laws, nb::handle out_origins, nb::handle out_counts, int64_t tier, nb::handle noise) {
    const Arrays arrays{logits, ids,    lengths,    live,     tokens,      laws,       origins,
                        counts, out_tokens, out_laws, out_origins, out_counts, tier};
    return verify(sampler, arrays, noise);
}

void init_noise(Noise* self, std::vector<uint64_t> seeds, std::vector<uint32_t> choices) {
    check(seeds.size() == choices.size(), "as many choices as seeds");
    new (self) Noise{std::move(seeds), std::move(choices)};
}

void uniforms(const Noise& noise, nb::handle draws_object, int tier, nb::handle used_object, nb::handle out_object) {
    const auto B = static_cast<int64_t>(noise.seeds.size());
    const Tensor draws = tensor("draws", draws_object), out = tensor("out", out_object);
    int64_t* drawn = draws.as<int64_t>({-1, B});
    const int64_t* used = tensor("used", used_object).as<int64_t>({B});
    double* to = out.as<double>({B, -1});
    check(tier >= 0 && tier < draws[0], "no such tier in draws");
    drawn += tier * B;
    for (int64_t b = 0; b < B; b++) {
        for (int64_t i = 0; i < out[1]; i++) *to++ = noise.uniform(static_cast<int>(b), tier, drawn[b] + i);
        drawn[b] += used[b];
    }
}

}  // namespace

void bind_sampler(nb::module_& m) {
    nb::class_<Noise>(m, "Noise", "The keys of each row's noise.")
        .def("__init__", &init_noise, "seeds"_a, "choices"_a)
        .def("uniforms", &uniforms, "draws"_a, "tier"_a, "used"_a, "out"_a,
             "out (B, n) = the next uniforms of each row for a tier; draws (tiers, B) moves on by used (B).");
    nb::class_<Sampler>(m, "Sampler", "Warps, draws and verifies; see sampler.hpp. Rows are added one by one.")
        .def("__init__", [](Sampler* self, int vocabulary) { new (self) Sampler{vocabulary, {}}; }, "vocabulary"_a)
        .def("add", &add)
        .def("seeded", &call<seeded>, "None, or row, column and largest logit of a column without a law.")
        .def("rejection", &call<rejection>, "The same.");
}

}  // namespace triforce
