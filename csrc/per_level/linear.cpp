#include "../linear.hpp"

#include "low_bit_sum.hpp"
#include "step.hpp"

namespace triforce::TF_LEVEL {
namespace {

// Blocks of a register tile, by its rows: as many as registers hold, which also makes enough chains to hide the latency
// of an addition.
#if TF_SIMD_AVX512
constexpr int tallest = 6;
constexpr int wide[tallest + 1] = {0, 8, 8, 4, 4, 4, 4};
#else
constexpr int tallest = 4;
constexpr int wide[tallest + 1] = {0, 4, 2, 1, 1};
#endif
constexpr int widest = 8;        // blocks of a group where the rows are few enough for a tile of them
constexpr int group = 4;         // blocks of a group otherwise: their part of a panel stays in L2 for all rows
constexpr int64_t panel = 1024;  // inputs

struct Sums {  // of int8 weights: integers, stored as floats' bits
    alignas(64) float of[linear_rows * group * block_size];
};

template <class T>
TF_INLINE Sum<T> load_sum(const float* from) {
    if constexpr (sizeof(T) == 1)
        return load_ints(from);
    else
        return load(from);
}

TF_INLINE uint32_t load_word(const void* from) {
    uint32_t word;
    __builtin_memcpy(&word, from, sizeof word);
    return word;
}

/// A range of inputs for some rows and blocks.
template <class T>
struct Panel {
    const T* x;
    int64_t x_stride;
    const T* w;
    int64_t w_stride;
    int64_t k;
    bool begin;  // of the chains: their sums are still zero
    int blocks;
};

/// Adds to the sums of M rows and B blocks, in registers, and prefetches two blocks from `ahead` meanwhile.
template <class T, int M, int B>
void tile(const Panel<T>& p, int64_t row, int first, const T* ahead, float* sums) {
    const T* x = p.x + row * p.x_stride;
    const T* w = p.w + first * p.w_stride;
    const int stride = p.blocks * block_size;
    sums += row * stride + first * block_size;
    Sum<T> acc[M][B];
    for (int m = 0; m < M; m++)
        for (int b = 0; b < B; b++)
            acc[m][b] = p.begin ? Sum<T>{} : load_sum<T>(sums + m * stride + b * block_size);
    for (int64_t i = 0; i < p.k; i += numbers_of_word<T>) {
        decltype(load_step(w)) step[B];
        for (int b = 0; b < B; b++) step[b] = load_step(w + b * p.w_stride + i * block_size);
        if (B == group) {
            __builtin_prefetch(ahead + i * block_size, 0, 2);
            __builtin_prefetch(ahead + p.w_stride + i * block_size, 0, 2);
        }
        for (int m = 0; m < M; m++) {
            const auto input = spread<T>(load_word(x + m * p.x_stride + i));
            for (int b = 0; b < B; b++) acc[m][b] = dot(acc[m][b], step[b], input);
        }
    }
    for (int m = 0; m < M; m++)
        for (int b = 0; b < B; b++) store(sums + m * stride + b * block_size, acc[m][b]);
}

template <class T, int M>
void add_rows(const Panel<T>& p, int64_t row, const T* ahead, float* sums) {
    constexpr int B = wide[M];
    int b = 0;
    for (; b + B <= p.blocks; b += B) tile<T, M, B>(p, row, b, ahead, sums);
    for (; b < p.blocks; b++) tile<T, M, 1>(p, row, b, ahead, sums);
}

template <class T, int M = 1>
TF_INLINE void add_rows(int rows, const Panel<T>& p, int64_t row, const T* ahead, float* sums) {
    if (rows == M) return add_rows<T, M>(p, row, ahead, sums);
    if constexpr (M < tallest) add_rows<T, M + 1>(rows, p, row, ahead, sums);
}

/// The sums of `rows` rows and some blocks. A panel of k continues each chain from its sum so far.
template <class T>
void sum(const Linear& l, int64_t top, int rows, int64_t first, int blocks, bool last, float* sums) {
    const int64_t stride = block_size * l.weights.inputs;
    const int tiles = (rows + tallest - 1) / tallest;
    for (int64_t k = 0; k < l.weights.inputs; k += panel) {
        const int64_t left = l.weights.inputs - k;
        const int64_t to_next = left > panel ? panel * block_size : last ? 0 : blocks * stride - k * block_size;
        const Panel<T> p{static_cast<const T*>(l.x) + top * l.x_stride + k, l.x_stride,
                         static_cast<const T*>(l.weights.data) + first * stride + k * block_size, stride,
                         left < panel ? left : panel, k == 0, blocks};
        for (int t = 0; t < tiles; t++) {
            const int row = rows * t / tiles, next = rows * (t + 1) / tiles;
            // All but the first tile find their weights in L2. The first two prefetch the next panel meanwhile.
            const T* ahead = tiles > 1 && t < 2 && to_next ? p.w + to_next + 2 * t * stride : p.w;
            add_rows<T>(next - row, p, row, ahead, sums);
        }
    }
}

/// Multiplies the integer sums of int8 weights with the scales of rows and outputs.
void apply_scales(const Linear& l, float* sums, int64_t top, int rows, int64_t first, int blocks) {
    for (int m = 0; m < rows; m++) {
        float of_row;
        const int8_t* x = static_cast<const int8_t*>(l.x) + (top + m) * l.x_stride;
        __builtin_memcpy(&of_row, x + l.weights.inputs, sizeof of_row);
        for (int b = 0; b < blocks; b++, sums += block_size)
            store(sums, floats(load_ints(sums)) * (load(l.weights.scales + (first + b) * block_size) * set1(of_row)));
    }
}

TF_INLINE F16 silu(F16 x) {
    x = max(set1(-88.0f), x);  // exp(88) is finite
    return x / (set1(1.0f) + exp(zero() - x));
}

template <class T>
void finish_swiglu(const Linear& l, const float* sums, int64_t top, int rows, int64_t first, int blocks) {
    for (int m = 0; m < rows; m++) {
        T* y = static_cast<T*>(l.y) + (top + m) * l.y_stride + first / 2 * block_size;
        for (int b = 0; b < blocks; b += 2) {
            const float* gate = sums + (m * blocks + b) * block_size;
            store(y + b / 2 * block_size, silu(load(gate)) * load(gate + block_size));
        }
    }
}

void finish(const Linear& l, const float* sums, int64_t top, int rows, int64_t first, int blocks) {
    for (int m = 0; m < rows; m++) {
        float* y = static_cast<float*>(l.y) + (top + m) * l.y_stride;
        for (int b = 0; b < blocks; b++) {
            const int64_t at = (first + b) * block_size;
            const int lanes = static_cast<int>(l.weights.outputs - at);
            F16 sum = load(sums + (m * blocks + b) * block_size);
            if (l.bias) sum = sum + load(l.bias + at);
            if (l.epilogue == Epilogue::add) sum = load_n(y + at, lanes) + sum;
            store_n(y + at, sum, lanes);
        }
    }
}

/// Writes the sums of some blocks, scales included, of weights of type W.
template <class W>
void sum_all(const Linear& l, int64_t top, int rows, int64_t first, int blocks, bool last, float* sums) {
    sum<W>(l, top, rows, first, blocks, last, sums);
    if constexpr (sizeof(W) == 1) apply_scales(l, sums, top, rows, first, blocks);
}

int blocks_at_once(const Linear& l, int rows) {
    if (l.weights.format != Format::none) return rows <= tallest_low_bit ? linear_rows * group / tallest_low_bit : group;
    return wide[rows < tallest ? rows : tallest] == widest ? widest : group;
}

/// T: type of x and of rounded outputs.
template <class T, class Sum>
void run_as(const Linear& l, int64_t top, int rows, int64_t first, int64_t last, Sum sum) {
    Sums sums;
    const int step = blocks_at_once(l, rows);
    for (int64_t block = first; block < last; block += step) {
        const int blocks = static_cast<int>(last - block < step ? last - block : step);
        sum(l, top, rows, block, blocks, block + step >= last, sums.of);
        if (l.epilogue == Epilogue::swiglu)
            finish_swiglu<T>(l, sums.of, top, rows, block, blocks);
        else
            finish(l, sums.of, top, rows, block, blocks);
    }
}

void run(const Linear& l, int64_t top, int64_t bottom, int64_t first, int64_t last) {
    const bool narrow = l.weights.type == Type::bf16;
    const auto sum = l.weights.format != Format::none ? sum_low_bit
                     : l.weights.scales               ? sum_all<int8_t>
                     : narrow                         ? sum_all<bf16>
                                                      : sum_all<float>;
    const auto run = narrow ? run_as<bf16, decltype(sum)> : run_as<float, decltype(sum)>;
    run(l, top, static_cast<int>(bottom - top), first, last, sum);
}

template <class T>
void quantise_as(const Linear& l, int64_t row, int8_t* to) {
    const T* x = static_cast<const T*>(l.x) + row * l.x_stride;
    const float scale = scale_of<int8_t>(x, l.weights.inputs);
    quantise(x, l.weights.inputs, scale, to);
    __builtin_memcpy(to + l.weights.inputs, &scale, sizeof scale);
}

template <class T>
void quantise_groups(const Linear& l, int64_t row, int8_t* to) {
    const T* x = static_cast<const T*>(l.x) + row * l.x_stride;
    const int64_t inputs = l.weights.inputs;
    auto* codes = reinterpret_cast<int16_t*>(to);
    auto* groups = reinterpret_cast<GroupInput*>(codes + inputs);
    for (int64_t i = 0; i < inputs; i += group_size) groups[i / group_size] = quantise_group(x + i, codes + i);
}

void quantise_rows(const Linear& l, int64_t top, int64_t bottom, int8_t* rows) {
    const bool narrow = l.weights.type == Type::bf16, groups = l.weights.format != Format::none;
    const auto quantise_row = groups ? (narrow ? quantise_groups<bf16> : quantise_groups<float>)
                                     : (narrow ? quantise_as<bf16> : quantise_as<float>);
    for (int64_t row = top; row < bottom; row++) quantise_row(l, row, rows + row * rounded_stride(l.weights));
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

const LinearKernels linear_kernels = {run, quantise_rows, rms};

}  // namespace triforce::TF_LEVEL
