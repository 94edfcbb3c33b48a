#include <optional>
#include <tuple>
#include <utility>
#include <vector>

#include <nanobind/nanobind.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "offload.hpp"
#include "tensor.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace triforce {
namespace {

/// A pass over an offloaded memory between whose layers something else is done: the store is read meanwhile.
class LayeredPass {
  public:
    using Seen = std::tuple<nb::object, std::vector<int64_t>>;  // lists, and starts

    LayeredPass(Offload& memory, int first, std::vector<Seen> seen, std::vector<int64_t> counts, int64_t width,
                bool exact, int64_t keep)
        : seen_(std::move(seen)), counts_(std::move(counts)), first_(first), next_(first), width_(width) {
        const int last = first + static_cast<int>(seen_.size());
        check(0 <= first && first < last && last <= memory.layers(), "there must be such layers");
        for (int i = first; i < last; i++) calls_.push_back(call_of(memory.layer(i), seen_[i - first]));
        nb::gil_scoped_release release;
        pass_.emplace(memory, calls_.data(), calls_.data() + calls_.size(), OffloadedPass::How{exact, keep});
    }

    /// Layers come in their order.
    void attend(int layer, nb::handle q, nb::handle mixed, nb::handle mass) {
        check(layer == next_ && layer - first_ < static_cast<int>(calls_.size()), "layers must come in their order");
        Attention& call = calls_[layer - first_];
        const Pages& pages = *call.pages;
        const Type type = pages.is_bf16 ? Type::bf16 : Type::f32;
        const Tensor queries = tensor("q", q);
        queries.expect(type, {call.rows, width_, -1, pages.dim});
        check(queries[2] > 0 && queries[2] % pages.heads == 0, "query heads must be a multiple of the KV heads");
        const Tensor out = tensor("mixed", mixed);
        out.expect(type, {call.rows, width_, queries[2], pages.dim});
        call.heads = static_cast<int>(queries[2]), call.q = queries.data, call.mixed = out.data;
        if (!mass.is_none()) call.mass = tensor("mass", mass).as<float>({call.rows, pages.heads, call.list_length});
        next_++;
        nb::gil_scoped_release release;
        pass_->attend(call);
    }

  private:
    Attention call_of(const Pages& pages, const Seen& seen) const {
        const auto& [lists, starts] = seen;
        const Tensor table = tensor("lists", lists);
        const bool by_head = table.dims == 3;
        const int64_t B = static_cast<int64_t>(counts_.size()), G = pages.heads, P = table.shape[by_head ? 2 : 1];
        check(static_cast<int64_t>(starts.size()) == B, "starts and counts must have one number for each row");
        Attention call{};
        call.pages = &pages, call.rows = B, call.width = width_;
        call.starts = starts.data(), call.counts = counts_.data();
        call.lists = by_head ? table.as<int32_t>({B, G, P}) : table.as<int32_t>({B, P});
        call.head_stride = by_head ? P : 0, call.row_stride = by_head ? G * P : P, call.list_length = P;
        triforce::check(call);
        return call;
    }

    const std::vector<Seen> seen_;
    const std::vector<int64_t> counts_;
    const int first_;
    int next_;
    const int64_t width_;
    std::vector<Attention> calls_;
    std::optional<OffloadedPass> pass_;
};

}  // namespace

void bind_layered_pass(nb::module_& m) {
    nb::class_<LayeredPass>(m, "LayeredPass",
                            "A pass over some layers of an offloaded memory, between which something else is done.\n\n"
                            "lists: of each layer its lists, int32 (B, U) or (B, G, U), and where rows start in them.")
        .def(nb::init<Offload&, int, std::vector<LayeredPass::Seen>, std::vector<int64_t>, int64_t, bool, int64_t>(),
             "memory"_a, "first"_a, "lists"_a, "counts"_a, "width"_a, "exact"_a, "keep"_a, nb::keep_alive<1, 2>())
        .def("attend", &LayeredPass::attend, "layer"_a, "q"_a, "mixed"_a, "mass"_a.none() = nb::none(),
             "The next layer: q and mixed (B, T, H, D), mass (B, G, U).");
}

}  // namespace triforce
