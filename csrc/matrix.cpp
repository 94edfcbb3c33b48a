#include "matrix.hpp"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <stdexcept>
#include <string>
#include <type_traits>

#include "half.hpp"
#include "threads.hpp"

namespace triforce {
namespace {

// Number of an output's inputs that are adjacent, for instructions that multiply this number at once.
template <class T>
constexpr int64_t adjacent = std::is_same_v<T, half> ? 1 : sizeof(uint32_t) / sizeof(T);

template <class T>
T& element(const Weights& w, int64_t block, int64_t lane, int64_t input) {
    constexpr int64_t P = adjacent<T>;
    T* data = static_cast<T*>(const_cast<void*>(w.data)) + block * block_size * w.inputs;
    return data[(input / P * block_size + lane) * P + input % P];
}

// `pack` and `pack_int8` pack a block of weights of type T, from rows of a tensor. They return whether all weights are
// finite.

template <class T>
bool pack(const Weights& w, const T* rows, int64_t lanes, int64_t inputs, int64_t block) {
    bool finite = true;
    for (int64_t lane = 0; lane < lanes; lane++, rows += inputs)
        for (int64_t i = 0; i < inputs; i++) {
            element<T>(w, block, lane, i) = rows[i];
            finite &= std::isfinite(to_float(rows[i]));
        }
    return finite;
}

template <class T>
bool pack_int8(const Weights& w, const T* rows, int64_t lanes, int64_t inputs, int64_t block) {
    bool finite = true;
    for (int64_t lane = 0; lane < lanes; lane++, rows += inputs) {
        float largest = 0;
        for (int64_t i = 0; i < inputs; i++) {
            largest = std::max(largest, std::fabs(to_float(rows[i])));
            finite &= std::isfinite(to_float(rows[i]));
        }
        const float scale = largest / int8_largest, inverse = scale > 0 ? 1 / scale : 0;
        const_cast<float*>(w.scales)[block * block_size + lane] = scale;
        for (int64_t i = 0; i < inputs; i++) {
            const float multiple = std::nearbyint(to_float(rows[i]) * inverse);
            element<int8_t>(w, block, lane, i) = static_cast<int8_t>(std::clamp(multiple, -int8_largest, int8_largest));
        }
    }
    return finite;
}

/// Calls `body` with `numbers` as a pointer to their type.
template <class Body>
auto typed(Type type, const char* numbers, Body body) {
    if (type == Type::bf16) return body(reinterpret_cast<const bf16*>(numbers));
    if (type == Type::half) return body(reinterpret_cast<const half*>(numbers));
    return body(reinterpret_cast<const float*>(numbers));
}

/// Zeroes each block of `bytes` bytes and calls pack(type, rows, lanes, block). `rows` are the rows of the block's
/// `lanes` outputs in their source, which is of `type`. Throws std::invalid_argument if a call returns that numbers are
/// not finite.
template <class Pack>
void pack_blocks(const Weights& weights, const std::vector<WeightSource>& interleaved, int64_t bytes, Pack pack) {
    const int64_t count = static_cast<int64_t>(interleaved.size());
    char* data = static_cast<char*>(const_cast<void*>(weights.data));
    std::atomic<const char*> broken{};
    parallel(weights.blocks, [&](int block) {
        const Tensor& source = interleaved[block % count].tensor;
        const int64_t row = block / count * block_size, lanes = std::min<int64_t>(block_size, source[0] - row);
        const char* rows = static_cast<const char*>(source.data) + row * source.row_bytes();
        std::memset(data + block * bytes, 0, bytes);
        if (!pack(source.type, rows, lanes, block)) broken = source.name;
    });
    if (broken) throw std::invalid_argument(std::string(broken) + " holds NaN or Inf");
}

template <class T>
void unpack_row(const Weights& w, int64_t row, int64_t inputs, float* out) {
    const float scale = w.scales ? w.scales[row] : 1;
    for (int64_t i = 0; i < inputs; i++)
        out[i] = to_float(element<T>(w, row / block_size, row % block_size, i)) * scale;
}

void check(const std::vector<WeightSource>& interleaved) {
    const WeightSource& first = interleaved[0];
    const std::string name = first.tensor.name;
    const bool plain = first.format == Format::none;
    require(first.input == Type::bf16 || first.input == Type::f32, (name + " must be bfloat16 or float32").c_str());
    first.tensor.expect(plain ? first.tensor.type : Type::u8, {-1, -1});
    require(first.tensor[0] && first.tensor[1], (name + " is empty").c_str());
    require(plain || first.tensor[1] % file_block_bytes(first.format) == 0,
            (name + " does not have whole blocks").c_str());
    for (const WeightSource& each : interleaved) {
        each.tensor.expect(first.tensor.type, {first.tensor[0], first.tensor[1]});
        require(first.alike(each),
                (name + " and " + each.tensor.name + " differ in type").c_str());
    }
}

/// Rounds `count` weights, of sixteen outputs or fewer, to rows of a file of type Q4_1.
template <class T>
std::vector<uint8_t> to_q4_1(const T* weights, int64_t count) {
    std::vector<uint8_t> file(count / group_size * file_block_bytes(Format::q4_1));
    float group[group_size];
    for (int64_t g = 0; g < count / group_size; g++) {
        for (int i = 0; i < group_size; i++) group[i] = to_float(weights[g * group_size + i]);
        encode_q4_1(group, file.data() + g * file_block_bytes(Format::q4_1));
    }
    return file;
}

}  // namespace

int64_t WeightSource::inputs() const {
    if (format == Format::none) return tensor[1];
    return tensor[1] / file_block_bytes(format) * parts(format).file_inputs();
}

void WeightSource::row(int64_t id, float* out) const {
    const char* from = static_cast<const char*>(tensor.data) + id * tensor.row_bytes();
    if (format != Format::none) return unpack_file_row(format, reinterpret_cast<const uint8_t*>(from), inputs(), out);
    typed(tensor.type, from, [&](const auto* numbers) {
        for (int64_t i = 0; i < tensor[1]; i++) out[i] = to_float(numbers[i]);
    });
}

void WeightSource::expect(Type wanted, int64_t outputs_wanted, int64_t inputs_wanted) const {
    if (tensor.type == input) return tensor.expect(wanted, {outputs_wanted, inputs_wanted});
    if (outputs_wanted < 0) outputs_wanted = outputs();
    const auto shape = [](int64_t out, int64_t in) { return std::to_string(out) + ", " + std::to_string(in); };
    require(input == wanted && outputs() == outputs_wanted && inputs() == inputs_wanted,
            (std::string(tensor.name) + " must be (" + shape(outputs_wanted, inputs_wanted) + "), is (" +
             shape(outputs(), inputs()) + ")").c_str());
}

Matrix::Matrix(const std::vector<WeightSource>& interleaved, int bits) {
    check(interleaved);
    const WeightSource& first = interleaved[0];
    const int64_t source_blocks = round_up(first.outputs(), block_size) / block_size;
    inputs_ = first.inputs();
    weights_ = {first.input, nullptr, nullptr, inputs_, first.outputs(),
                source_blocks * static_cast<int64_t>(interleaved.size()), first.format};
    weights_.numbers = first.tensor.type;
    if (first.format == Format::none && bits == 4 && inputs_ % group_size == 0) weights_.format = Format::q4_1;
    if (weights_.format != Format::none)
        pack_groups(interleaved);
    else
        pack_numbers(interleaved, bits > 0);
}

void Matrix::pack_numbers(const std::vector<WeightSource>& interleaved, bool int8) {
    require(!int8 || inputs_ <= most_int8_inputs,
            (std::string(interleaved[0].tensor.name) + " is too wide for int8").c_str());
    weights_.inputs = round_up(inputs_, int8 || weights_.rounding() == Rounding::widen ? block_size : 2);
    const int64_t rows = weights_.blocks * block_size;
    const int64_t bytes = block_size * weights_.inputs * (int8 ? 1 : size_of(weights_.numbers));
    const int64_t data = weights_.blocks * bytes, scales = int8 ? rows * sizeof(float) : 0;
    memory_ = Memory::in_slab(data + scales);
    weights_.data = memory_.data();
    if (int8) weights_.scales = reinterpret_cast<const float*>(memory_.data() + data);
    std::memset(memory_.data() + data, 0, scales);
    pack_blocks(weights_, interleaved, bytes, [&](Type type, const char* from, int64_t lanes, int64_t block) {
        return typed(type, from, [&](const auto* numbers) {
            return int8 ? pack_int8(weights_, numbers, lanes, inputs_, block)
                        : pack(weights_, numbers, lanes, inputs_, block);
        });
    });
}

void Matrix::pack_groups(const std::vector<WeightSource>& interleaved) {
    const int64_t bytes = block_bytes(parts(weights_.format), inputs_);
    memory_ = Memory::in_slab(weights_.blocks * bytes);
    weights_.data = memory_.data();
    pack_blocks(weights_, interleaved, bytes, [&](Type type, const char* from, int64_t lanes, int64_t block) {
        std::vector<uint8_t> rounded;
        if (type != Type::u8)
            rounded = typed(type, from, [&](const auto* numbers) { return to_q4_1(numbers, lanes * inputs_); });
        const auto* file = rounded.empty() ? reinterpret_cast<const uint8_t*>(from) : rounded.data();
        return pack_block(weights_.format, file, lanes, inputs_,
                          reinterpret_cast<uint8_t*>(memory_.data()) + block * bytes);
    });
}

void Matrix::linear(const void* x, int64_t rows, float* y, InputCodes codes) const {
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
    multiply({{weights_, x, weights_.inputs, rows, nullptr, Epilogue::store, y, outputs(), Activation::silu, codes}});
}

void Matrix::rows(const int64_t* ids, int64_t count, float* out) const {
    const auto unpack = weights_.scales                  ? unpack_row<int8_t>
                        : weights_.numbers == Type::bf16 ? unpack_row<bf16>
                        : weights_.numbers == Type::half ? unpack_row<half>
                                                         : unpack_row<float>;
    const int64_t bytes = block_bytes(parts(weights_.format), inputs_);
    for (int64_t i = 0; i < count; i++, out += inputs_)
        if (weights_.format == Format::none)
            unpack(weights_, ids[i], inputs_, out);
        else
            unpack_output(weights_.format, static_cast<const uint8_t*>(weights_.data) + ids[i] / block_size * bytes,
                          static_cast<int>(ids[i] % block_size), inputs_, out);
}

}  // namespace triforce
