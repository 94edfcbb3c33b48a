#include "matrix.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <stdexcept>
#include <string>

#include "threads.hpp"

namespace triforce {
namespace {

// Inputs of an output that are adjacent, for instructions that multiply as many at once.
template <class T>
constexpr int64_t adjacent = sizeof(uint32_t) / sizeof(T);

template <class T>
T& element(const Weights& w, int64_t block, int64_t lane, int64_t input) {
    constexpr int64_t P = adjacent<T>;
    T* data = static_cast<T*>(const_cast<void*>(w.data)) + block * block_size * w.inputs;
    return data[(input / P * block_size + lane) * P + input % P];
}

template <class T>
void pack(const Weights& w, const Tensor& from, int64_t source_block, int64_t block) {
    const auto* rows = static_cast<const T*>(from.data) + source_block * block_size * from[1];
    const int64_t lanes = std::min<int64_t>(block_size, from[0] - source_block * block_size);
    for (int64_t lane = 0; lane < lanes; lane++)
        for (int64_t i = 0; i < from[1]; i++) element<T>(w, block, lane, i) = rows[lane * from[1] + i];
}

template <class T>
void pack_int8(const Weights& w, const Tensor& from, int64_t source_block, int64_t block) {
    const auto* rows = static_cast<const T*>(from.data) + source_block * block_size * from[1];
    const int64_t lanes = std::min<int64_t>(block_size, from[0] - source_block * block_size);
    for (int64_t lane = 0; lane < lanes; lane++, rows += from[1]) {
        float largest = 0;
        for (int64_t i = 0; i < from[1]; i++) largest = std::max(largest, std::fabs(to_float(rows[i])));
        const float scale = largest / int8_largest, inverse = scale > 0 ? 1 / scale : 0;
        const_cast<float*>(w.scales)[block * block_size + lane] = scale;
        for (int64_t i = 0; i < from[1]; i++) {
            const float multiple = std::nearbyint(to_float(rows[i]) * inverse);
            element<int8_t>(w, block, lane, i) = static_cast<int8_t>(std::clamp(multiple, -int8_largest, int8_largest));
        }
    }
}

template <class T>
void unpack_row(const Weights& w, int64_t row, int64_t inputs, float* out) {
    const float scale = w.scales ? w.scales[row] : 1;
    for (int64_t i = 0; i < inputs; i++)
        out[i] = to_float(element<T>(w, row / block_size, row % block_size, i)) * scale;
}

const Tensor& checked(const std::vector<Tensor>& interleaved) {
    const Tensor& first = interleaved[0];
    if (first.type != Type::bf16 && first.type != Type::f32)
        throw std::invalid_argument(std::string(first.name) + " must be bfloat16 or float32");
    first.expect(first.type, {-1, -1});
    if (!first[0] || !first[1]) throw std::invalid_argument(std::string(first.name) + " is empty");
    for (const Tensor& each : interleaved) each.expect(first.type, {first[0], first[1]});
    return first;
}

}  // namespace

Matrix::Matrix(const std::vector<Tensor>& interleaved, bool int8) {
    const Tensor& first = checked(interleaved);
    const int64_t each = round_up(first[0], block_size) / block_size, count = static_cast<int64_t>(interleaved.size());
    const bool narrow = first.type == Type::bf16;
    inputs_ = first[1];
    if (int8 && inputs_ > most_int8_inputs)
        throw std::invalid_argument(std::string(first.name) + " is too wide for int8");
    weights_ = {first.type, nullptr, nullptr, round_up(inputs_, int8 ? block_size : 2), first[0], each * count};
    const int64_t rows = weights_.blocks * block_size, data = rows * weights_.inputs * (int8 ? 1 : size_of(first.type));
    memory_ = Memory(data + (int8 ? rows * sizeof(float) : 0));
    weights_.data = memory_.data();
    if (int8) weights_.scales = reinterpret_cast<const float*>(memory_.data() + data);
    const auto pack_one = int8 ? (narrow ? pack_int8<bf16> : pack_int8<float>) : (narrow ? pack<bf16> : pack<float>);
    parallel(weights_.blocks, [&](int block) { pack_one(weights_, interleaved[block % count], block / count, block); });
}

void Matrix::linear(const void* x, int64_t rows, float* y) const {
    Scratch scratch;
    if (inputs_ != weights_.inputs) {  // the kernel would read beyond a row
        const size_t size = size_of(type());
        char* padded = scratch.take<char>(rows * weights_.inputs * size);
        std::memset(padded, 0, rows * weights_.inputs * size);
        for (int64_t row = 0; row < rows; row++)
            std::memcpy(padded + row * weights_.inputs * size, static_cast<const char*>(x) + row * inputs_ * size,
                        inputs_ * size);
        x = padded;
    }
    multiply({{weights_, x, weights_.inputs, rows, nullptr, Epilogue::store, y, outputs()}});
}

void Matrix::rows(const int64_t* ids, int64_t count, float* out) const {
    const auto unpack = weights_.scales        ? unpack_row<int8_t>
                        : type() == Type::bf16 ? unpack_row<bf16>
                                               : unpack_row<float>;
    for (int64_t i = 0; i < count; i++) unpack(weights_, ids[i], inputs_, out + i * inputs_);
}

}  // namespace triforce
