#include "decoder.hpp"

#include <optional>

#include <nanobind/stl/shared_ptr.h>

#include "../tensor.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace triforce {

View view(const ViewArg& from, int64_t rows, int64_t heads) {
    const Tensor lists = tensor("lists", from.lists);
    const int64_t L = from.layers, B = rows, G = heads, P = lists.dims ? lists[lists.dims - 1] : 0;
    const auto& [first, last, picks] = from.search;
    View view{L, nullptr, 0, P, 0, P, from.starts, from.sinks, from.window, from.coarse, {first, last, picks}};
    check(static_cast<int64_t>(view.starts.size()) == B, "starts must have one number for each row");
    check(view.coarse.empty() || view.coarse.size() == view.starts.size(),
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
    const int64_t half = dim / 2, positions = cos_tensor.dims ? cos_tensor[0] : 0;
    return {{cos_tensor.as<float>({positions, half}), tensor("sin", sin).as<float>({positions, half})}, positions};
}

namespace {

void outputs(ForwardBatch& batch, const Decoder& decoder, const Pages& pages, TensorArg logits, TensorArg queries,
             TensorArg mass) {
    const int64_t B = batch.rows, T = batch.width, D = pages.dim, L = static_cast<int64_t>(decoder.layers().size());
    batch.logits = tensor("logits", logits).as<float>({B, batch.scored, decoder.head().vocabulary()});
    if (!queries.is_none()) {
        const Tensor out = tensor("queries", queries);
        out.expect(pages.is_bf16 ? Type::bf16 : Type::f32, {L, B, T, decoder.layers()[0]->q_size() / D, D});
        batch.queries = static_cast<char*>(out.data);
    }
    if (mass.is_none()) return;
    check(batch.views.size() == 1, "mass is of one view of all layers");
    batch.mass = tensor("mass", mass).as<float>({L, B, pages.heads, batch.views[0].list_length});
}

void forward(const Decoder& decoder, const std::vector<const Pages*>& memory, TensorArg ids, Ints positions,
             Ints counts, TensorArg cos, TensorArg sin, const std::vector<ViewArg>& views, TensorArg at,
             TensorArg logits, TensorArg queries, TensorArg mass, int64_t first_layer, int64_t last_layer,
             TensorArg x, bool exact, int64_t keep) {
    check(!memory.empty() && !views.empty(), "there must be pages and views");
    const Tensor ids_tensor = tensor("ids", ids);
    ForwardBatch batch{};
    batch.ids = ids_tensor.as<int64_t>({-1, -1});
    batch.rows = ids_tensor[0], batch.width = batch.scored = ids_tensor[1];
    check(static_cast<int64_t>(positions.size()) == batch.rows && positions.size() == counts.size(),
          "positions and counts must have one number for each row");
    int64_t table = 0;
    std::tie(batch.rotation, table) = rotation(cos, sin, memory[0]->dim);
    for (size_t b = 0; b < counts.size(); b++)
        check(0 <= counts[b] && counts[b] <= batch.width && 0 <= positions[b] && positions[b] <= table - counts[b],
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
    batch.exact = exact, batch.keep = keep;
    const nb::gil_scoped_release released;
    decoder.check(memory, batch);
    decoder.forward(memory, batch);
}

void init(Decoder* self, std::vector<std::shared_ptr<DecoderLayer>> layers, std::shared_ptr<LmHead> head,
          TensorArg embedding) {
    std::optional<Tensor> table;
    if (!embedding.is_none()) table = tensor("embedding", embedding);
    new (self) Decoder(std::move(layers), std::move(head), table);
}

void init_view(ViewArg* self, int64_t layers, TensorArg lists, Ints starts, int64_t sinks, int64_t window, Ints coarse,
               std::tuple<Ints, Ints, Ints> search) {
    new (self) ViewArg{layers, nb::borrow(lists), std::move(starts), sinks, window, std::move(coarse),
                       std::move(search)};
}

}  // namespace

void bind_decoder(nb::module_& m) {
    nb::class_<ViewArg>(m, "View",
                        "The keys that queries see in some consecutive layers.\n\n"
                        "`lists` of pages int32 (B, P), (B, G, P) or (layers, B, G, P); the other fields as in "
                        "`Pages.attend`.")
        .def("__init__", &init_view, nb::kw_only(), "layers"_a, "lists"_a, "starts"_a, "sinks"_a = 0, "window"_a = 0,
             "coarse"_a = Ints(), "search"_a = std::tuple<Ints, Ints, Ints>());
    nb::class_<Decoder>(m, "Decoder", "A model. `embedding` (V, C) is borrowed; None is the head's matrix.")
        .def("__init__", &init, "layers"_a, "head"_a, "embedding"_a.none(), nb::keep_alive<1, 4>())
        .def("forward", &forward, nb::kw_only(), "memory"_a, "ids"_a, "positions"_a, "counts"_a, "cos"_a, "sin"_a,
             "views"_a, "at"_a.none(), "logits"_a, "queries"_a = nb::none(), "mass"_a = nb::none(), "first_layer"_a = 0,
             "last_layer"_a = -1, "x"_a = nb::none(), "exact"_a = false, "keep"_a = 0,
             "Run a forward pass of ids (B, T) int64, counts[b] tokens of row b from positions[b] on, over the pages "
             "of each layer.\n\nOut: `logits` (B, J, V) float32 of columns `at` (B, J) int64, or of all; rotated "
             "`queries` (L, B, T, H, D); `mass` (L, B, G, P) float32. If only layers [first_layer, last_layer) are "
             "run, the residual stream stays in `x` (B, T, C) float32. For offloaded memory: keys before the starts "
             "are committed if `exact`, and the `keep` pages of most mass stay in memory.");
}

}  // namespace triforce
