#include "../write.hpp"

#include "simd.hpp"

namespace triforce::TF_LEVEL {
namespace {

/// Rotates channel i with channel i + dim / 2.
template <class T>
void rotate(const float* x, const Rotation& rotation, int64_t position, int dim, T* to) {
    alignas(64) float rotated[largest_dim];
    const int half = dim / 2;
    const float *cos = rotation.cos + position * rotation.stride, *sin = rotation.sin + position * rotation.stride;
    for (int i = 0; i < half; i++) {
        rotated[i] = x[i] * cos[i] - x[half + i] * sin[i];
        rotated[half + i] = x[half + i] * cos[i] + x[i] * sin[i];
    }
    for (int d = 0; d < dim; d += 16) store(to + d, load(rotated + d));
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

template <class T>
void store_token(const Pages& pages, int head, int64_t slot, const T* k, const T* v) {
    const Slot<T> to = slot_of<T>(pages, head, slot);
    for (int d = 0; d < pages.dim; d++) to.keys[key_index<T>(d, to.at)] = k[d];
    for (int d = 0; d < pages.dim; d++) to.values[value_index<T>(d, to.at, pages.dim)] = v[d];
}

template <class T>
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
        alignas(64) T k[largest_dim], v[largest_dim];
        const int64_t from = (n * pages.heads + g) * dim;
        rotate(tokens.k + from, tokens.rotation, position, dim, k);
        for (int d = 0; d < dim; d += 16) store(v + d, load(tokens.v + from + d));
        store_token(pages, g, tokens.slots[n], k, v);
    }
}

template <class T>
void rope_and_write(const NewTokens& tokens, int64_t first, int64_t last) {
    for (int64_t n = first; n < last; n++) rope_and_write_token<T>(tokens, n);
}

template <class T>
void read(const Pages& pages, const int64_t* slots, int64_t count, void* k, void* v) {
    const int dim = pages.dim;
    for (int64_t i = 0; i < count * pages.heads; i++) {
        const Slot<T> from = slot_of<T>(pages, static_cast<int>(i % pages.heads), slots[i / pages.heads]);
        for (int d = 0; d < dim; d++) static_cast<T*>(k)[i * dim + d] = from.keys[key_index<T>(d, from.at)];
        for (int d = 0; d < dim; d++) static_cast<T*>(v)[i * dim + d] = from.values[value_index<T>(d, from.at, dim)];
    }
}

template <class T>
void write(const Pages& pages, const int64_t* slots, int64_t count, const void* k, const void* v) {
    for (int64_t i = 0; i < count * pages.heads; i++) {
        const int64_t slot = slots[i / pages.heads], from = i * pages.dim;
        if (slot < page_size) continue;
        store_token(pages, static_cast<int>(i % pages.heads), slot, static_cast<const T*>(k) + from,
                    static_cast<const T*>(v) + from);
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

}  // namespace triforce::TF_LEVEL
