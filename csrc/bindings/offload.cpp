#include <memory>
#include <vector>

#include <nanobind/nanobind.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "../memory.hpp"
#include "../offload.hpp"
#include "../tensor.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace triforce {
namespace {

void init_memory_store(Store* self, TensorArg memory) {
    const Tensor bytes = tensor("memory", memory);
    bytes.expect(Type::u8, {-1});
    new (self) Store(static_cast<char*>(bytes.data));
}

void init_offload(Offload* self, TensorArg arena, bool is_bf16, int layers, int heads, int dim, int64_t pages,
                  int64_t frames, int64_t buffers, int64_t buffer_frames, std::shared_ptr<Store> store) {
    check(layers > 0 && heads > 0 && pages > 1 && frames > 1 && buffers > 1 && buffer_frames > 0,
          "there must be layers, heads, pages beyond the scratch page, frames and buffers");
    check(dim > 0 && dim % 16 == 0 && dim <= largest_dim, "dim must be a multiple of 16, at most 256");
    const int64_t page = int64_t{2} * page_size * dim * (is_bf16 ? 2 : 4), all = frames + buffers * buffer_frames;
    check(all < INT32_MAX, "frames must be fewer than 2^31");
    const Tensor bytes = tensor("arena", arena);
    bytes.expect(Type::u8, {all * page});
    check(reinterpret_cast<uintptr_t>(bytes.data) % sector == 0 && frames * page % sector == 0 &&
          buffer_frames * page % sector == 0, "arena, frames and buffers must begin at sectors");
    prefer_huge_pages(bytes.data, all * page);
    new (self) Offload({is_bf16, layers, heads, dim, pages},
                       {static_cast<char*>(bytes.data), static_cast<int32_t>(frames), buffers, buffer_frames},
                       std::move(store));
}

void check_pages(const Offload& memory, const std::vector<int64_t>& pages) {
    for (int64_t page : pages) check(0 < page && page < memory.layer(0).count, "pages must be of this memory");
}

}  // namespace

void bind_offload(nb::module_& m) {
    nb::exception<OffloadError>(m, "OffloadError");
    nb::class_<Store>(m, "Store",
                      "The store of pages that memory has no room for: an open file, or memory (bytes) uint8.")
        .def(nb::init<int, int, int64_t>(), "file"_a, "direct"_a, "bytes"_a,
             "A file of so many bytes. `direct`: the same file, opened for reads that bypass the page cache; or -1.")
        .def("__init__", &init_memory_store, "memory"_a, nb::keep_alive<1, 2>())
        .def("limit", &Store::limit, "bytes_per_second"_a, "Slow reads down to this rate; 0 is no limit.")
        .def_prop_ro("bytes_read", &Store::bytes_read, "Bytes read from the store.");
    nb::class_<Offload>(m, "Offload",
                        "KV memory of all layers, whose pages lie in a store or in frames of an arena (bytes) uint8.")
        .def("__init__", &init_offload, nb::kw_only(), "arena"_a, "is_bf16"_a, "layers"_a, "heads"_a, "dim"_a,
             "pages"_a, "frames"_a, "buffers"_a, "buffer_frames"_a, "store"_a, nb::keep_alive<1, 2>())
        .def("layer", &Offload::layer, "i"_a, nb::rv_policy::reference_internal, "The pages of a layer.")
        .def("prefer",
             [](Offload& self, const std::vector<bool>& layers) {
                 check(static_cast<int64_t>(layers.size()) == self.layers(), "there must be one bool for each layer");
                 self.prefer(layers);
             }, "layers"_a, "Keep the layers that are true in memory whole.")
        .def("reserve",
             [](Offload& self, const std::vector<int64_t>& pages) {
                 check_pages(self, pages);
                 nb::gil_scoped_release release;
                 self.reserve(pages);
             }, "pages"_a, "Make room in the store for these pages.")
        .def("commit",
             [](Offload& self, int layer, const std::vector<int64_t>& pages) {
                 check(0 <= layer && layer < self.layers(), "there must be such a layer");
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
             }, "Pages of a KV head that were read ahead, read on demand, and kept in memory after being read ahead.");
}

}  // namespace triforce
