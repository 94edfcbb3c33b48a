#include "../vocabulary.hpp"

#include <cstring>

#include "simd.hpp"

namespace triforce::TF_LEVEL {
namespace {

// Vectors of 64-bit lanes, as wide as the level's registers. `product` multiplies the lower halves of the lanes of W.
#if TF_SIMD_AVX512
constexpr int width = 64;
#elif TF_SIMD_AVX2
constexpr int width = 32;
#else
constexpr int width = 16;
#endif
constexpr int lanes = width / 8;
typedef double D __attribute__((vector_size(width)));
typedef uint64_t U __attribute__((vector_size(width)));

#if TF_SIMD_AVX512
typedef U W;
TF_INLINE W product(W words, uint32_t factor) {
    return (W)_mm512_mul_epu32((__m512i)words, _mm512_set1_epi64(factor));
}
#elif TF_SIMD_AVX2
typedef U W;
TF_INLINE W product(W words, uint32_t factor) {
    return (W)_mm256_mul_epu32((__m256i)words, _mm256_set1_epi64x(factor));
}
#else
typedef uint64_t W;  // a vector without this product is slower
TF_INLINE W product(W words, uint32_t factor) { return (words & 0xffffffff) * factor; }
#endif

template <class T>
double peak(const T* values, int n) {
    constexpr int parts = 16;
    T most[parts];
    int unordered = 0;
    for (int l = 0; l < parts; l++) most[l] = -__builtin_inf();
    int i = 0;
    for (; i + parts <= n; i += parts)
        for (int l = 0; l < parts; l++) {
            unordered |= values[i + l] != values[i + l];
            most[l] = values[i + l] > most[l] ? values[i + l] : most[l];
        }
    for (; i < n; i++) {
        unordered |= values[i] != values[i];
        most[0] = values[i] > most[0] ? values[i] : most[0];
    }
    for (int l = 1; l < parts; l++) most[0] = most[l] > most[0] ? most[l] : most[0];
    return unordered ? __builtin_nan("") : static_cast<double>(most[0]);
}

template <class T>
void scores(const T* logits, int n, double peak, double temperature, double* scores) {
    // The peak is subtracted first, so that a tiny temperature cannot overflow.
    if (temperature == 1)
        for (int i = 0; i < n; i++) scores[i] = static_cast<double>(logits[i]) - peak;
    else
        for (int i = 0; i < n; i++) scores[i] = (static_cast<double>(logits[i]) - peak) / temperature;
}

/// e^x for x <= 0. x = n ln 2 + r, and e^r = 1 + r + r^2 (1/2! + r/3! + ...) within 4e-18.
TF_INLINE D exp(D x) {
    x = x < -746.0 ? D{} - 746.0 : x;  // below -746 e^x is 0; the bound keeps n in range
    const D shifted = x * 1.4426950408889634 + 0x1.8p52, n = shifted - 0x1.8p52;
    const D r = (x - n * 0x1.62e42feep-1) - n * 0x1.a39ef35793c76p-33;
    D q = r * (1.0 / 6227020800) + 1.0 / 479001600;
    q = q * r + 1.0 / 39916800;
    q = q * r + 1.0 / 3628800;
    q = q * r + 1.0 / 362880;
    q = q * r + 1.0 / 40320;
    q = q * r + 1.0 / 5040;
    q = q * r + 1.0 / 720;
    q = q * r + 1.0 / 120;
    q = q * r + 1.0 / 24;
    q = q * r + 1.0 / 6;
    q = q * r + 0.5;
    // 2^n in two factors, because the result may be subnormal. Adding 2048 keeps the shifted numbers above 0.
    const U k = (U)shifted - 0x4338000000000000 + 2048, half = k >> 1;
    return (1.0 + (r + r * r * q)) * (D)((half - 1) << 52) * (D)((k - half - 1) << 52);
}

void exponentiate(double* values, int n) {
    D x{};
    int i = 0;
    for (; i + lanes <= n; i += lanes) {
        std::memcpy(&x, values + i, sizeof x);
        x = exp(x);
        std::memcpy(values + i, &x, sizeof x);
    }
    x = D{};
    std::memcpy(&x, values + i, sizeof(double) * (n - i));
    x = exp(x);
    std::memcpy(values + i, &x, sizeof(double) * (n - i));
}

double sum(const double* values, int n) {
    double part[8] = {};
    int i = 0;
    for (; i + 8 <= n; i += 8)
        for (int l = 0; l < 8; l++) part[l] += values[i + l];
    for (int l = 0; i < n; i++, l++) part[l] += values[i];
    for (int width = 4; width; width /= 2)
        for (int l = 0; l < width; l++) part[l] += part[l + width];
    return part[0];
}

void strided_maxima(const double* values, int n, double* maxima, int count) {
    for (int i = 0; i < count; i++) maxima[i] = values[i];
    for (int start = count; start < n; start += count) {
        const int width = n - start < count ? n - start : count;
        const double* from = values + start;
        for (int i = 0; i < width; i++) maxima[i] = from[i] > maxima[i] ? from[i] : maxima[i];
    }
}

/// Computes words 0 and 2 of Philox blocks, in c0 and c2.
TF_INLINE void philox(W& c0, W c1, W& c2, W c3, uint64_t seed) {
    uint32_t k0 = static_cast<uint32_t>(seed), k1 = static_cast<uint32_t>(seed >> 32);
    for (int round = 0; round < 10; round++, k0 += 0x9E3779B9, k1 += 0xBB67AE85) {
        const W p0 = product(c0, 0xD2511F53), p1 = product(c2, 0xCD9E8D57);
        c0 = (p1 >> 32) ^ c1 ^ k0;
        c2 = (p0 >> 32) ^ c3 ^ k1;
        c1 = p1;  // the upper halves of all four are never read
        c3 = p0;
    }
}

void upper_bits(const NoiseKey& key, int first_pair, int pairs, uint32_t* bits) {
    constexpr int wide = sizeof(W) / sizeof(uint64_t);
    constexpr uint64_t counting[] = {0, 1, 2, 3, 4, 5, 6, 7};
    W block, both;
    std::memcpy(&block, counting, sizeof block);
    for (int i = 0; i < pairs; i += wide) {
        W c0 = block + static_cast<uint64_t>(first_pair + i), c2 = W{} + key.choice;
        philox(c0, W{} + key.position, c2, W{}, key.seed);
        both = (c0 & 0xffffffff) | c2 << 32;  // little-endian: token 2i before token 2i + 1
        if (i + wide <= pairs)
            std::memcpy(bits + 2 * i, &both, sizeof both);
        else
            std::memcpy(bits + 2 * i, &both, sizeof(uint64_t) * (pairs - i));
    }
}

bool any_rival(const double* weights, const uint32_t* bits, int n, double best) {
    // An exponential -log u is at least 1 - u, and u is below (upper + 1) / 2^32. The last bit is dropped, so that the
    // number converts as a signed integer.
    const double bound = best * 0x1p-31 * (1 - 1e-12);
    int64_t found = 0;
    for (int i = 0; i < n; i++) {
        const auto least = static_cast<double>(static_cast<int32_t>(~bits[i] >> 1));
        found |= weights[i] >= bound * least;
    }
    return found;
}

}  // namespace

const VocabularyKernels vocabulary_kernels = {
    peak<float>, peak<double>,   scores<float>, scores<double>, exponentiate,
    sum,         strided_maxima, upper_bits,    any_rival,
};

}  // namespace triforce::TF_LEVEL
