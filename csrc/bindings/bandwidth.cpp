// Reads memory and nothing else: the bandwidth that other kernels are measured against.

#include <algorithm>
#include <cstdint>
#include <vector>

#include <nanobind/nanobind.h>

#include "../tensor.hpp"
#include "../threads.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace triforce {
namespace {

constexpr int64_t chunk_words = 1 << 17;  // a megabyte

/// The exclusive or of all words, so that each of them is read.
uint64_t read(TensorArg words_object) {
    const Tensor tensor_ = tensor("words", words_object);
    const int64_t* words = tensor_.as<int64_t>({-1});
    const int64_t count = tensor_[0], chunks = (count + chunk_words - 1) / chunk_words;
    const nb::gil_scoped_release released;
    std::vector<uint64_t> sums(chunks);
    parallel(static_cast<int>(chunks), [&](int chunk) {
        const int64_t first = chunk * chunk_words, last = std::min(count, first + chunk_words);
        uint64_t lanes[32] = {};
        int64_t i = first;
        for (; i + 32 <= last; i += 32)
            for (int lane = 0; lane < 32; lane++) lanes[lane] ^= static_cast<uint64_t>(words[i + lane]);
        for (; i < last; i++) lanes[0] ^= static_cast<uint64_t>(words[i]);
        for (const uint64_t lane : lanes) sums[chunk] ^= lane;
    });
    uint64_t all = 0;
    for (const uint64_t sum : sums) all ^= sum;
    return all;
}

}  // namespace

void bind_bandwidth(nb::module_& m) {
    m.def("read", &read, "words"_a, "Read words (N) int64 at the bandwidth of memory. Returns their exclusive or.");
}

}  // namespace triforce
