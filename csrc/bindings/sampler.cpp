#include <algorithm>
#include <optional>
#include <tuple>

#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "../sampler.hpp"
#include "arguments.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace triforce {
namespace {

using InvalidTuple = std::optional<std::tuple<int, int, double>>;

/// The arrays of a draft of K tokens, or of J = K + 1 verified tokens.
struct DraftArrays {
    nb::object tokens, probs, origins, counts;
};

void check_draft(const VerificationBatch& p) {
    for (int b = 0; b < p.rows; b++) {
        require(p.counts[b] >= 0 && p.counts[b] < p.columns, "counts must be from 0 to K");
        for (int64_t k = 0; k < p.counts[b]; k++) {
            const int64_t token = p.tokens[static_cast<int64_t>(b) * (p.columns - 1) + k];
            require(token >= 0 && token < p.vocabulary, "tokens must be in the vocabulary");
        }
    }
}

VerificationBatch checked(const Sampler& sampler, TensorArg logits_arg, IntArrayArg ids_arg, IntArrayArg lengths,
                          BoolArrayArg live, const DraftArrays& draft, const DraftArrays& out, int64_t tier) {
    const Tensor logits = tensor("logits", logits_arg), ids = tensor("ids", ids_arg);
    const auto B = static_cast<int64_t>(sampler.rows.size()), J = std::max<int64_t>(logits.dims > 1 ? logits[1] : 1, 1);
    const bool wide = logits.type == Type::f64;
    VerificationBatch p{};
    p.rows = static_cast<int>(B), p.columns = static_cast<int>(J), p.vocabulary = sampler.vocabulary;
    p.logits_f32 = wide ? nullptr : logits.as<float>({B, J, p.vocabulary});
    p.logits_f64 = wide ? logits.as<double>({B, J, p.vocabulary}) : nullptr;
    p.ids = ids.as<int64_t>({B, -1});
    p.capacity = ids[1];
    p.lengths = tensor("lengths", lengths).as<int64_t>({B});
    p.live = tensor("live", live).as<bool>({B});
    p.tokens = tensor("tokens", draft.tokens).as<int64_t>({B, J - 1});
    p.origins = tensor("origins", draft.origins).as<int64_t>({B, J - 1});
    p.counts = tensor("counts", draft.counts).as<int64_t>({B});
    p.tier = tier;
    p.out_tokens = tensor("out.tokens", out.tokens).as<int64_t>({B, J});
    p.out_origins = tensor("out.origins", out.origins).as<int64_t>({B, J});
    p.out_counts = tensor("out.counts", out.counts).as<int64_t>({B});
    check_draft(p);
    return p;
}

template <class Verify, class Source>
InvalidTuple run(Verify verify, const Sampler& sampler, const VerificationBatch& batch, const Source& noise) {
    const nb::gil_scoped_release released;
    const Invalid invalid = verify(sampler, batch, noise);
    if (!invalid) return std::nullopt;
    return std::tuple(invalid->row, invalid->column, invalid->peak);
}

InvalidTuple seeded(const Sampler& sampler, TensorArg logits, IntArrayArg ids, IntArrayArg lengths, BoolArrayArg live,
                    const DraftArrays& draft, const DraftArrays& out, int64_t tier, NoiseArg noise) {
    const VerificationBatch p = checked(sampler, logits, ids, lengths, live, draft, out, tier);
    const Noise* keyed = nullptr;
    if (!nb::try_cast(noise, keyed))
        return run(verify_seeded, sampler, p,
                   Exponentials{nullptr, tensor("noise", noise).as<double>({p.rows, p.columns, p.vocabulary})});
    require(keyed->seeds.size() == sampler.rows.size(), "noise must have a key for each row");
    return run(verify_seeded, sampler, p, Exponentials{keyed, nullptr});
}

template <Invalid (*Verify)(const Sampler&, const VerificationBatch&, const RejectionInputs&)>
InvalidTuple rejection(const Sampler& sampler, TensorArg logits, IntArrayArg ids, IntArrayArg lengths,
                       BoolArrayArg live, const DraftArrays& draft, const DraftArrays& out, int64_t tier,
                       TensorArg noise) {
    const VerificationBatch p = checked(sampler, logits, ids, lengths, live, draft, out, tier);
    const RejectionInputs inputs{tensor("noise", noise).as<double>({p.rows, p.columns}),
                                 tensor("probs", draft.probs).as<double>({p.rows, p.columns - 1, p.vocabulary}),
                                 tensor("out.probs", out.probs).as<double>({p.rows, p.columns, p.vocabulary})};
    return run(Verify, sampler, p, inputs);
}

void add(Sampler& sampler, double temperature, int64_t top_k, double top_p, double min_p, double repetition,
         double presence, double frequency, std::vector<std::pair<int64_t, double>> bias, int64_t prompt) {
    for (const auto& [token, value] : bias)
        require(token >= 0 && token < sampler.vocabulary, "a bias is outside of the vocabulary");
    sampler.rows.push_back(
        {temperature, top_k, top_p, min_p, repetition, presence, frequency, std::move(bias), prompt});
}

void init_arrays(DraftArrays* self, IntArrayArg tokens, TensorArg probs, IntArrayArg origins, IntArrayArg counts) {
    new (self) DraftArrays{nb::borrow(tokens), nb::borrow(probs), nb::borrow(origins), nb::borrow(counts)};
}

void init_noise(Noise* self, std::vector<uint64_t> seeds, std::vector<uint32_t> choices) {
    require(seeds.size() == choices.size(), "as many choices as seeds");
    new (self) Noise{std::move(seeds), std::move(choices)};
}

void uniforms(const Noise& noise, TensorArg draws_object, int tier, IntArrayArg used_object, TensorArg out_object) {
    const auto B = static_cast<int64_t>(noise.seeds.size());
    const Tensor draws = tensor("draws", draws_object), out = tensor("out", out_object);
    int64_t* drawn = draws.as<int64_t>({-1, B});
    const int64_t* used = tensor("used", used_object).as<int64_t>({B});
    double* to = out.as<double>({B, -1});
    require(tier >= 0 && tier < draws[0], "no such tier in draws");
    drawn += tier * B;
    for (int64_t b = 0; b < B; b++) {
        for (int64_t i = 0; i < out[1]; i++) *to++ = noise.uniform(static_cast<int>(b), tier, drawn[b] + i);
        drawn[b] += used[b];
    }
}

}  // namespace

void bind_sampler(nb::module_& m) {
    nb::class_<Noise>(m, "Noise", "The noise of a batch's rows, keyed by their seeds and choices.")
        .def("__init__", &init_noise, "seeds"_a, "choices"_a)
        .def("uniforms", &uniforms, "draws"_a, "tier"_a, "used"_a, "out"_a,
             "Write the next uniforms of each row for a tier to out (B, n) float64, and add used (B) to the row's "
             "draws.\n\ndraws (tiers, B) int64: counts of the numbers drawn so far.");
    nb::class_<DraftArrays>(m, "DraftArrays",
                            "A draft: tokens (B, K) int64, their probs (B, K, V) float64, the tiers `origins` (B, K) "
                            "that they come from, and the number of tokens of each row, `counts` (B).\n\nprobs has no "
                            "entries in seeded verification.")
        .def("__init__", &init_arrays, nb::kw_only(), "tokens"_a, "probs"_a, "origins"_a, "counts"_a);
    nb::class_<Sampler>(m, "Sampler", "The sampling parameters of a batch, whose rows are added one by one.")
        .def("__init__", [](Sampler* self, int vocabulary) { new (self) Sampler{vocabulary, {}}; }, "vocabulary"_a)
        .def("add", &add, nb::kw_only(), "temperature"_a, "top_k"_a, "top_p"_a, "min_p"_a, "repetition_penalty"_a,
             "presence_penalty"_a, "frequency_penalty"_a, "logit_bias"_a, "prompt_length"_a, "Add a row.")
        .def("verify_seeded", &seeded, nb::kw_only(), "logits"_a, "ids"_a, "lengths"_a, "live"_a, "draft"_a, "out"_a,
             "tier"_a, "noise"_a,
             "Verify a draft of K tokens by logits (B, K + 1, V) float32 or float64 and write the result to "
             "`out`.\n\nids (B, S), lengths and live (B): the texts. noise: keys, or exponentials (B, K + 1, V) "
             "float64. Returns row, column and largest logit of a column without a distribution, or None.")
        .def("verify_by_rejection", &rejection<verify_by_rejection>, nb::kw_only(), "logits"_a, "ids"_a, "lengths"_a,
             "live"_a, "draft"_a, "out"_a, "tier"_a, "noise"_a,
             "Verify a draft by rejection sampling. noise: uniforms (B, K + 1) float64; other arguments as in "
             "`verify_seeded`.")
        .def("verify_by_block", &rejection<verify_by_block>, nb::kw_only(), "logits"_a, "ids"_a, "lengths"_a, "live"_a,
             "draft"_a, "out"_a, "tier"_a, "noise"_a,
             "Verify a draft by rejection of blocks; arguments as in `verify_by_rejection`.");
}

}  // namespace triforce
