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

// The compiler does not know of a hidden operand that it is the same as before.
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

/// Products of x. `dot` adds one to a sum.
template <class Acc, class X, class Dot>
TF_INLINE void run_chains(int64_t rounds, Acc start, X x, Dot dot) {
    Acc acc[chains];
    for (Acc& each : acc) each = start;
    for (int64_t round = 0; round < rounds; round++)
        for (Acc& each : acc) {
            hide(x);
            each = dot(each, x);
        }
    for (Acc each : acc) asm volatile("" : "+m"(each));  // a copy, so that the sums stay in registers before
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
            run_chains(rounds, zeros(), load_codes(numbers), [](Ints acc, Codes x) { return dot2(acc, x, x); });
            return products * 2 * lanes / 16;
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
