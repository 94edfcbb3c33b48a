#include "../write.hpp"

#include "hadamard.hpp"

namespace triforce::TF_LEVEL {
namespace {

/// Numbers of a row: the key or the value of a token and head. A scale of two bytes follows codes.
template <class P>
constexpr int row_numbers(int dim) { return is_code<P> ? dim + static_cast<int>(sizeof(bf16)) : dim; }
constexpr int longest_row = row_numbers<Code>(largest_dim);

template <class T>
void round_row(const float* x, int dim, T* to) {
    for (int d = 0; d < dim; d += 16) store(to + d, load(x + d));
}

/// The scale is rounded up to bf16, so that no code exceeds the largest code. A NaN stays NaN.
void round_row(const float* x, int dim, Code* to) {
    const float exact = scale_of<int8_t>(x, dim);
    uint32_t bits;
    __builtin_memcpy(&bits, &exact, sizeof bits);
    const bf16 scale{static_cast<uint16_t>(exact == exact ? (bits + 0xffff) >> 16 : 0x7fc0)};
    quantise(x, dim, to_float(scale), reinterpret_cast<int8_t*>(to));
    __builtin_memcpy(to + dim, &scale, sizeof scale);
}

/// Rotates channel i with channel i + dim / 2, then all channels if pages.hadamard, and rounds.
template <class T>
void rotate(const float* x, const Rotation& rotation, int64_t position, const Pages& pages, T* to) {
    alignas(64) float rotated[largest_dim];
    const int dim = pages.dim, half = dim / 2;
    const float *cos = rotation.cos + position * rotation.stride, *sin = rotation.sin + position * rotation.stride;
    for (int i = 0; i < half; i++) {
        rotated[i] = x[i] * cos[i] - x[half + i] * sin[i];
        rotated[half + i] = x[half + i] * cos[i] + x[i] * sin[i];
    }
    if (pages.hadamard) hadamard(rotated, dim);
    round_row(rotated, dim, to);
}

template <class T>
void round_values(const float* x, const Pages& pages, T* to) {
    if (!pages.hadamard) return round_row(x, pages.dim, to);
    alignas(64) float rotated[largest_dim];
    __builtin_memcpy(rotated, x, pages.dim * sizeof(float));
    hadamard(rotated, pages.dim);
    round_row(rotated, pages.dim, to);
}

/// Access to the numbers of a page by their indices.
template <class T>
struct Numbers {
    T* at;
    TF_INLINE T get(int index) const { return at[index]; }
    TF_INLINE void set(int index, T x) const { at[index] = x; }
    /// Writes neighbouring numbers at once.
    TF_INLINE void set_word(int index, const T* x) const {
        __builtin_memcpy(at + index, x, packed_numbers<T> * sizeof(T));
    }
};
template <>
struct Numbers<Code> {
    CodeAt at;
    TF_INLINE Code get(int index) const { return code_of(at, index); }
    TF_INLINE void set(int index, Code x) const { set_code(at, index, x); }
    TF_INLINE void set_word(int index, const Code* x) const {
        for (int i = 0; i < packed_numbers<Code>; i++) set(index + i, x[i]);
    }
};

/// The page of a slot, and the token in it.
template <class T>
struct Slot {
    Numbers<T> keys, values;
    int at;
};
template <class T>
Slot<T> slot_of(const Pages& pages, int head, int64_t slot) {
    const int64_t page = slot / page_size;
    const int at = static_cast<int>(slot % page_size);
    if constexpr (is_code<T>)
        return {{pages.key_codes_of(head, page)}, {pages.value_codes_of(head, page)}, at};
    else
        return {{pages.keys_of<T>(head, page)}, {pages.values_of<T>(head, page)}, at};
}

/// Stores `count` tokens, one after another in a page from `slot` on. Rows of k and v are `stride` numbers apart.
template <class T>
void store_tokens(const Pages& pages, int head, int64_t slot, int count, const T* k, const T* v, int64_t stride) {
    constexpr int pack = packed_numbers<T>;
    const Slot<T> to = slot_of<T>(pages, head, slot);
    const int dim = pages.dim;
    for (int d = 0; d < dim; d += pack)
        for (int i = 0; i < count; i++) to.keys.set_word(key_index<T>(d, to.at + i), k + i * stride + d);
    for (int i = 0; i < count; i++)
        for (int d = 0; d < dim; d++) to.values.set(value_index<T>(d, to.at + i, dim), v[i * stride + d]);
    if constexpr (is_code<T>) {
        bf16* scales = pages.token_scales_of(head, slot / page_size) + to.at;
        for (int i = 0; i < count; i++) {
            __builtin_memcpy(scales + i, k + i * stride + dim, sizeof(bf16));
            __builtin_memcpy(scales + page_size + i, v + i * stride + dim, sizeof(bf16));
        }
    }
}

template <class T>
void rotate_token(const NewTokens& tokens, int64_t n) {
    const Pages& pages = *tokens.pages;
    const int dim = pages.dim;
    const int64_t position = tokens.positions[n];
    for (int64_t h = n * tokens.heads; h < (n + 1) * tokens.heads; h++) {
        rotate(tokens.q + h * dim, tokens.rotation, position, pages, static_cast<T*>(tokens.rotated) + h * dim);
        if (!tokens.q_sinks) continue;
        T* for_sinks = static_cast<T*>(tokens.q_sinks) + h * dim;
        rotate(tokens.q + h * dim, tokens.rotation, tokens.sink_positions[n], pages, for_sinks);
    }
}

template <class T>
void rotate_queries(const NewTokens& tokens, int64_t first, int64_t last) {
    for (int64_t n = first; n < last; n++) rotate_token<T>(tokens, n);
}

template <class P>
void write_new(const NewTokens& tokens, int head, int64_t first, int64_t last) {
    const Pages& pages = *tokens.pages;
    for (int64_t n = first; n < last; n++) {
        if (tokens.slots[n] < page_size) continue;  // padding
        alignas(64) P k[longest_row], v[longest_row];
        const int64_t from = (n * pages.heads + head) * pages.dim;
        rotate(tokens.k + from, tokens.rotation, tokens.positions[n], pages, k);
        round_values(tokens.v + from, pages, v);
        store_tokens(pages, head, tokens.slots[n], 1, k, v, 0);
    }
}

template <class T>
void read(const Pages& pages, const int64_t* slots, int64_t count, void* k, void* v) {
    const int dim = pages.dim, stride = row_numbers<T>(dim);
    for (int64_t i = 0; i < count * pages.heads; i++) {
        const int head = static_cast<int>(i % pages.heads);
        const Slot<T> from = slot_of<T>(pages, head, slots[i / pages.heads]);
        T *k_row = static_cast<T*>(k) + i * stride, *v_row = static_cast<T*>(v) + i * stride;
        for (int d = 0; d < dim; d++) k_row[d] = from.keys.get(key_index<T>(d, from.at));
        for (int d = 0; d < dim; d++) v_row[d] = from.values.get(value_index<T>(d, from.at, dim));
        if constexpr (is_code<T>) {
            const bf16* scales = pages.token_scales_of(head, slots[i / pages.heads] / page_size) + from.at;
            __builtin_memcpy(k_row + dim, scales, sizeof(bf16));
            __builtin_memcpy(v_row + dim, scales + page_size, sizeof(bf16));
        }
    }
}

/// The number of tokens, from `first` on, whose slots follow one another in one page.
int in_one_page(const int64_t* slots, int64_t first, int64_t count) {
    int run = 1;
    while (first + run < count && slots[first + run] == slots[first] + run && slots[first + run] % page_size) run++;
    return run;
}

template <class T>
void write(const Pages& pages, HeadRange heads, const int64_t* slots, int64_t count, const void* k, const void* v) {
    const int row = row_numbers<T>(pages.dim);
    const int64_t stride = static_cast<int64_t>(pages.heads) * row;
    for (int64_t first = 0; first < count;) {
        const int run = in_one_page(slots, first, count);
        for (int head = heads.first; head < heads.last && slots[first] >= page_size; head++) {
            const int64_t from = first * stride + head * row;
            store_tokens(pages, head, slots[first], run, static_cast<const T*>(k) + from,
                         static_cast<const T*>(v) + from, stride);
        }
        first += run;
    }
}

/// Interleaves words of n numbers, [rows * 4 / n][columns], to quads [rows][columns]; n is 1 or 2. A quad joins the
/// words of 4 / n neighbouring rows.
template <class T>
void interleave(const int8_t* from, int rows, int columns, int8_t* to) {
    constexpr int word = sizeof(uint32_t) / sizeof(T), words = 4 / word;
    for (int row = 0; row < rows; row++)
        for (int column = 0; column < columns; column++)
            for (int i = 0; i < words; i++, to += word)
                __builtin_memcpy(to, from + ((row * words + i) * columns + column) * word, word);
}

/// Writes numbers as int8, as `rows` rows of quads. Returns their scale.
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

const WriteKernels write_bf16 = {rotate_queries<bf16>, write_new<bf16>, read<bf16>, write<bf16>, copy<bf16>};
const WriteKernels write_f32 = {rotate_queries<float>, write_new<float>, read<float>, write<float>, copy<float>};
const WriteKernels write_codes_bf16 = {rotate_queries<bf16>, write_new<Code>, read<Code>, write<Code>, nullptr};
const WriteKernels write_codes_f32 = {rotate_queries<float>, write_new<Code>, read<Code>, write<Code>, nullptr};

}  // namespace triforce::TF_LEVEL
