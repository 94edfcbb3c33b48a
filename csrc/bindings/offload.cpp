#include <memory>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

#include <nanobind/nanobind.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "../memory.hpp"
#include "../offloaded_pass.hpp"
#include "arguments.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace triforce {
namespace {

void init_memory_store(Store* self, TensorArg memory) {
    new (self) Store(reinterpret_cast<char*>(tensor("memory", memory).as<uint8_t>({-1})));
}

void init_offload(Offload* self, TensorArg arena, bool is_bf16, bool coded, bool hadamard, int layers, int heads,
                  int dim, int64_t pages, int64_t frames, int64_t buffers, int64_t buffer_frames,
                  std::shared_ptr<Store> store, TensorArg attention_sink_logits, float score_cap) {
    require(layers > 0 && heads > 0 && pages > 1 && frames > 1 && buffers > 1 && buffer_frames > 0,
            "there must be layers, heads, pages beyond the scratch page, frames and buffers");
    require(dim > 0 && dim % 16 == 0 && dim <= largest_dim, "dim must be a multiple of 16, at most 256");
    const Type type = is_bf16 ? Type::bf16 : Type::f32;
    Pages page_shape{};
    page_shape.type = type, page_shape.dim = dim, page_shape.coded = coded;
    const int64_t page = page_shape.page_bytes(), arena_frames = frames + buffers * buffer_frames;
    require(arena_frames < INT32_MAX, "frames must be fewer than 2^31");
    char* data = reinterpret_cast<char*>(tensor("arena", arena).as<uint8_t>({arena_frames * page}));
    require(reinterpret_cast<uintptr_t>(data) % sector == 0 && frames * page % sector == 0 &&
            buffer_frames * page % sector == 0, "arena, frames and buffers must begin at sectors");
    prefer_huge_pages(data, arena_frames * page);
    int query_heads = 0;
    const float* logits = nullptr;
    if (!attention_sink_logits.is_none()) {
        const Tensor logits_tensor = tensor("attention_sink_logits", attention_sink_logits);
        logits = logits_tensor.as<float>({layers, -1});
        query_heads = static_cast<int>(logits_tensor[1]);
    }
    new (self) Offload({type, layers, heads, dim, pages, coded, hadamard, logits, query_heads, score_cap},
                       {data, static_cast<int32_t>(frames), buffers, buffer_frames}, std::move(store));
}

void check_pages(const Offload& memory, const std::vector<int64_t>& pages) {
    for (int64_t page : pages) require(0 < page && page < memory.layer(0).count, "pages must be of this memory");
}

/// An OffloadedPass whose layers Python calls one by one. The store is also read between these calls.
class LayerwisePass {
  public:
    using ListsArg = std::tuple<TensorArg, std::vector<int64_t>>;  // page list of a layer, and its starts

    LayerwisePass(Offload& memory, int first_layer, const std::vector<ListsArg>& lists, std::vector<int64_t> counts,
                  int64_t width, bool past_committed, int64_t keep)
        : counts_(std::move(counts)), first_(first_layer), next_(first_layer), width_(width) {
        const int last = first_ + static_cast<int>(lists.size());
        require(0 <= first_ && first_ < last && last <= memory.layers(), "there must be such layers");
        for (const auto& [table, starts] : lists) tables_.push_back(nb::borrow(table)), starts_.push_back(starts);
        for (int i = first_; i < last; i++) calls_.push_back(call_of(memory.layer(i), i - first_));
        nb::gil_scoped_release release;
        pass_.emplace(memory, calls_.data(), calls_.data() + calls_.size(), past_committed, keep).start();
    }

    void attend(int layer, TensorArg q, TensorArg out, TensorArg mass) {
        require(layer == next_ && layer - first_ < static_cast<int>(calls_.size()), "layers must come in their order");
        Attention& call = calls_[layer - first_];
        const Pages& pages = *call.pages;
        const Tensor queries = tensor("q", q);
        call.q = queries.as(pages.type, {call.rows, width_, -1, pages.dim});
        require(queries[2] > 0 && queries[2] % pages.heads == 0, "query heads must be a multiple of the KV heads");
        require(!pages.attention_sink_logits || queries[2] == pages.query_heads, "each query head has a sink logit");
        call.heads = static_cast<int>(queries[2]);
        call.out = tensor("out", out).as(pages.type, {call.rows, width_, call.heads, pages.dim});
        if (!mass.is_none()) call.mass = tensor("mass", mass).as<float>({call.rows, pages.heads, call.list_length});
        next_++;
        nb::gil_scoped_release release;
        pass_->attend(call);
    }

  private:
    Attention call_of(const Pages& pages, int i) const {
        const Tensor table = tensor("lists", tables_[i]);
        const bool by_head = table.dims == 3;
        const int64_t B = static_cast<int64_t>(counts_.size()), G = pages.heads, P = table.shape[by_head ? 2 : 1];
        require(static_cast<int64_t>(starts_[i].size()) == B, "starts and counts must have one number for each row");
        Attention call{};
        call.pages = &pages, call.rows = B, call.width = width_, call.heads = pages.query_heads;
        call.starts = starts_[i].data(), call.counts = counts_.data();
        call.lists = by_head ? table.as<int32_t>({B, G, P}) : table.as<int32_t>({B, P});
        call.head_stride = by_head ? P : 0, call.row_stride = by_head ? G * P : P, call.list_length = P;
        triforce::check(call);
        return call;
    }

    std::vector<nb::object> tables_;
    std::vector<std::vector<int64_t>> starts_;
    const std::vector<int64_t> counts_;
    const int first_;
    int next_;
    const int64_t width_;
    std::vector<Attention> calls_;
    std::optional<OffloadedPass> pass_;
};

}  // namespace

void bind_offload(nb::module_& m) {
    nb::exception<OffloadError>(m, "OffloadError");
    nb::class_<Store>(m, "Store",
                      "The store of pages that memory has no room for: an open file, or memory (bytes) uint8.")
        .def(nb::init<int, int, int64_t>(), "file"_a, "direct"_a, "bytes"_a,
             "A file of `bytes` bytes. `direct`: the same file, opened for reads that bypass the page cache; or -1.")
        .def("__init__", &init_memory_store, "memory"_a, nb::keep_alive<1, 2>())
        .def("limit", &Store::limit, "bytes_per_second"_a, "Limit all reads together to this rate; 0: no limit.")
        .def_prop_ro("bytes_read", &Store::bytes_read, "Bytes read from the store.");
    nb::class_<Offload>(m, "Offload",
                        "KV memory of layers whose pages lie in a store or in frames of an arena (bytes) uint8.")
        .def("__init__", &init_offload, nb::kw_only(), "arena"_a, "is_bf16"_a, "coded"_a, "hadamard"_a, "layers"_a,
             "heads"_a, "dim"_a, "pages"_a, "frames"_a, "buffers"_a, "buffer_frames"_a, "store"_a,
             "attention_sink_logits"_a = nb::none(), "score_cap"_a = 0.0f, nb::keep_alive<1, 2>(),
             nb::keep_alive<1, 14>(),
             "attention_sink_logits (layers, H) float32 and score_cap: see Pages.")
        .def("layer", &Offload::layer, "i"_a, nb::rv_policy::reference_internal, "The pages of a layer.")
        .def("prefer",
             [](Offload& self, const std::vector<bool>& layers) {
                 require(static_cast<int64_t>(layers.size()) == self.layers(), "there must be one bool for each layer");
                 self.prefer(layers);
             }, "layers"_a, "Set the layers that stay in memory whole, one bool for each layer.")
        .def("reserve",
             [](Offload& self, const std::vector<int64_t>& pages) {
                 check_pages(self, pages);
                 nb::gil_scoped_release release;
                 self.reserve(pages);
             }, "pages"_a, "Make room in the store for these pages.")
        .def("commit",
             [](Offload& self, int layer, const std::vector<int64_t>& pages) {
                 require(0 <= layer && layer < self.layers(), "there must be such a layer");
                 check_pages(self, pages);
                 nb::gil_scoped_release release;
                 self.commit(layer, pages);
             }, "layer"_a, "pages"_a, "Write pages, which are full of committed tokens, to the store.")
        .def("forget",
             [](Offload& self, const std::vector<int64_t>& pages) {
                 check_pages(self, pages);
                 self.forget(pages);
             }, "pages"_a, "Drop these pages.")
        .def_prop_ro("page_counts",
             [](const Offload& self) {
                 const Offload::PageCounts counts = self.page_counts();
                 return std::tuple{counts.read_ahead, counts.read_on_demand, counts.kept};
             }, "Counts of pages of a KV head: read ahead, read on demand, and kept in memory after being read ahead.");
    nb::class_<LayerwisePass>(m, "LayerwisePass",
                              "A forward pass over some layers of an offloaded memory that goes layer by layer. It "
                              "reads ahead from the start.\n\nlists: page list of each layer, int32 (B, U) or (B, G, "
                              "U), and its starts (B). exact: whether keys before the starts are committed. keep: "
                              "pages of most attention mass that stay in memory, per row, layer and KV head.")
        .def(nb::init<Offload&, int, const std::vector<LayerwisePass::ListsArg>&, std::vector<int64_t>, int64_t, bool,
                      int64_t>(),
             nb::kw_only(), "memory"_a, "first_layer"_a, "lists"_a, "counts"_a, "width"_a, "exact"_a, "keep"_a,
             nb::keep_alive<1, 2>())
        .def("attend", &LayerwisePass::attend, "layer"_a, "q"_a, "out"_a, "mass"_a = nb::none(),
             "Attend in the next layer with q (B, T, H, D). Out: out (B, T, H, D), mass (B, G, U) float32.");
}

}  // namespace triforce
