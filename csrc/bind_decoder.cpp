#include "bind_decoder.hpp"

#include <optional>

#include <nanobind/stl/shared_ptr.h>

#include "tensor.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace triforce {

View view(const Seen& seen, int64_t rows, int64_t heads) {
    const auto& [layers, units, starts, sinks, window, coarse, search] = seen;
    const Tensor lists = tensor("units", units);
    const int64_t L = layers, B = rows, G = heads, P = lists.dims ? lists[lists.dims - 1] : 0;
    const auto& [first, last, picks] = search;
    View view{L, nullptr, 0, P, 0, P, starts, sinks, window, coarse, {first, last, picks}};
    check(static_cast<int64_t>(starts.size()) == B, "starts must have one number for each row");
    check(coarse.empty() || coarse.size() == starts.size(), "coarse must have one number for each row, or none");
    if (lists.dims == 2) {
        view.lists = lists.as<int32_t>({B, P});
        return view;
    }
    view.head_stride = P, view.row_stride = G * P;
    if (lists.dims == 4) view.layer_stride = B * G * P;
    view.lists = lists.dims == 4 ? lists.as<int32_t>({L, B, G, P}) : lists.as<int32_t>({B, G, P});
    return view;
}

std::pair<Rotation, int64_t> rotation(nb::handle cos, nb::handle sin, int64_t dim) {
    const Tensor cos_tensor = tensor("cos", cos);
    const int64_t half = dim / 2, positions = cos_tensor.dims ? cos_tensor[0] : 0;
    return {{cos_tensor.as<float>({positions, half}), tensor("sin", sin).as<float>({positions, half})}, positions};
}

namespace {

void outputs(Feed& feed, const Decoder& decoder, const Pages& pages, nb::handle logits, nb::handle queries,
             nb::handle mass) {
    const int64_t B = feed.rows, T = feed.width, D = pages.dim, L = static_cast<int64_t>(decoder.blocks().size());
    feed.logits = tensor("logits", logits).as<float>({B, feed.scored, decoder.head().vocabulary()});
    if (!queries.is_none()) {
        const Tensor out = tensor("queries", queries);
        out.expect(pages.is_bf16 ? Type::bf16 : Type::f32, {L, B, T, decoder.blocks()[0]->q_size() / D, D});
        feed.queries = static_cast<char*>(out.data);
    }
    if (mass.is_none()) return;
    check(feed.views.size() == 1, "mass is of one view of all layers");
    feed.mass = tensor("mass", mass).as<float>({L, B, pages.heads, feed.views[0].list_length});
}

void forward(const Decoder& decoder, const std::vector<const Pages*>& memory, nb::handle ids, Ints positions,
             Ints counts, nb::handle cos, nb::handle sin, const std::vector<Seen>& views, nb::handle at,
             nb::handle logits, nb::handle queries, nb::handle mass, int64_t first_layer, int64_t last_layer,
             nb::handle x, bool exact, int64_t keep) {
    check(!memory.empty() && !views.empty(), "there must be pages and views");
    const Tensor ids_tensor = tensor("ids", ids);
    Feed feed{};
    feed.ids = ids_tensor.as<int64_t>({-1, -1});
    feed.rows = ids_tensor[0], feed.width = feed.scored = ids_tensor[1];
    check(static_cast<int64_t>(positions.size()) == feed.rows && positions.size() == counts.size(),
          "positions and counts must have one number for each row");
    int64_t table = 0;
    std::tie(feed.rotation, table) = rotation(cos, sin, memory[0]->dim);
    for (size_t b = 0; b < counts.size(); b++)
        check(0 <= counts[b] && counts[b] <= feed.width && 0 <= positions[b] && positions[b] <= table - counts[b],
              "counts must lie in [0, T] and positions in the tables");
    feed.positions = std::move(positions), feed.counts = std::move(counts);
    for (const Seen& seen : views) feed.views.push_back(view(seen, feed.rows, memory[0]->heads));
    if (!at.is_none()) {
        const Tensor columns = tensor("at", at);
        feed.at = columns.as<int64_t>({feed.rows, -1});
        feed.scored = columns[1];
    }
    outputs(feed, decoder, *memory[0], logits, queries, mass);
    feed.first_layer = first_layer;
    feed.last_layer = last_layer < 0 ? static_cast<int64_t>(memory.size()) : last_layer;
    if (!x.is_none()) feed.x = tensor("x", x).as<float>({feed.rows, feed.width, decoder.head().hidden()});
    feed.exact = exact, feed.keep = keep;
    const nb::gil_scoped_release released;
    decoder.check(memory, feed);
    decoder.run(memory, feed);
}

void init(Decoder* self, std::vector<std::shared_ptr<Block>> blocks, std::shared_ptr<Head> head, nb::handle embedding) {
    std::optional<Tensor> table;
    if (!embedding.is_none()) table = tensor("embedding", embedding);
    new (self) Decoder(std::move(blocks), std::move(head), table);
}

}  // namespace

void bind_decoder(nb::module_& m) {
    nb::class_<Decoder>(m, "Decoder", "A model. `embedding` (V, C) stays its owner's; None is the head's matrix.")
        .def("__init__", &init, "blocks"_a, "head"_a, "embedding"_a.none(), nb::keep_alive<1, 4>())
        .def("run", &forward, "memory"_a, "ids"_a, "positions"_a, "counts"_a, "cos"_a, "sin"_a, "views"_a,
             "at"_a.none(), "logits"_a, "queries"_a.none(), "mass"_a.none(), "first_layer"_a = 0, "last_layer"_a = -1,
             "x"_a = nb::none(), "exact"_a = false, "keep"_a = 0,
             "A pass of tokens (B, T), counts[b] of row b from positions[b] on, over the pages of each layer. A view "
             "is (layers, units (B, P), (B, G, P) or (layers, B, G, P), starts (B), sinks, window, coarse (B) or [], search: "
             "first, last and picks (B) or three []). "
             "Out: `logits` (B, J, V) of columns `at` (B, J), `queries` (L, B, T, H, D) rotated, `mass` (L, B, G, P). "
             "Some layers only: the residual stream stays in `x` (B, T, C). For offloaded memory: keys before the "
             "starts are committed if `exact`, and the `keep` pages of most mass stay at hand.");
}

}  // namespace triforce
