#include "../write.hpp"

#include "simd.hpp"

namespace triforce::TF_LEVEL {
namespace {

/// Numbers of a token's keys of a head, or of its values: behind codes lies their scale.
template <class P>
constexpr int row_numbers(int dim) { return is_code<P> ? dim + static_cast<int>(sizeof(bf16)) : dim; }
constexpr int longest_row = row_numbers<Code>(largest_dim);

template <class T>
void round_row(const float* x, int dim, T* to) {
    for (int d = 0; d < dim; d += 16) store(to + d, load(x + d));
}

/// The scale is rounded up, so that no code is above the largest; NaN stays so.
void round_row(const float* x, int dim, Code* to) {
    const float exact = scale_of<int8_t>(x, dim);
    uint32_t bits;
    __builtin_memcpy(&bits, &exact, sizeof bits);
    const bf16 scale{static_cast<uint16_t>(exact == exact ? (bits + 0xffff) >> 16 : 0x7fc0)};
    quantise(x, dim, to_float(scale), reinterpret_cast<int8_t*>(to));
    __builtin_memcpy(to + dim, &scale, sizeof scale);
}

/// Rotates channel i with channel i + dim / 2, and rounds.
template <class T>
void rotate(const float* x, const Rotation& rotation, int64_t position, int dim, T* to) {
    alignas(64) float rotated[largest_dim];
    const int half = dim / 2;
    const float *cos = rotation.cos + position * rotation.stride, *sin = rotation.sin + position * rotation.stride;
    for (int i = 0; i < half; i++) {
        rotated[i] = x[i] * cos[i] - x[half + i] * sin[i];
        rotated[half + i] = x[half + i] * cos[i] + x[i] * sin[i];
    }
    round_row(rotated, dim, to);
}

/// The page of a slot, and the token in it.
template <class T>
struct Slot {
    T *keys, *values;
    int at;
};
template <class T>
Slot<T> slot_of(const Pages& pages, int head, int64_t slot) {
    const int64_t page = slot / page_size;
    return {pages.keys_of<T>(head, page), pages.values_of<T>(head, page), static_cast<int>(slot % page_size)};
}

/// Stores `count` tokens, one after another in a page from `slot` on. From a row of k or v to the next: `stride` numbers.
template <class T>
void store_tokens(const Pages& pages, int head, int64_t slot, int count, const T* k, const T* v, int64_t stride) {
    constexpr int pack = packed_numbers<T>;
    const Slot<T> to = slot_of<T>(pages, head, slot);
    const int dim = pages.dim;
    for (int d = 0; d < dim; d += pack)  // numbers that lie side by side are copied at once
        for (int i = 0; i < count; i++)
            __builtin_memcpy(to.keys + key_index<T>(d, to.at + i), k + i * stride + d, pack * sizeof(T));
    for (int i = 0; i < count; i++)
        for (int d = 0; d < dim; d++) to.values[value_index<T>(d, to.at + i, dim)] = v[i * stride + d];
    if constexpr (is_code<T>) {
        bf16* scales = pages.token_scales_of(head, slot / page_size) + to.at;
        for (int i = 0; i < count; i++) {
            __builtin_memcpy(scales + i, k + i * stride + dim, sizeof(bf16));
            __builtin_memcpy(scales + page_size + i, v + i * stride + dim, sizeof(bf16));
        }
    }
}

/// Queries become T, keys and values P.
template <class T, class P>
void rope_and_write_token(const NewTokens& tokens, int64_t n) {
    const Pages& pages = *tokens.pages;
    const int dim = pages.dim;
    const int64_t position = tokens.positions[n];
    for (int64_t h = n * tokens.heads; h < (n + 1) * tokens.heads; h++) {
        rotate(tokens.q + h * dim, tokens.rotation, position, dim, static_cast<T*>(tokens.rotated) + h * dim);
        if (!tokens.q_sinks) continue;
        T* for_sinks = static_cast<T*>(tokens.q_sinks) + h * dim;
        rotate(tokens.q + h * dim, tokens.rotation, tokens.sink_positions[n], dim, for_sinks);
    }
    if (tokens.slots[n] < page_size) return;  // padding
    for (int g = 0; g < pages.heads; g++) {
        alignas(64) P k[longest_row], v[longest_row];
        const int64_t from = (n * pages.heads + g) * dim;
        rotate(tokens.k + from, tokens.rotation, position, dim, k);
        round_row(tokens.v + from, dim, v);
        store_tokens(pages, g, tokens.slots[n], 1, k, v, 0);
    }
}

template <class T, class P = T>
void rope_and_write(const NewTokens& tokens, int64_t first, int64_t last) {
    for (int64_t n = first; n < last; n++) rope_and_write_token<T, P>(tokens, n);
}

template <class T>
void read(const Pages& pages, const int64_t* slots, int64_t count, void* k, void* v) {
    const int dim = pages.dim, stride = row_numbers<T>(dim);
    for (int64_t i = 0; i < count * pages.heads; i++) {
        const int head = static_cast<int>(i % pages.heads);
        const Slot<T> from = slot_of<T>(pages, head, slots[i / pages.heads]);
        T *k_row = static_cast<T*>(k) + i * stride, *v_row = static_cast<T*>(v) + i * stride;
        for (int d = 0; d < dim; d++) k_row[d] = from.keys[key_index<T>(d, from.at)];
        for (int d = 0; d < dim; d++) v_row[d] = from.values[value_index<T>(d, from.at, dim)];
        if constexpr (is_code<T>) {
            const bf16* scales = pages.token_scales_of(head, slots[i / pages.heads] / page_size) + from.at;
            __builtin_memcpy(k_row + dim, scales, sizeof(bf16));
            __builtin_memcpy(v_row + dim, scales + page_size, sizeof(bf16));
        }
    }
}

/// Tokens from `first` on, before `count`, that lie one after another in the page of its slot.
int in_one_page(const int64_t* slots, int64_t first, int64_t count) {
    int run = 1;
    while (first + run < count && slots[first + run] == slots[first] + run && slots[first + run] % page_size) run++;
    return run;
}

template <class T>
void write(const Pages& pages, const int64_t* slots, int64_t count, const void* k, const void* v) {
    const int row = row_numbers<T>(pages.dim);
    const int64_t stride = static_cast<int64_t>(pages.heads) * row;
    for (int64_t first = 0; first < count;) {
        const int run = in_one_page(slots, first, count);
        for (int head = 0; head < pages.heads && slots[first] >= page_size; head++) {
            const int64_t from = first * stride + head * row;
            store_tokens(pages, head, slots[first], run, static_cast<const T*>(k) + from,
                         static_cast<const T*>(v) + from, stride);
        }
        first += run;
    }
}

/// Interleaves `rows` * 4 / n rows of `columns` words of n numbers to `rows` rows of `columns` quads; n is 1 or 2.
template <class T>
void interleave(const int8_t* from, int rows, int columns, int8_t* to) {
    constexpr int word = sizeof(uint32_t) / sizeof(T), words = 4 / word;
    for (int row = 0; row < rows; row++)
        for (int column = 0; column < columns; column++)
            for (int i = 0; i < words; i++, to += word)
                __builtin_memcpy(to, from + ((row * words + i) * columns + column) * word, word);
}

template <class T>
float copy(const T* numbers, int count, int rows, int8_t* to) {
    alignas(64) int8_t plain[page_size * largest_dim];
    const float scale = scale_of<int8_t>(numbers, count);
    quantise(numbers, count, scale, plain);
    interleave<T>(plain, rows, count / rows / 4, to);
    return scale;
}

template <class T>
void copy(const Pages& pages, int head, int64_t page) {
    PageScales& scales = pages.scales_of(head, page);
    const int n = pages.page_numbers();
    scales.values = copy(pages.values_of<T>(head, page), n, page_size / 4, pages.values_of<int8_t>(head, page));
    scales.keys = copy(pages.keys_of<T>(head, page), n, pages.dim / 4, pages.keys_of<int8_t>(head, page));
}

}  // namespace

const WriteKernels write_bf16 = {rope_and_write<bf16>, read<bf16>, write<bf16>, copy<bf16>};
const WriteKernels write_f32 = {rope_and_write<float>, read<float>, write<float>, copy<float>};
const WriteKernels write_codes_bf16 = {rope_and_write<bf16, Code>, read<Code>, write<Code>, nullptr};
const WriteKernels write_codes_f32 = {rope_and_write<float, Code>, read<Code>, write<Code>, nullptr};

}  // namespace triforce::TF_LEVEL
