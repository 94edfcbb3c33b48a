#include "../peaks.hpp"

#include "low_bit_simd.hpp"
#include "step.hpp"

namespace triforce::TF_LEVEL {
namespace {

#if TF_SIMD_AVX512
constexpr int chains = 12;  // as many as hide the latency of an addition, all of them in registers
#else
constexpr int chains = 6;
#endif

/// Products of what `load` reads: the compiler does not know that it is the same each round. `dot` adds one to a sum.
template <class Acc, class Load, class Dot>
TF_INLINE void run_chains(int64_t rounds, Acc start, Load load, Dot dot) {
    alignas(64) static const int32_t numbers[16] = {};
    const int32_t* at = numbers;
    Acc acc[chains];
    for (Acc& each : acc) each = start;
    for (int64_t round = 0; round < rounds; round++) {
        asm volatile("" : "+r"(at));
        const auto x = load(at);
        for (Acc& each : acc) each = dot(each, x);
    }
    for (Acc each : acc) asm volatile("" : "+m"(each));  // a copy, so that the sums stay in registers before
}

int64_t run(Arithmetic arithmetic, int64_t rounds) {
    const int64_t products = rounds * chains * 16 * 2;
    const Ints none = zeros();
    switch (arithmetic) {
        case Arithmetic::float32:
            run_chains(rounds, zero(), [](const int32_t* at) { return load(reinterpret_cast<const float*>(at)); },
                       [](F16 acc, F16 x) { return dot(acc, x, x); });
            return products;
        case Arithmetic::bfloat16:
            run_chains(rounds, zero(), [](const int32_t* at) { return load_pairs(reinterpret_cast<const bf16*>(at)); },
                       [](F16 acc, Pairs x) { return dot(acc, x, x); });
            return products * 2;
        case Arithmetic::int16:
            run_chains(rounds, none, [](const int32_t* at) { return load_codes(reinterpret_cast<const uint8_t*>(at)); },
                       [](Ints acc, Codes x) { return dot2(acc, x, x); });
            return products * 2 * lanes / 16;
        case Arithmetic::int8:
            run_chains(rounds, I16{}, [](const int32_t* at) { return load_quads(reinterpret_cast<const int8_t*>(at)); },
                       [](I16 acc, Quads x) { return dot4_unsigned(acc, x, x); });
            return products * 4;
    }
    return 0;
}

}  // namespace

const PeakKernels peak_kernels = {run};

}  // namespace triforce::TF_LEVEL
