#include <optional>
#include <tuple>
#include <vector>

#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "pass_args.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace triforce {

View view(const ViewArg& from, int64_t rows, int64_t heads) {
    const Tensor lists = tensor("lists", from.lists);
    const int64_t L = from.layers, B = rows, G = heads, P = lists.dims ? lists[lists.dims - 1] : 0;
    const auto& [first, last, picks] = from.search;
    View view{L, nullptr, 0, P, 0, P, from.starts, from.sinks, from.window, from.coarse, {first, last, picks}};
    require(static_cast<int64_t>(view.starts.size()) == B, "starts must have one number for each row");
    require(view.coarse.empty() || view.coarse.size() == view.starts.size(),
            "coarse must have one number for each row, or none");
    if (lists.dims == 2) {
        view.lists = lists.as<int32_t>({B, P});
        return view;
    }
    view.head_stride = P, view.row_stride = G * P;
    if (lists.dims == 4) view.layer_stride = B * G * P;
    view.lists = lists.dims == 4 ? lists.as<int32_t>({L, B, G, P}) : lists.as<int32_t>({B, G, P});
    return view;
}

std::pair<Rotation, int64_t> rotation(TensorArg cos, TensorArg sin, int64_t dim) {
    const Tensor cos_tensor = tensor("cos", cos);
    const float* cosines = cos_tensor.as<float>({-1, -1});
    const int64_t positions = cos_tensor[0], stride = cos_tensor[1];
    require(stride && stride % (dim / 2) == 0, "the tables must have whole rotations");
    return {{cosines, tensor("sin", sin).as<float>({positions, stride}), stride}, positions};
}

namespace {

/// Sets the output arrays of a batch.
void outputs(ForwardBatch& batch, const Decoder& decoder, const Pages& pages, TensorArg logits, TensorArg queries,
             TensorArg mass) {
    const int64_t B = batch.rows, T = batch.width, D = pages.dim, L = static_cast<int64_t>(decoder.layers().size());
    batch.logits = tensor("logits", logits).as<float>({B, batch.scored, decoder.head().vocabulary()});
    if (!queries.is_none()) {
        const int64_t H = decoder.layers()[0]->q_size() / D;
        batch.queries = static_cast<char*>(tensor("queries", queries).as(pages.type, {L, B, T, H, D}));
    }
    if (mass.is_none()) return;
    for (const View& view : batch.views)
        require(view.list_length == batch.views[0].list_length, "mass is of lists of one length in all layers");
    batch.mass = tensor("mass", mass).as<float>({L, B, pages.heads, batch.views[0].list_length});
}

double forward(const Decoder& decoder, const std::vector<const Pages*>& memory, TensorArg ids, Ints positions,
             Ints counts, TensorArg cos, TensorArg sin, const std::vector<ViewArg>& views, TensorArg at,
             TensorArg logits, TensorArg queries, TensorArg mass, int64_t first_layer, int64_t last_layer,
             TensorArg x, bool past_committed, int64_t keep, Ints state_layers, TensorArg states) {
    require(!memory.empty() && !views.empty(), "there must be pages and views");
    const Tensor ids_tensor = tensor("ids", ids);
    ForwardBatch batch{};
    batch.ids = ids_tensor.as<int64_t>({-1, -1});
    batch.rows = ids_tensor[0], batch.width = batch.scored = ids_tensor[1];
    require(static_cast<int64_t>(positions.size()) == batch.rows && positions.size() == counts.size(),
            "positions and counts must have one number for each row");
    int64_t table = 0;
    std::tie(batch.rotation, table) = rotation(cos, sin, memory[0]->dim);
    for (size_t b = 0; b < counts.size(); b++)
        require(0 <= counts[b] && counts[b] <= batch.width && 0 <= positions[b] && positions[b] <= table - counts[b],
                "counts must lie in [0, T] and positions in the tables");
    batch.positions = std::move(positions), batch.counts = std::move(counts);
    for (const ViewArg& each : views) batch.views.push_back(view(each, batch.rows, memory[0]->heads));
    if (!at.is_none()) {
        const Tensor columns = tensor("at", at);
        batch.at = columns.as<int64_t>({batch.rows, -1});
        batch.scored = columns[1];
    }
    outputs(batch, decoder, *memory[0], logits, queries, mass);
    batch.first_layer = first_layer;
    batch.last_layer = last_layer < 0 ? static_cast<int64_t>(memory.size()) : last_layer;
    if (!x.is_none()) batch.x = tensor("x", x).as<float>({batch.rows, batch.width, decoder.head().hidden()});
    batch.past_committed = past_committed, batch.keep = keep;
    const auto kept = static_cast<int64_t>(state_layers.size());
    const int64_t hidden = decoder.head().hidden();
    if (kept) batch.states = tensor("states", states).as<float>({kept, batch.rows, batch.width, hidden});
    batch.state_layers = std::move(state_layers);
    const nb::gil_scoped_release released;
    decoder.check(memory, batch);
    return decoder.forward(memory, batch);
}

void init(Decoder* self, std::vector<std::shared_ptr<DecoderLayer>> layers, std::shared_ptr<LmHead> head,
          std::shared_ptr<Embedding> embedding, Ints rotations, bool int8_inputs) {
    new (self) Decoder(std::move(layers), std::move(head), std::move(embedding), std::move(rotations),
                       input_codes(int8_inputs));
}

void init_view(ViewArg* self, int64_t layers, TensorArg lists, Ints starts, int64_t sinks, int64_t window, Ints coarse,
               std::tuple<Ints, Ints, Ints> search) {
    new (self) ViewArg{layers, nb::borrow(lists), std::move(starts), sinks, window, std::move(coarse),
                       std::move(search)};
}

void init_texts(DraftedTexts* self, Ints positions, TensorArg cos, TensorArg sin, const ViewArg& view, IntArrayArg ids,
                IntArrayArg lengths, BoolArrayArg live, const Sampler& sampler, NoiseArg noise, TensorArg probs,
                IntArrayArg tokens) {
    new (self) DraftedTexts{std::move(positions), nb::borrow(cos), nb::borrow(sin), view, nb::borrow(ids),
                            nb::borrow(lengths), nb::borrow(live), &sampler, nb::borrow(noise), nb::borrow(probs),
                            nb::borrow(tokens)};
}

/// The draw of a FusedDraft: seeded if `noise` has keys; else by rejection with uniforms (count, B), which writes probs
/// (count, B, V).
Draw drawing(const Sampler& sampler, NoiseArg noise, TensorArg probs, int64_t count) {
    const Noise* keyed = nullptr;
    const auto B = static_cast<int64_t>(sampler.rows.size());
    if (nb::try_cast(noise, keyed)) {
        require(keyed->seeds.size() == sampler.rows.size(), "noise must have a key for each row");
        return [=, &sampler](int64_t, const VerificationBatch& batch) {
            return verify_seeded(sampler, batch, {keyed, nullptr});
        };
    }
    const double* uniforms = tensor("noise", noise).as<double>({count, B});
    double* out = tensor("probs", probs).as<double>({count, B, sampler.vocabulary});
    return [=, &sampler](int64_t i, const VerificationBatch& batch) {
        return verify_by_rejection(sampler, batch, {uniforms + i * B, nullptr, out + i * B * sampler.vocabulary});
    };
}

InvalidRowTuple fused_draft(const Decoder& decoder, const std::vector<const Pages*>& memory,
                            const DraftedTexts& texts) {
    const Pass pass = [&](const ForwardBatch& batch) {
        decoder.check(memory, batch);
        decoder.forward(memory, batch);
    };
    return draft_by(pass, memory, decoder.head().vocabulary(), texts);
}

}  // namespace

InvalidRowTuple draft_by(const Pass& pass, const std::vector<const Pages*>& memory, int64_t vocabulary,
                         const DraftedTexts& from) {
    require(!memory.empty(), "there must be pages");
    const Tensor texts = tensor("ids", from.ids), out = tensor("tokens", from.tokens);
    const auto B = static_cast<int64_t>(from.sampler->rows.size());
    require(from.sampler->vocabulary == vocabulary, "the sampler must have the model's vocabulary");
    require(static_cast<int64_t>(from.positions.size()) == B, "positions must have one number for each row");
    ForwardBatch forward{};
    forward.rows = B, forward.last_layer = static_cast<int64_t>(memory.size());
    forward.positions = from.positions;
    forward.views = {view(from.view, B, memory[0]->heads)};
    int64_t table = 0;
    std::tie(forward.rotation, table) = rotation(from.cos, from.sin, memory[0]->dim);
    VerificationBatch verification{};
    verification.rows = static_cast<int>(B), verification.vocabulary = vocabulary;
    int64_t* data = texts.as<int64_t>({B, -1});
    verification.ids = data, verification.capacity = texts[1];
    verification.lengths = tensor("lengths", from.lengths).as<int64_t>({B});
    verification.live = tensor("live", from.live).as<bool>({B});
    int64_t* drawn = out.as<int64_t>({B, -1});
    for (int64_t b = 0; b < B; b++)
        require(0 <= forward.positions[b] && verification.lengths[b] + out[1] <= table,
                "positions must lie in the tables");
    const Draw draw = drawing(*from.sampler, from.noise, from.probs, out[1]);
    const nb::gil_scoped_release released;
    const Invalid invalid = decode({pass, std::move(forward), verification, data, out[1], drawn}, draw);
    return invalid ? std::optional(std::tuple(int64_t{invalid->row}, invalid->peak)) : std::nullopt;
}

void bind_decoder(nb::module_& m) {
    nb::class_<ViewArg>(m, "View",
                        "The keys that queries see in some consecutive layers.\n\nlists: page numbers, int32 (B, P), "
                        "(B, G, P) or (layers, B, G, P). Other arguments as in `Pages.attend`.")
        .def("__init__", &init_view, nb::kw_only(), "layers"_a, "lists"_a, "starts"_a, "sinks"_a = 0, "window"_a = 0,
             "coarse"_a = Ints(), "search"_a = std::tuple<Ints, Ints, Ints>());
    nb::class_<Decoder>(m, "Decoder",
                        "A decoder. rotations: index of each layer's rotation in the tables of a pass. int8_inputs: "
                        "whether the inputs of o, gate and up projections are rounded to int8, see `Matrix.linear`.")
        .def("__init__", &init, "layers"_a, "head"_a, "embedding"_a, nb::kw_only(), "rotations"_a,
             "int8_inputs"_a = false)
        .def("forward", &forward, nb::kw_only(), "memory"_a, "ids"_a, "positions"_a, "counts"_a, "cos"_a, "sin"_a,
             "views"_a, "at"_a.none(), "logits"_a, "queries"_a = nb::none(), "mass"_a = nb::none(), "first_layer"_a = 0,
             "last_layer"_a = -1, "x"_a = nb::none(), "exact"_a = false, "keep"_a = 0,
             "state_layers"_a = Ints(), "states"_a = nb::none(),
             "Run a forward pass of ids (B, T) int64, counts[b] tokens of row b from positions[b] on, over the pages "
             "of each layer.\n\nOut: `logits` (B, J, V) float32 of columns `at` (B, J) int64, or of all; rotated "
             "`queries` (L, B, T, H, D); `mass` (L, B, G, P) float32. If only layers [first_layer, last_layer) are "
             "run, the residual stream stays in `x` (B, T, C) float32. `states` (layers, B, T, C) float32 gets the "
             "residual stream after the number of layers in each entry of `state_layers`.\n\nWith offloaded memory, "
             "`exact` says whether keys before the starts are committed. `keep` is the number of pages of most "
             "attention mass that stay in memory, per row, layer and KV head.\n\nReturns the number of distinct "
             "experts of the first 8 tokens, a mean over the finished layers with experts.");
    nb::class_<DraftedTexts>(m, "DraftedTexts",
                             "Texts, ids (B, S). K tokens are drawn after each live row.\n\nThe model has seen "
                             "positions[b] tokens of row b. view: the view of the first pass. noise: keys for seeded "
                             "draws; else uniforms (K, B) float64, with which probs (K, B, V) float64 are written. "
                             "Out: tokens (B, K), which are also appended to ids.")
        .def("__init__", &init_texts, nb::keep_alive<1, 9>(), nb::kw_only(), "positions"_a, "cos"_a, "sin"_a,
             "view"_a, "ids"_a, "lengths"_a, "live"_a, "sampler"_a, "noise"_a, "probs"_a, "tokens"_a);
    m.def("fused_draft", &fused_draft, nb::kw_only(), "decoder"_a, "memory"_a, "texts"_a,
          "Draft tokens by a decoder. Returns row and largest logit of a token without a distribution, or None.");
}

}  // namespace triforce
