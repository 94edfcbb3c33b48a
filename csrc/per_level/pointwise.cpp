#include "../linear.hpp"

#include "activation.hpp"

namespace triforce::TF_LEVEL {
namespace {

template <class T>
void gate_as(Activation activation, const float* gate, const float* up, int64_t n, T* y) {
    for (int64_t i = 0; i < n; i += 16) store(y + i, activated(activation, load(gate + i)) * load(up + i));
}

void gate(Activation activation, const float* gate, const float* up, int64_t n, Type type, void* y) {
    if (type == Type::bf16) return gate_as(activation, gate, up, n, static_cast<bf16*>(y));
    gate_as(activation, gate, up, n, static_cast<float*>(y));
}

template <class T>
void round_as(const float* x, int64_t n, T* y) {
    int64_t i = 0;
    for (; i + 16 <= n; i += 16) store(y + i, load(x + i));
    if (i < n) store(y + i, load_n(x + i, static_cast<int>(n - i)));
}

void round(const float* x, int64_t n, Type type, void* y) {
    if (type == Type::bf16) return round_as(x, n, static_cast<bf16*>(y));
    round_as(x, n, static_cast<float*>(y));
}

F16 sum_of_squares(const float* x, int64_t n) {
    F16 sum = zero();
    int64_t i = 0;
    for (; i + 16 <= n; i += 16) sum = fma(load(x + i), load(x + i), sum);
    if (i < n) {
        const F16 rest = load_n(x + i, static_cast<int>(n - i));
        sum = fma(rest, rest, sum);
    }
    return sum;
}

template <class T>
void scale(const float* x, int64_t n, const float* weight, F16 factor, T* y) {
    int64_t i = 0;
    for (; i + 16 <= n; i += 16) store(y + i, load(x + i) * factor * load(weight + i));
    if (i < n) store(y + i, load_n(x + i, static_cast<int>(n - i)) * factor * load(weight + i));
}

void rms(const float* x, int64_t n, const float* weight, float eps, Type type, void* y) {
    const float mean = reduce_add(sum_of_squares(x, n)) / static_cast<float>(n);
    const F16 factor = set1(1.0f / __builtin_sqrtf(mean + eps));
    if (type == Type::bf16)
        scale(x, n, weight, factor, static_cast<bf16*>(y));
    else
        scale(x, n, weight, factor, static_cast<float*>(y));
}

}  // namespace

const PointwiseKernels pointwise_kernels = {gate, round, rms};

}  // namespace triforce::TF_LEVEL
