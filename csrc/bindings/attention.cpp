#include <algorithm>
#include <tuple>
#include <vector>

#include <nanobind/nanobind.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "../attention.hpp"
#include "../memory.hpp"
#include "../offloaded_pass.hpp"
#include "../search.hpp"
#include "../topk.hpp"
#include "../write.hpp"
#include "arguments.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace triforce {
namespace {

using Ints = std::vector<int64_t>;
using SearchArg = std::tuple<Ints, Ints, Ints>;  // first, last and picks of a Search

Copies copies_over(const Pages& pages, TensorArg keys, TensorArg values, TensorArg scales) {
    const int64_t G = pages.heads, P = pages.count, E = pages.page_numbers();
    int8_t* k = tensor("int8_keys", keys).as<int8_t>({G, P, E});
    int8_t* v = tensor("int8_values", values).as<int8_t>({G, P, E});
    prefer_huge_pages(k, G * P * E), prefer_huge_pages(v, G * P * E);
    auto* s = reinterpret_cast<PageScales*>(tensor("scales", scales).as<float>({G, P, 2}));
    std::fill_n(s, G * P, PageScales{-1, -1});
    return {reinterpret_cast<char*>(k), reinterpret_cast<char*>(v), s};
}

Sketches sketches_over(const Pages& pages, TensorArg rotation, TensorArg sketches) {
    const int64_t D = pages.dim;
    auto* to = reinterpret_cast<uint16_t*>(tensor("sketches", sketches).as<bf16>({pages.heads, pages.count, D + 16}));
    require(rotation.is_none() == pages.hadamard, "sketches need a rotation unless heads are rotated already");
    return {pages.hadamard ? nullptr : tensor("rotation", rotation).as<float>({D, D}), to};
}

void check_dim(int64_t dim) {
    require(dim > 0 && dim % 16 == 0 && dim <= largest_dim, "head_dim must be a multiple of 16, at most 256");
}

Pages coded_pages_over(TensorArg codes, int64_t dim, bool is_bf16, bool hadamard) {
    check_dim(dim);
    Pages pages{is_bf16 ? Type::bf16 : Type::f32, 0, static_cast<int>(dim), 0, nullptr, nullptr, {}, {}, 0};
    pages.coded = true, pages.hadamard = hadamard;
    pages.pitch = pages.page_bytes();
    const Tensor c = tensor("codes", codes);
    c.expect(Type::i8, {-1, -1, pages.pitch});
    require(c[0] > 0 && c[1] > 1, "codes must have heads, and pages beyond the scratch page");
    prefer_huge_pages(c.data, c[0] * c[1] * c[2]);
    pages.heads = static_cast<int>(c[0]), pages.count = c[1];
    pages.keys = static_cast<char*>(c.data);
    return pages;
}

Pages pages_over(TensorArg keys, TensorArg values, int64_t dim) {
    check_dim(dim);
    const Tensor k = tensor("keys", keys), v = tensor("values", values);
    require(k.type == Type::bf16 || k.type == Type::f32, "keys must be bfloat16 or float32");
    k.expect(k.type, {-1, -1, page_size * dim});
    v.expect(k.type, {k[0], k[1], k[2]});
    require(k[0] > 0 && k[1] > 1, "keys must have heads, and pages beyond the scratch page");
    const size_t bytes = k[0] * k[1] * k[2] * size_of(k.type);
    prefer_huge_pages(k.data, bytes), prefer_huge_pages(v.data, bytes);
    Pages pages{k.type, static_cast<int>(k[0]), static_cast<int>(dim), k[1], static_cast<char*>(k.data),
                static_cast<char*>(v.data), {}, {}, 0};
    pages.pitch = pages.part_bytes();
    return pages;
}

/// Sets sketches, sink logits and score cap.
void set_attention(Pages& pages, TensorArg rotation, TensorArg sketches, TensorArg attention_sink_logits,
                   float score_cap) {
    pages.score_cap = score_cap;
    if (!sketches.is_none()) pages.sketches = sketches_over(pages, rotation, sketches);
    if (attention_sink_logits.is_none()) return;
    const Tensor logits = tensor("attention_sink_logits", attention_sink_logits);
    pages.attention_sink_logits = logits.as<float>({-1});
    pages.query_heads = static_cast<int>(logits[0]);
}

void init_pages(Pages* self, TensorArg keys, TensorArg values, int64_t dim, TensorArg rotation, TensorArg sketches,
                TensorArg int8_keys, TensorArg int8_values, TensorArg scales, TensorArg attention_sink_logits,
                float score_cap) {
    Pages pages = pages_over(keys, values, dim);
    set_attention(pages, rotation, sketches, attention_sink_logits, score_cap);
    if (!scales.is_none()) pages.copies = copies_over(pages, int8_keys, int8_values, scales);
    new (self) Pages(pages);
}

void init_coded_pages(Pages* self, TensorArg codes, int64_t dim, bool is_bf16, bool hadamard, TensorArg rotation,
                      TensorArg sketches, TensorArg attention_sink_logits, float score_cap) {
    Pages pages = coded_pages_over(codes, dim, is_bf16, hadamard);
    set_attention(pages, rotation, sketches, attention_sink_logits, score_cap);
    new (self) Pages(pages);
}

const int64_t* checked_slots(const Pages& pages, TensorArg slots, int64_t count) {
    const int64_t* at = tensor("slots", slots).as<int64_t>({count});
    const uint64_t limit = static_cast<uint64_t>(pages.count) * page_size;
    uint64_t largest = 0;  // negative slots are large as unsigned numbers
    for (int64_t i = 0; i < count; i++) largest = std::max(largest, static_cast<uint64_t>(at[i]));
    require(largest < limit, "slots must lie in the pages");
    return at;
}

int query_heads(const Pages& pages, int64_t heads) {
    require(heads > 0 && heads % pages.heads == 0, "query heads must be a multiple of the KV heads");
    return static_cast<int>(heads);
}

const int64_t* checked_positions(const char* name, TensorArg positions, int64_t count, int64_t table) {
    const int64_t* at = tensor(name, positions).as<int64_t>({count});
    for (int64_t i = 0; i < count; i++) require(0 <= at[i] && at[i] < table, "positions must lie in the tables");
    return at;
}

void rope_and_write_tokens(const Pages& pages, TensorArg q, TensorArg k, TensorArg v, TensorArg cos, TensorArg sin,
                           TensorArg positions, TensorArg slots, TensorArg rotated, TensorArg sink_positions,
                           TensorArg q_sinks, int64_t rotation) {
    const Tensor q_tensor = tensor("q", q);
    const float* q_data = q_tensor.as<float>({-1, -1});
    const int64_t N = q_tensor[0], D = pages.dim, kv_size = pages.heads * D;
    require(q_tensor[1] % D == 0, "q must hold whole heads");
    NewTokens tokens{};
    tokens.pages = &pages, tokens.count = N, tokens.heads = query_heads(pages, q_tensor[1] / D);
    const int64_t H = tokens.heads;
    tokens.q = q_data;
    tokens.k = tensor("k", k).as<float>({N, kv_size});
    tokens.v = tensor("v", v).as<float>({N, kv_size});
    const Tensor cos_tensor = tensor("cos", cos);
    const float* cosines = cos_tensor.as<float>({-1, -1});
    const int64_t table = cos_tensor[0], stride = cos_tensor[1];
    const Rotation tables{cosines, tensor("sin", sin).as<float>({table, stride}), stride};
    require(stride % (D / 2) == 0 && 0 <= rotation && rotation < tables.count(D), "the tables must have the rotation");
    tokens.rotation = tables.at(rotation, D);
    tokens.positions = checked_positions("positions", positions, N, table);
    tokens.slots = checked_slots(pages, slots, N);
    tokens.rotated = tensor("rotated", rotated).as(pages.type, {N, H, D});
    if (!q_sinks.is_none()) {
        tokens.sink_positions = checked_positions("sink_positions", sink_positions, N, table);
        tokens.q_sinks = tensor("q_sinks", q_sinks).as(pages.type, {N, H, D});
    }
    nb::gil_scoped_release release;
    rope_and_write(tokens);
}

template <bool reads>
void copy_tokens(const Pages& pages, TensorArg slots, TensorArg k, TensorArg v) {
    const Tensor k_tensor = tensor("k", k);
    const int64_t count = k_tensor.dims ? k_tensor[0] : 0;
    const Type type = pages.coded ? Type::i8 : pages.type;
    const int64_t row = pages.row_bytes() / (pages.coded ? 1 : size_of(type));
    void* k_data = k_tensor.as(type, {count, pages.heads, row});
    void* v_data = tensor("v", v).as(type, {count, pages.heads, row});
    const int64_t* at = checked_slots(pages, slots, count);
    nb::gil_scoped_release release;
    if (Offload* offload = pages.offload)
        return reads ? offload->read(pages.layer, at, count, k_data, v_data)
                     : offload->write(pages.layer, at, count, k_data, v_data);
    reads ? read(pages, at, count, k_data, v_data) : write(pages, at, count, k_data, v_data);
}

void attend_pages(const Pages& pages, TensorArg q, const Ints& starts, const Ints& counts, TensorArg lists,
                  TensorArg out, TensorArg mass, TensorArg q_sinks, int64_t sinks, int64_t window, const Ints& coarse,
                  const SearchArg& search_arg) {
    const Tensor q_tensor = tensor("q", q), list_tensor = tensor("lists", lists);
    const bool by_head = list_tensor.dims == 3;
    Attention call{};
    call.pages = &pages;
    call.q = q_tensor.as(pages.type, {-1, -1, -1, pages.dim});
    const int64_t B = q_tensor[0], T = q_tensor[1], G = pages.heads, P = list_tensor.shape[by_head ? 2 : 1];
    require(static_cast<int64_t>(starts.size()) == B && static_cast<int64_t>(counts.size()) == B,
            "starts and counts must have one number for each row");
    require(coarse.empty() || coarse.size() == starts.size(), "coarse must have one number for each row, or none");
    call.rows = B, call.width = T, call.heads = query_heads(pages, q_tensor[2]);
    call.starts = starts.data(), call.counts = counts.data();
    call.lists = by_head ? list_tensor.as<int32_t>({B, G, P}) : list_tensor.as<int32_t>({B, P});
    call.head_stride = by_head ? P : 0, call.row_stride = by_head ? G * P : P, call.list_length = P;
    call.out = tensor("out", out).as(pages.type, {B, T, call.heads, pages.dim});
    if (!mass.is_none()) call.mass = tensor("mass", mass).as<float>({B, G, P});
    if (!q_sinks.is_none()) call.q_sinks = tensor("q_sinks", q_sinks).as(pages.type, {B, T, call.heads, pages.dim});
    call.sinks = sinks, call.window = window;
    if (!coarse.empty()) call.coarse = coarse.data();
    check(call);
    const auto& [first, last, picks] = search_arg;
    const Search search{first, last, picks};
    if (!picks.empty()) check(search, call);
    nb::gil_scoped_release release;
    if (!pages.offload) return picks.empty() ? attend(call) : search_and_attend(search, call);
    OffloadedPass pass(*pages.offload, &call, &call + 1, false, 0);
    pass.start();
    pass.attend(call);
}

void topk_ids(TensorArg scores, int64_t start, int64_t stop, TensorArg ids) {
    const Tensor s = tensor("scores", scores), out = tensor("ids", ids);
    const float* from = s.as<float>({-1, -1});
    int64_t* to = out.as<int64_t>({s[0], -1});
    require(0 <= start && start <= stop && stop <= s[1], "start and stop must lie in the scores");
    require(out[1] <= stop - start, "ids must not be more than there are candidates");
    nb::gil_scoped_release release;
    topk({from, s[0], s[1], start, stop - start, out[1], to});
}

}  // namespace

void bind_attention(nb::module_& m) {
    nb::class_<Pages>(m, "Pages",
                      "The K and V memory of one layer, (G, pages, 16 * head_dim) each, borrowed.\n\nFor searches: "
                      "`rotation` (D, D) float32, orthogonal, and `sketches` (G, pages, D + 16) bfloat16, zeros at "
                      "first.\nFor int8 copies: int8_keys and int8_values, shaped as the keys, and `scales` (G, pages, "
                      "2) float32.\nattention_sink_logits (H) float32: one logit per query head in the softmax's "
                      "denominator. score_cap: cap of scores; 0: no cap.")
        .def("__init__", &init_pages, "keys"_a, "values"_a, "head_dim"_a, "rotation"_a = nb::none(),
             "sketches"_a = nb::none(), "int8_keys"_a = nb::none(), "int8_values"_a = nb::none(),
             "scales"_a = nb::none(), "attention_sink_logits"_a = nb::none(), "score_cap"_a = 0.0f,
             nb::keep_alive<1, 2>(), nb::keep_alive<1, 3>(), nb::keep_alive<1, 5>(), nb::keep_alive<1, 6>(),
             nb::keep_alive<1, 7>(), nb::keep_alive<1, 8>(), nb::keep_alive<1, 9>(), nb::keep_alive<1, 10>())
        .def("__init__", &init_coded_pages, "codes"_a, "head_dim"_a, nb::kw_only(), "is_bf16"_a,
             "hadamard"_a, "rotation"_a = nb::none(), "sketches"_a = nb::none(), "attention_sink_logits"_a = nb::none(),
             "score_cap"_a = 0.0f, nb::keep_alive<1, 2>(), nb::keep_alive<1, 6>(), nb::keep_alive<1, 7>(),
             nb::keep_alive<1, 8>(),
             "K and V as int8 with scales: `codes` (G, pages, 32 * head_dim + 64) int8. Queries and outputs are "
             "bfloat16 or float32. Tokens are copied as (N, G, D + 2) int8: codes, then a scale of "
             "bfloat16.\n\nhadamard: heads are rotated by Hadamard matrices before rounding, and so are queries; "
             "outputs are rotated back.")
        .def("rope_and_write", &rope_and_write_tokens, "q"_a, "k"_a, "v"_a, "cos"_a, "sin"_a, "positions"_a, "slots"_a,
             "rotated"_a, "sink_positions"_a = nb::none(), "q_sinks"_a = nb::none(), "rotation"_a = 0,
             "Rotate q (N, H * D) and k (N, G * D) to `positions` (N) int64, and write k and v (N, G * D) to `slots` "
             "(N) int64.\n\ncos and sin (S, R * D / 2): tables of R rotations; rotation: index of the layer's "
             "rotation.\nOut: `rotated` (N, H, D): queries; q_sinks (N, H, D): queries rotated to sink_positions (N) "
             "int64.")
        .def("read", &copy_tokens<true>, "slots"_a, "k"_a, "v"_a, "Copy tokens of `slots` out to k and v (N, G, D).")
        .def("write", &copy_tokens<false>, "slots"_a, "k"_a, "v"_a,
             "Copy tokens k and v (N, G, D) into `slots`; keys are rotated.")
        .def("attend", &attend_pages, "q"_a, "starts"_a, "counts"_a, "lists"_a, "out"_a, "mass"_a = nb::none(),
             "q_sinks"_a = nb::none(), "sinks"_a = 0, "window"_a = 0, "coarse"_a = Ints(),
             "search"_a = SearchArg(),
             "Attend with q (B, T, H, D) to the pages of `lists` (B, P) or (B, G, P) int32.\n\nOut: `out` (B, T, H, D) "
             "and `mass` (B, G, P) float32. Keys of row b below coarse[b], in whole blocks of 64, are read from int8 "
             "copies, or by upper nibbles if KV is int8. search: first, last and picks (B). Of the pages [first[b], "
             "last[b]) of row b's list, each KV head sees the picks[b] pages nearest to its queries.");
    m.def("topk", &topk_ids, "scores"_a, "start"_a, "stop"_a, "ids"_a,
          "Write the columns in [start, stop) of the highest scores (G, N) to `ids` (G, picks) int64, ascending. Among "
          "equal scores the lowest columns win.");
}

}  // namespace triforce
