#include "../search.hpp"

#include "simd.hpp"

namespace triforce::TF_LEVEL {
namespace {

constexpr float least_size = 1e-30f;  // least size of a key; a size of 0 means that there is no sketch
constexpr float largest_sum = 32000;  // of the magnitudes of a query's codes, so that partial sums fit int16

/// The keys of a page as floats, [dim][16 tokens].
template <class P>
void unpack(const Pages& pages, int head, int64_t page, float* to) {
    for (int d = 0; d < pages.dim; d++)
        for (int i = 0; i < page_size; i++) {
            const int at = key_index<P>(d, i);
            if constexpr (is_code<P>)
                to[d * page_size + i] = to_float(code_of(pages.key_codes_of(head, page), at).multiple) *
                                        to_float(pages.token_scales_of(head, page)[i]);
            else
                to[d * page_size + i] = to_float(pages.keys_of<P>(head, page)[at]);
        }
}

TF_INLINE F16 magnitude(F16 x) { return max(x, zero() - x); }

constexpr int at_once = 8;  // channels that are rotated together

/// Writes `at_once` channels of a page's keys from `first` on, rotated.
void rotated_channels(const Pages& pages, const float* channels, int first, F16* rotated) {
    const int dim = pages.dim;
    if (!pages.sketches.rotation) {
        for (int i = 0; i < at_once; i++) rotated[i] = load(channels + (first + i) * page_size);
        return;
    }
    for (int d = 0; d < dim; d++) {
        const F16 channel = load(channels + d * page_size);
        const float* row = pages.sketches.rotation + d * dim + first;
        for (int i = 0; i < at_once; i++) rotated[i] = add_product(rotated[i], set1(row[i]), channel);
    }
}

template <class P>
void sketch(const Pages& pages, int head, int64_t page) {
    alignas(64) float channels[page_size * largest_dim];
    const int dim = pages.dim;
    unpack<P>(pages, head, page, channels);
    uint16_t* signs = pages.signs_of(head, page);
    F16 total = zero();
    for (int to = 0; to < dim; to += at_once) {
        F16 rotated[at_once] = {};
        rotated_channels(pages, channels, to, rotated);
        for (int i = 0; i < at_once; i++) {
            signs[to + i] = sign_bits(rotated[i]);
            total = total + magnitude(rotated[i]);
        }
    }
    store(pages.sizes_of(head, page), max(total * set1(1.0f / static_cast<float>(dim)), set1(least_size)));
}

template <class T>
float encode(const Pages& pages, const void* q, int16_t* codes) {
    alignas(64) float rotated[largest_dim] = {};
    const int dim = pages.dim;
    for (int d = 0; d < dim; d++) {
        const float x = to_float(static_cast<const T*>(q)[d]);
        if (!pages.sketches.rotation) {
            rotated[d] = x;
            continue;
        }
        const F16 channel = set1(x);
        const float* row = pages.sketches.rotation + d * dim;
        for (int to = 0; to < dim; to += 16)
            store(rotated + to, add_product(load(rotated + to), load(row + to), channel));
    }
    float total = least_size;
    for (int d = 0; d < dim; d++) total += rotated[d] < 0 ? -rotated[d] : rotated[d];
    const float scale = total / largest_sum;
    for (int d = 0; d < dim; d++) {
        const float code = rotated[d] / scale;
        const bool finite = -largest_sum <= code && code <= largest_sum;
        for (int i = 0; i < page_size; i++) codes[d * page_size + i] = finite ? static_cast<int16_t>(code) : 0;
    }
    return scale;
}

/// Writes the scores of one page for `count` queries.
template <int count>
TF_INLINE void score_page(const uint16_t* signs, F16 sizes, int dim, const int16_t* codes, const F16* sums,
                          const float* scales, float* scores, int64_t stride) {
    Words negative[count] = {};
    for (int d = 0; d < dim; d += 2) {
        uint32_t pair;
        __builtin_memcpy(&pair, signs + d, sizeof pair);
        for (int i = 0; i < count; i++)
            negative[i] = add_where(negative[i], pair, codes + (i * dim + d) * page_size);
    }
    for (int i = 0; i < count; i++) {
        const F16 twice = floats(negative[i]) + floats(negative[i]);
        scores[i * stride] = scales[i] * reduce_max((sums[i] - twice) * sizes);
    }
}

template <int count>
void score_queries(const Pages& pages, int head, const int32_t* list, int64_t listed, const int16_t* codes,
                const float* scales, float* scores, int64_t stride) {
    F16 sums[count];
    for (int i = 0; i < count; i++) {
        float sum = 0;
        for (int d = 0; d < pages.dim; d++) sum += codes[(i * pages.dim + d) * page_size];
        sums[i] = set1(sum);
    }
    for (int64_t at = 0; at < listed; at++) {
        const F16 sizes = load(pages.sizes_of(head, list[at]));
        score_page<count>(pages.signs_of(head, list[at]), sizes, pages.dim, codes, sums, scales, scores + at, stride);
    }
}

void score(const Pages& pages, int head, const int32_t* list, int64_t listed, const int16_t* codes, const float* scales,
           int64_t queries, float* scores, int64_t stride) {
    constexpr decltype(&score_queries<1>) by_count[] = {score_queries<1>, score_queries<2>, score_queries<3>,
                                                        score_queries<4>};
    for (int64_t i = 0; i < queries; i += 4) {
        const int64_t left = queries - i, count = left < 4 ? left : 4;
        const int16_t* from = codes + i * pages.dim * page_size;
        by_count[count - 1](pages, head, list, listed, from, scales + i, scores + i * stride, stride);
    }
}

}  // namespace

const SearchKernels search_bf16 = {sketch<bf16>, encode<bf16>, score};
const SearchKernels search_f32 = {sketch<float>, encode<float>, score};
const SearchKernels search_codes_bf16 = {sketch<Code>, encode<bf16>, score};
const SearchKernels search_codes_f32 = {sketch<Code>, encode<float>, score};

}  // namespace triforce::TF_LEVEL
