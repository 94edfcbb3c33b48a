#include <algorithm>
#include <string>
#include <tuple>
#include <vector>

#include <nanobind/nanobind.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "attention.hpp"
#include "best.hpp"
#include "memory.hpp"
#include "offload.hpp"
#include "search.hpp"
#include "tensor.hpp"
#include "write.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace triforce {
namespace {

using Found = std::tuple<std::vector<int64_t>, std::vector<int64_t>, std::vector<int64_t>>;  // as Search

Copies copies_over(const Pages& pages, nb::handle keys, nb::handle values, nb::handle scales) {
    const int64_t G = pages.heads, P = pages.count, E = pages.page_numbers();
    int8_t* k = tensor("int8_keys", keys).as<int8_t>({G, P, E});
    int8_t* v = tensor("int8_values", values).as<int8_t>({G, P, E});
    prefer_huge_pages(k, G * P * E), prefer_huge_pages(v, G * P * E);
    auto* s = reinterpret_cast<PageScales*>(tensor("scales", scales).as<float>({G, P, 2}));
    std::fill_n(s, G * P, PageScales{-1, -1});
    return {reinterpret_cast<char*>(k), reinterpret_cast<char*>(v), s};
}

Sketches sketches_over(const Pages& pages, nb::handle turn, nb::handle words) {
    const int64_t D = pages.dim;
    return {tensor("turn", turn).as<float>({D, D}),
            reinterpret_cast<uint16_t*>(tensor("sketches", words).as<bf16>({pages.heads, pages.count, D + page_size}))};
}

Pages pages_over(nb::handle keys, nb::handle values, int64_t dim) {
    check(dim > 0 && dim % 16 == 0 && dim <= largest_dim, "head_dim must be a multiple of 16, at most 256");
    const Tensor k = tensor("keys", keys), v = tensor("values", values);
    check(k.type == Type::bf16 || k.type == Type::f32, "keys must be bfloat16 or float32");
    k.expect(k.type, {-1, -1, page_size * dim});
    v.expect(k.type, {k[0], k[1], k[2]});
    check(k[0] > 0 && k[1] > 1, "keys must have heads, and pages beyond the scratch page");
    const size_t bytes = static_cast<size_t>(k[0] * k[1] * k[2]) * (k.type == Type::bf16 ? 2 : 4);
    prefer_huge_pages(k.data, bytes), prefer_huge_pages(v.data, bytes);
    Pages pages{k.type == Type::bf16, static_cast<int>(k[0]), static_cast<int>(dim), k[1], static_cast<char*>(k.data),
                static_cast<char*>(v.data), {}, {}, 0};
    pages.pitch = static_cast<int64_t>(pages.page_bytes());
    return pages;
}

void init_pages(Pages* self, nb::handle keys, nb::handle values, int64_t dim, nb::handle turn, nb::handle sketches,
                nb::handle int8_keys, nb::handle int8_values, nb::handle scales) {
    Pages pages = pages_over(keys, values, dim);
    if (!scales.is_none()) pages.copies = copies_over(pages, int8_keys, int8_values, scales);
    if (!sketches.is_none()) pages.sketches = sketches_over(pages, turn, sketches);
    new (self) Pages(pages);
}

Type type_of_pages(const Pages& pages) { return pages.is_bf16 ? Type::bf16 : Type::f32; }

void* data(const Tensor& t, Type type, std::initializer_list<int64_t> shape) {
    t.expect(type, shape);
    return t.data;
}

const int64_t* checked_slots(const Pages& pages, nb::handle slots, int64_t count) {
    const int64_t* at = tensor("slots", slots).as<int64_t>({count});
    const uint64_t limit = static_cast<uint64_t>(pages.count) * page_size;
    uint64_t largest = 0;  // of negative ones, as unsigned, too
    for (int64_t i = 0; i < count; i++) largest = std::max(largest, static_cast<uint64_t>(at[i]));
    check(largest < limit, "slots must lie in the pages");
    return at;
}

int query_heads(const Pages& pages, int64_t heads) {
    check(heads > 0 && heads % pages.heads == 0, "query heads must be a multiple of the KV heads");
    return static_cast<int>(heads);
}

const int64_t* checked_positions(const char* name, nb::handle positions, int64_t count, int64_t table) {
    const int64_t* at = tensor(name, positions).as<int64_t>({count});
    for (int64_t i = 0; i < count; i++) check(0 <= at[i] && at[i] < table, "positions must lie in the tables");
    return at;
}

void write(const Pages& pages, nb::handle q, nb::handle k, nb::handle v, nb::handle cos, nb::handle sin,
           nb::handle positions, nb::handle slots, nb::handle rotated, nb::handle positions_to_sinks,
           nb::handle q_sinks) {
    const Tensor q_tensor = tensor("q", q);
    q_tensor.expect(Type::f32, {-1, -1});
    const int64_t N = q_tensor[0], D = pages.dim, kv_size = pages.heads * D;
    check(q_tensor[1] % D == 0, "q must hold whole heads");
    NewTokens tokens{&pages, N, query_heads(pages, q_tensor[1] / D), static_cast<const float*>(q_tensor.data), nullptr,
                     nullptr, {}, nullptr, nullptr, nullptr, nullptr, nullptr};
    const int64_t H = tokens.heads;
    tokens.k = tensor("k", k).as<float>({N, kv_size});
    tokens.v = tensor("v", v).as<float>({N, kv_size});
    const Tensor cos_tensor = tensor("cos", cos);
    const int64_t table = cos_tensor.dims ? cos_tensor[0] : 0;
    tokens.rotation = {cos_tensor.as<float>({table, D / 2}), tensor("sin", sin).as<float>({table, D / 2})};
    tokens.positions = checked_positions("positions", positions, N, table);
    tokens.slots = checked_slots(pages, slots, N);
    tokens.rotated = data(tensor("rotated", rotated), type_of_pages(pages), {N, H, D});
    if (!q_sinks.is_none()) {
        tokens.positions_to_sinks = checked_positions("positions_to_sinks", positions_to_sinks, N, table);
        tokens.q_sinks = data(tensor("q_sinks", q_sinks), type_of_pages(pages), {N, H, D});
    }
    nb::gil_scoped_release release;
    run(tokens);
}

template <bool reads>
void move_tokens(const Pages& pages, nb::handle slots, nb::handle k, nb::handle v) {
    const Tensor k_tensor = tensor("k", k);
    const int64_t count = k_tensor.dims ? k_tensor[0] : 0;
    void* k_data = data(k_tensor, type_of_pages(pages), {count, pages.heads, pages.dim});
    void* v_data = data(tensor("v", v), type_of_pages(pages), {count, pages.heads, pages.dim});
    const int64_t* at = checked_slots(pages, slots, count);
    nb::gil_scoped_release release;
    if (Offload* home = pages.home)
        return reads ? home->read(pages.layer, at, count, k_data, v_data)
                     : home->put(pages.layer, at, count, k_data, v_data);
    reads ? read(pages, at, count, k_data, v_data) : put(pages, at, count, k_data, v_data);
}

void attend(const Pages& pages, nb::handle q, const std::vector<int64_t>& starts, const std::vector<int64_t>& counts,
            nb::handle lists, nb::handle mixed, nb::handle mass, nb::handle q_sinks, int64_t sinks, int64_t window,
            const std::vector<int64_t>& coarse, const Found& search) {
    const Type type = type_of_pages(pages);
    const Tensor q_tensor = tensor("q", q), list_tensor = tensor("lists", lists);
    q_tensor.expect(type, {-1, -1, -1, pages.dim});
    const bool by_head = list_tensor.dims == 3;
    const int64_t B = q_tensor[0], T = q_tensor[1], G = pages.heads, P = list_tensor.shape[by_head ? 2 : 1];
    check(static_cast<int64_t>(starts.size()) == B && static_cast<int64_t>(counts.size()) == B,
          "starts and counts must have one number for each row");
    check(coarse.empty() || coarse.size() == starts.size(), "coarse must have one number for each row, or none");
    Attention call{};
    call.pages = &pages;
    call.rows = B, call.width = T, call.heads = query_heads(pages, q_tensor[2]);
    call.q = q_tensor.data;
    call.starts = starts.data();
    call.counts = counts.data();
    call.lists = by_head ? list_tensor.as<int32_t>({B, G, P}) : list_tensor.as<int32_t>({B, P});
    call.head_stride = by_head ? P : 0, call.row_stride = by_head ? G * P : P, call.list_length = P;
    call.mixed = data(tensor("mixed", mixed), type, {B, T, call.heads, pages.dim});
    if (!mass.is_none()) call.mass = tensor("mass", mass).as<float>({B, G, P});
    if (!q_sinks.is_none()) call.q_sinks = data(tensor("q_sinks", q_sinks), type, {B, T, call.heads, pages.dim});
    call.sinks = sinks, call.window = window;
    if (!coarse.empty()) call.coarse = coarse.data();
    check(call);
    const Search looked{std::get<0>(search), std::get<1>(search), std::get<2>(search)};
    if (!looked.picks.empty()) check(looked, call);
    nb::gil_scoped_release release;
    if (pages.home) return OffloadedPass(*pages.home, &call, &call + 1, {}).attend(call);
    looked.picks.empty() ? run(call) : run(looked, call);
}

void best(nb::handle scores, int64_t start, int64_t stop, nb::handle ids) {
    const Tensor s = tensor("scores", scores), out = tensor("ids", ids);
    s.expect(Type::f32, {-1, -1});
    out.expect(Type::i64, {s[0], -1});
    check(0 <= start && start <= stop && stop <= s[1], "start and stop must lie in the scores");
    check(out[1] <= stop - start, "ids must not be more than there are candidates");
    nb::gil_scoped_release release;
    run(Best{static_cast<const float*>(s.data), s[0], s[1], start, stop - start, out[1],
             static_cast<int64_t*>(out.data)});
}

}  // namespace

void bind_attention(nb::module_& m) {
    nb::class_<Pages>(m, "Pages",
                      "The K and V memory of one layer, (G, pages, 16 * head_dim) each, and room for sketches (G, pages, "
                      "head_dim + 16) of keys turned by an orthogonal matrix, zeros at first, and for int8 copies with "
                      "their scales (G, pages, 2), if there are to be such; it stays its owner's.")
        .def("__init__", &init_pages, "keys"_a, "values"_a, "head_dim"_a, "turn"_a = nb::none(),
             "sketches"_a = nb::none(), "int8_keys"_a = nb::none(), "int8_values"_a = nb::none(),
             "scales"_a = nb::none(),
             nb::keep_alive<1, 2>(), nb::keep_alive<1, 3>(), nb::keep_alive<1, 5>(), nb::keep_alive<1, 6>(),
             nb::keep_alive<1, 7>(), nb::keep_alive<1, 8>(), nb::keep_alive<1, 9>())
        .def("write", &write, "q"_a, "k"_a, "v"_a, "cos"_a, "sin"_a, "positions"_a, "slots"_a, "rotated"_a,
             "positions_to_sinks"_a = nb::none(), "q_sinks"_a = nb::none(),
             "Rotate q (N, H * D) and k to their positions (N) in the tables (S, D / 2), put k and v (N, G * D) into "
             "their slots (N); `rotated` and `q_sinks` (N, H, D) are out.")
        .def("read", &move_tokens<true>, "slots"_a, "k"_a, "v"_a, "Copy tokens out: k and v (N, G, D).")
        .def("put", &move_tokens<false>, "slots"_a, "k"_a, "v"_a,
             "Copy tokens in, keys rotated before: k and v (N, G, D).")
        .def("attend", &attend, "q"_a, "starts"_a, "counts"_a, "lists"_a, "mixed"_a, "mass"_a = nb::none(),
             "q_sinks"_a = nb::none(), "sinks"_a = 0, "window"_a = 0, "coarse"_a = std::vector<int64_t>(),
             "search"_a = Found(),
             "Queries (B, T, H, D) over page lists (B, P) or (B, G, P); `mixed` (B, T, H, D) and `mass` (B, G, P) "
             "are out. Keys of row b below coarse[b], in whole blocks of 64, are read from int8 copies. In a search, of the "
             "pages [first[b], last[b]) of its list each KV head sees the picks[b] that seem nearest to its queries.");
    m.def("best", &best, "scores"_a, "start"_a, "stop"_a, "ids"_a,
          "The highest of scores (G, N) in [start, stop): `ids` (G, picks) ascending is out; the lowest among equals.");
}

}  // namespace triforce
