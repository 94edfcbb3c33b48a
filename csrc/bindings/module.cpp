#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <iterator>
#include <string>
#include <string_view>
#include <vector>

#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "../cpus.hpp"
#include "../peaks.hpp"
#include "../simd_dispatch.hpp"
#include "../threads.hpp"
#include "arguments.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace triforce {

void bind_linear(nb::module_& m);
void bind_experts(nb::module_& m);
void bind_decoder_layer(nb::module_& m);
void bind_attention(nb::module_& m);
void bind_decoder(nb::module_& m);
void bind_eagle_head(nb::module_& m);
void bind_offload(nb::module_& m);
void bind_sampler(nb::module_& m);

namespace {

constexpr int64_t chunk_words = 1 << 17;  // a megabyte

/// Reads memory and nothing else, the reference bandwidth for other kernels. Returns the exclusive or of all words, so
/// that the compiler cannot skip a read.
uint64_t read(TensorArg words_object) {
    const Tensor words_tensor = tensor("words", words_object);
    const int64_t* words = words_tensor.as<int64_t>({-1});
    const int64_t count = words_tensor[0], chunks = (count + chunk_words - 1) / chunk_words;
    const nb::gil_scoped_release released;
    std::vector<uint64_t> sums(chunks);
    parallel(chunks, [&](int chunk) {
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

constexpr int64_t chunk_numbers = 1 << 15;  // an int32 holds the sum of this number of int16

template <class Integer, class Sum>
int64_t sum_of(const char* bytes, int64_t count) {
    Sum sum = 0;
    for (int64_t i = 0; i < count; i++) {
        Integer number;  // it may not be aligned
        std::memcpy(&number, bytes + i * static_cast<int64_t>(sizeof number), sizeof number);
        sum += number;
    }
    return sum;
}

int64_t sum_of_bytes(const char* bytes, int64_t count) {
    constexpr int64_t words = 128;  // 16 bits hold the sum of two bytes of each
    constexpr uint64_t lower_bytes = 0x00ff00ff00ff00ff, lower_halves = 0x0000ffff0000ffff;
    int64_t sum = 0, i = 0;
    for (; i + 8 * words <= count; i += 8 * words) {
        uint64_t halves = 0;  // four sums
        for (int64_t w = 0; w < words; w++) {
            uint64_t word;
            std::memcpy(&word, bytes + i + 8 * w, sizeof word);
            halves += (word & lower_bytes) + (word >> 8 & lower_bytes);
        }
        halves = (halves & lower_halves) + (halves >> 16 & lower_halves);
        sum += static_cast<int64_t>((halves & 0xffffffff) + (halves >> 32));
    }
    return sum + sum_of<uint8_t, int32_t>(bytes + i, count - i);
}

/// Sums integers of `size` bytes, signed if they have several. The sum does not depend on its order.
int64_t bit_sum(TensorArg bytes_object, int64_t size) {
    const Tensor bytes = tensor("bytes", bytes_object);
    const char* from = reinterpret_cast<const char*>(bytes.as<uint8_t>({-1}));
    require(size == 1 || size == 2 || size == 4, "size must be 1, 2 or 4");
    require(bytes[0] % size == 0, "bytes must be whole integers");
    const nb::gil_scoped_release released;
    const int64_t numbers = bytes[0] / size;
    std::atomic<int64_t> total{};
    parallel((numbers + chunk_numbers - 1) / chunk_numbers, [&](int64_t chunk) {
        const int64_t begin = chunk * chunk_numbers, count = std::min(chunk_numbers, numbers - begin);
        const char* at = from + begin * size;
        total += size == 1   ? sum_of_bytes(at, count)
                 : size == 2 ? sum_of<int16_t, int32_t>(at, count)
                             : sum_of<int32_t, int64_t>(at, count);
    });
    return total;
}

/// Computes with all threads, on registers alone.
int64_t compute(const std::string& numbers, int64_t rounds) {
    constexpr std::string_view names[] = {"float32", "bfloat16", "int16", "int8"};
    const auto* name = std::find(std::begin(names), std::end(names), numbers);
    require(name != std::end(names), "numbers must be float32, bfloat16, int16 or int8");
    const auto arithmetic = static_cast<Arithmetic>(name - std::begin(names));
    const nb::gil_scoped_release released;
    std::atomic<int64_t> operations{};
    parallel(threads(), [&](int64_t) { operations += peak_kernels().run(arithmetic, rounds); });
    return operations;
}

}  // namespace

NB_MODULE(_native, m) {
    nb::set_leak_warnings(false);  // a daemon thread that ends with its program never frees its objects
    m.doc() = "CPU kernels of triforce. A row's result depends on that row alone, bit for bit.";
    m.def("levels", &usable_levels, "Instruction-set levels that this CPU can run, slowest first.");
    m.def("level", &level_name, "Name of the instruction-set level in use.");
    m.def("use", &use, "level"_a, "Use one level from now on; ValueError if it is unknown or this CPU cannot run it.");
    m.def("threads", &threads, "Number of threads of a kernel.");
    m.def("set_threads", &set_threads, "count"_a, nb::call_guard<nb::gil_scoped_release>(),
          "Set the number of threads; ValueError below 1.");
    m.def("usable_cpus", &usable_cpus,
          "Number of CPUs that this process may use: the CPUs of its affinity, or the quota of its control groups, if "
          "smaller.");
    m.def("cpu_quota", &cpu_quota, "root"_a = "",
          "CPU quota of this process's control groups, in CPUs, rounded up; None without a limit. root: folder of "
          "/proc and /sys.");
    bind_linear(m);
    bind_experts(m);
    bind_decoder_layer(m);
    bind_attention(m);
    bind_offload(m);
    bind_sampler(m);
    bind_decoder(m);
    bind_eagle_head(m);
    m.def("read", &read, "words"_a, "Read words (N) int64 at the bandwidth of memory. Returns their exclusive or.");
    m.def("bit_sum", &bit_sum, "bytes"_a, "size"_a,
          "Return the sum of bytes (N) uint8: of these numbers, or of the signed integers of `size` bytes, 2 or 4.");
    m.def("compute", &compute, "numbers"_a, "rounds"_a,
          "Multiply and add numbers of a type (float32, bfloat16, int16 or int8) in registers, as products do. Returns "
          "the number of operations.");
}

}  // namespace triforce
