#include "../search.hpp"

#include "simd.hpp"

namespace triforce::TF_LEVEL {
namespace {

constexpr float least = 1e-30f;      // a size: zero says that there is no sketch
constexpr float most_words = 32000;  // the sum of a query's words, so that no sum of some of them overflows

/// Channels of 16 tokens, one after the other.
template <class T>
void unpack(const T* keys, int dim, float* to) {
    for (int d = 0; d < dim; d++)
        for (int i = 0; i < page_size; i++) to[d * page_size + i] = to_float(keys[key_index<T>(d, i)]);
}

TF_INLINE F16 magnitude(F16 x) { return max(x, zero() - x); }

template <class T>
void sketch(const Pages& pages, int head, int64_t page) {
    constexpr int at_once = 8;
    alignas(64) float channels[page_size * largest_dim];
    const int dim = pages.dim;
    unpack(pages.keys_of<T>(head, page), dim, channels);
    uint16_t* signs = pages.signs_of(head, page);
    F16 total = zero();
    for (int to = 0; to < dim; to += at_once) {
        F16 turned[at_once];
        for (F16& each : turned) each = zero();
        for (int d = 0; d < dim; d++) {
            const F16 channel = load(channels + d * page_size);
            const float* row = pages.sketches.turn + d * dim + to;
            for (int i = 0; i < at_once; i++) turned[i] = fma(set1(row[i]), channel, turned[i]);
        }
        for (int i = 0; i < at_once; i++) {
            signs[to + i] = sign_bits(turned[i]);
            total = total + magnitude(turned[i]);
        }
    }
    store(pages.sizes_of(head, page), max(total * set1(1.0f / static_cast<float>(dim)), set1(least)));
}

template <class T>
float turn(const Pages& pages, const void* q, int16_t* words) {
    alignas(64) float turned[largest_dim] = {};
    const int dim = pages.dim;
    for (int d = 0; d < dim; d++) {
        const F16 channel = set1(to_float(static_cast<const T*>(q)[d]));
        const float* row = pages.sketches.turn + d * dim;
        for (int to = 0; to < dim; to += 16) store(turned + to, fma(load(row + to), channel, load(turned + to)));
    }
    float total = least;
    for (int d = 0; d < dim; d++) total += turned[d] < 0 ? -turned[d] : turned[d];
    const float unit = total / most_words;
    for (int d = 0; d < dim; d++) {
        const float word = turned[d] / unit;
        const bool fine = -most_words <= word && word <= most_words;  // not so for what is not finite
        for (int i = 0; i < page_size; i++) words[d * page_size + i] = fine ? static_cast<int16_t>(word) : 0;
    }
    return unit;
}

/// The scores of one page by `count` queries.
template <int count>
TF_INLINE void score_page(const uint16_t* signs, F16 sizes, int dim, const int16_t* words, const F16* sums,
                          const float* units, float* scores, int64_t stride) {
    Words negative[count];
    for (Words& each : negative) each = no_words();
    for (int d = 0; d < dim; d += 2) {
        uint32_t pair;
        __builtin_memcpy(&pair, signs + d, sizeof pair);
        for (int i = 0; i < count; i++)
            negative[i] = add_where(negative[i], pair, words + (i * dim + d) * page_size);
    }
    for (int i = 0; i < count; i++) {
        const F16 twice = floats(negative[i]) + floats(negative[i]);
        scores[i * stride] = units[i] * reduce_max((sums[i] - twice) * sizes);
    }
}

template <int count>
void score_some(const Pages& pages, int head, const int32_t* list, int64_t listed, const int16_t* words,
                const float* units, float* scores, int64_t stride) {
    F16 sums[count];
    for (int i = 0; i < count; i++) {
        float sum = 0;
        for (int d = 0; d < pages.dim; d++) sum += words[(i * pages.dim + d) * page_size];
        sums[i] = set1(sum);
    }
    for (int64_t at = 0; at < listed; at++) {
        const F16 sizes = load(pages.sizes_of(head, list[at]));
        score_page<count>(pages.signs_of(head, list[at]), sizes, pages.dim, words, sums, units, scores + at, stride);
    }
}

void score(const Pages& pages, int head, const int32_t* list, int64_t listed, const int16_t* words, const float* units,
           int64_t queries, float* scores, int64_t stride) {
    constexpr decltype(&score_some<1>) some[] = {score_some<1>, score_some<2>, score_some<3>, score_some<4>};
    for (int64_t i = 0; i < queries; i += 4) {
        const int64_t left = queries - i, count = left < 4 ? left : 4;
        const int16_t* from = words + i * pages.dim * page_size;
        some[count - 1](pages, head, list, listed, from, units + i, scores + i * stride, stride);
    }
}

}  // namespace

const SearchKernels search_bf16 = {sketch<bf16>, turn<bf16>, score};
const SearchKernels search_f32 = {sketch<float>, turn<float>, score};

}  // namespace triforce::TF_LEVEL
