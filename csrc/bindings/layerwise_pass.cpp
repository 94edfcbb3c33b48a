#include <optional>
#include <tuple>
#include <utility>
#include <vector>

#include <nanobind/nanobind.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "../offloaded_pass.hpp"
#include "../tensor.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace triforce {
namespace {

/// An OffloadedPass whose layers Python calls one by one: the store is read between them, too.
class LayerwisePass {
  public:
    using ListsArg = std::tuple<TensorArg, std::vector<int64_t>>;  // of a layer; and its starts

    LayerwisePass(Offload& memory, int first_layer, const std::vector<ListsArg>& lists, std::vector<int64_t> counts,
                  int64_t width, bool exact, int64_t keep)
        : counts_(std::move(counts)), first_(first_layer), next_(first_layer), width_(width) {
        const int last = first_ + static_cast<int>(lists.size());
        check(0 <= first_ && first_ < last && last <= memory.layers(), "there must be such layers");
        for (const auto& [table, starts] : lists) tables_.push_back(nb::borrow(table)), starts_.push_back(starts);
        for (int i = first_; i < last; i++) calls_.push_back(call_of(memory.layer(i), i - first_));
        nb::gil_scoped_release release;
        const AttentionCalls calls{calls_.data(), calls_.data() + calls_.size()};
        pass_.emplace(memory, calls, OffloadedPass::Options{exact, keep}).start();
    }

    void attend(int layer, TensorArg q, TensorArg out, TensorArg mass) {
        check(layer == next_ && layer - first_ < static_cast<int>(calls_.size()), "layers must come in their order");
        Attention& call = calls_[layer - first_];
        const Pages& pages = *call.pages;
        const Type type = pages.is_bf16 ? Type::bf16 : Type::f32;
        const Tensor queries = tensor("q", q), outputs = tensor("out", out);
        queries.expect(type, {call.rows, width_, -1, pages.dim});
        check(queries[2] > 0 && queries[2] % pages.heads == 0, "query heads must be a multiple of the KV heads");
        outputs.expect(type, {call.rows, width_, queries[2], pages.dim});
        call.heads = static_cast<int>(queries[2]), call.q = queries.data, call.out = outputs.data;
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
        check(static_cast<int64_t>(starts_[i].size()) == B, "starts and counts must have one number for each row");
        Attention call{};
        call.pages = &pages, call.rows = B, call.width = width_;
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

void bind_layerwise_pass(nb::module_& m) {
    nb::class_<LayerwisePass>(m, "LayerwisePass",
                              "A forward pass over some layers of an offloaded memory that goes layer by layer.\n\nIt "
                              "reads ahead from the start. lists: of each layer its lists, int32 (B, U) or (B, G, U), "
                              "and its starts (B).")
        .def(nb::init<Offload&, int, const std::vector<LayerwisePass::ListsArg>&, std::vector<int64_t>, int64_t, bool,
                      int64_t>(),
             nb::kw_only(), "memory"_a, "first_layer"_a, "lists"_a, "counts"_a, "width"_a, "exact"_a, "keep"_a,
             nb::keep_alive<1, 2>())
        .def("attend", &LayerwisePass::attend, "layer"_a, "q"_a, "out"_a, "mass"_a = nb::none(),
             "Attend in the next layer with q (B, T, H, D). Out: out (B, T, H, D), mass (B, G, U) float32.");
}

}  // namespace triforce
