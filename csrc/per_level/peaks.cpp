#include "../peaks.hpp"

#include "low_bit_simd.hpp"
#include "step.hpp"

namespace triforce::TF_LEVEL {
namespace {

// Independent chains, as many as hide the latency of an addition, all in registers. Registers of `Ints` may be half as
// large.
#if TF_SIMD_AVX512
constexpr int chains = 12, int16_chains = 12;
#else
constexpr int chains = 5, int16_chains = 10;
#endif

// Hides an operand from the compiler, which then cannot assume that it is unchanged.
#if TF_SIMD_AVX512
template <class X>
TF_INLINE void hide(X& x) {
    asm volatile("" : "+v"(x.v));
}
#elif TF_SIMD_AVX2
template <class X>
TF_INLINE auto hide(X& x) -> decltype(static_cast<void>(x.v)) {
    asm volatile("" : "+x"(x.v));
}
template <class X>
TF_INLINE auto hide(X& x) -> decltype(static_cast<void>(x.b)) {
    asm volatile("" : "+x"(x.a), "+x"(x.b));
}
#else
template <class X>
TF_INLINE void hide(X& x) {
    asm volatile("" : "+m"(x));
}
#endif

/// Runs `count` chains of `rounds` steps: acc = dot(acc, x).
template <int count = chains, class Acc, class X, class Dot>
TF_INLINE void run_chains(int64_t rounds, Acc start, X x, Dot dot) {
    constexpr auto each = std::make_integer_sequence<int, count>{};
    Acc acc[count];
    unrolled(each, [&](auto i) TF_INLINED { hide(start), acc[i] = start; });
    for (int64_t round = 0; round < rounds; round++)
        unrolled(each, [&](auto i) TF_INLINED { hide(x), acc[i] = dot(acc[i], x); });
    Acc sums[count];  // a copy, so that the sums of the loop stay in registers
    unrolled(each, [&](auto i) TF_INLINED { sums[i] = acc[i]; });
    asm volatile("" : : "r"(sums) : "memory");
}

int64_t run(Arithmetic arithmetic, int64_t rounds) {
    alignas(64) static const uint8_t numbers[64] = {};
    const int64_t products = rounds * chains * 16 * 2;
    switch (arithmetic) {
        case Arithmetic::float32:
            run_chains(rounds, zero(), load(reinterpret_cast<const float*>(numbers)),
                       [](F16 acc, F16 x) { return dot(acc, x, x); });
            return products;
        case Arithmetic::bfloat16:
            run_chains(rounds, zero(), load_pairs<0>(reinterpret_cast<const bf16*>(numbers)),
                       [](F16 acc, auto x) { return dot(acc, x, x); });
            return products * 2 / parts<bf16>;
        case Arithmetic::int16:
            run_chains<int16_chains>(rounds, zeros(), load_codes(numbers),
                                     [](Ints acc, Codes x) { return dot2(acc, x, x); });
            return rounds * int16_chains * lanes * 2 * 2;
        case Arithmetic::int8:
            run_chains(rounds, I16{}, load_quads(reinterpret_cast<const int8_t*>(numbers)),
                       [](I16 acc, Quads x) { return dot4_unsigned(acc, x, x); });
            return products * 4;
    }
    return 0;
}

}  // namespace

const PeakKernels peak_kernels = {run};

}  // namespace triforce::TF_LEVEL
