#include "decoder_layer.hpp"

#include <algorithm>

#include "threads.hpp"

namespace triforce {
namespace {

constexpr int64_t rows_of_a_chunk = 8;           // some microseconds of work
constexpr int64_t numbers_of_a_chunk = 8 << 10;  // likewise, and a multiple of 16

/// The numbers of a vector, of `type` or float32; none if there is none.
Floats floats(const std::optional<Tensor>& vector, int64_t size, Type type) {
    if (!vector) return {};
    vector->expect(vector->type == Type::f32 ? Type::f32 : type, {size});
    Floats out(round_up(size, block_size));
    for (int64_t i = 0; i < size; i++)
        out[i] = vector->type == Type::bf16 ? to_float(static_cast<const bf16*>(vector->data)[i])
                                    : static_cast<const float*>(vector->data)[i];
    return out;
}

Norm norm(const std::optional<Tensor>& weight, int64_t size, Type type, float eps) {
    return {floats(weight, size, type), size, eps};
}

}  // namespace

void Norm::operator()(const float* x, int64_t rows, Type type, void* y) const {
    const int64_t stride = round_up(size, block_size) * size_of(type);
    parallel((rows + rows_of_a_chunk - 1) / rows_of_a_chunk, [&](int64_t chunk) {
        const int64_t end = std::min(rows, (chunk + 1) * rows_of_a_chunk);
        for (int64_t row = chunk * rows_of_a_chunk; row < end; row++)
            pointwise_kernels().rms(x + row * size, size, weight.data(), eps, type, static_cast<char*>(y) + row * stride);
    });
}

QkvProjections::QkvProjections(const LayerWeights& w, int64_t head_dim, float eps, int bits)
    : q_({w.q}, bits), k_({w.k}, bits), v_({w.v}, bits), head_dim_(head_dim) {
    const int64_t hidden = q_.inputs();
    require(head_dim >= block_size && head_dim % block_size == 0, "head_dim must be a multiple of 16");
    require(q_.outputs() % head_dim == 0, "q_proj does not have whole heads");
    require(k_.outputs() % head_dim == 0, "k_proj does not have whole heads");
    w.k.expect(type(), -1, hidden);
    w.v.expect(type(), k_.outputs(), hidden);
    norm_ = norm(w.input_norm, hidden, type(), eps);
    q_bias_ = floats(w.q_bias, q_.outputs(), type());
    k_bias_ = floats(w.k_bias, k_.outputs(), type());
    v_bias_ = floats(w.v_bias, v_.outputs(), type());
    q_norm_ = norm(w.q_norm, head_dim, type(), eps);
    k_norm_ = norm(w.k_norm, head_dim, type(), eps);
}

void QkvProjections::qkv(const float* x, int64_t rows, float* q, float* k, float* v) const {
    Scratch scratch;
    const int64_t stride = round_up(hidden(), block_size);
    void* normed = scratch.take<char>(rows * stride * size_of(type()));
    norm_(x, rows, type(), normed);
    const auto project = [&](const Matrix& matrix, const Floats& bias, float* y) {
        const float* added = bias.empty() ? nullptr : bias.data();
        return Linear{matrix.weights(), normed, stride, rows, added, Epilogue::store, y, matrix.outputs()};
    };
    multiply({project(q_, q_bias_, q), project(k_, k_bias_, k), project(v_, v_bias_, v)});
    if (q_norm_) q_norm_(q, rows * q_size() / head_dim_, Type::f32, q);
    if (k_norm_) k_norm_(k, rows * kv_size() / head_dim_, Type::f32, k);
}

GatedMlp::GatedMlp(const Tensor& weight, const WeightSource& gate, const WeightSource& up, float eps, int bits)
    : gate_(gate.alike(up) ? std::vector{gate, up} : std::vector{gate}, bits),
      norm_(norm(weight, gate_.inputs(), type(), eps)) {
    up.expect(type(), outputs(), hidden());
    if (!gate.alike(up)) up_.emplace(std::vector{up}, bits);
}

void GatedMlp::forward(const float* x, int64_t rows, void* gated) const {
    Scratch scratch;
    const int64_t from = round_up(hidden(), block_size);
    void* normed = scratch.take<char>(rows * from * size_of(type()));
    norm_(x, rows, type(), normed);
    if (!up_) return multiply({{gate_.weights(), normed, from, rows, nullptr, Epilogue::swiglu, gated, stride()}});
    const int64_t each = stride(), count = rows * each;
    const auto project = [&](const Matrix& matrix) {
        Weights weights = matrix.weights();
        weights.outputs = each;  // those beyond are zeros, which is what the next matrix reads there
        return Linear{weights, normed, from, rows, nullptr, Epilogue::store, scratch.take<float>(count), each};
    };
    const Linear gates = project(gate_), ups = project(*up_);
    multiply({gates, ups});
    parallel((count + numbers_of_a_chunk - 1) / numbers_of_a_chunk, [&](int64_t chunk) {
        const int64_t at = chunk * numbers_of_a_chunk, n = std::min(numbers_of_a_chunk, count - at);
        pointwise_kernels().swiglu(static_cast<const float*>(gates.y) + at, static_cast<const float*>(ups.y) + at, n,
                                   type(), static_cast<char*>(gated) + at * size_of(type()));
    });
}

DecoderLayer::DecoderLayer(const LayerWeights& w, int64_t head_dim, float eps, int bits)
    : QkvProjections(w, head_dim, eps, bits), o_({w.o}, bits), gate_(w.post_norm, w.gate, w.up, eps, bits),
      down_({w.down}, bits) {
    w.o.expect(type(), hidden(), q_size());
    w.gate.expect(type(), gate_.outputs(), hidden());
    w.down.expect(type(), hidden(), gate_.outputs());
}

void DecoderLayer::finish(float* x, int64_t rows, const void* attn_out) const {
    Scratch scratch;
    void* gated = scratch.take<char>(rows * gate_.stride() * size_of(type()));
    multiply({{o_.weights(), attn_out, q_size(), rows, nullptr, Epilogue::add, x, hidden()}});
    gate_.forward(x, rows, gated);
    multiply({{down_.weights(), gated, gate_.stride(), rows, nullptr, Epilogue::add, x, hidden()}});
}

LmHead::LmHead(const Tensor& weight, std::shared_ptr<Matrix> matrix, float eps)
    : norm_(norm(weight, matrix->inputs(), matrix->type(), eps)), matrix_(std::move(matrix)) {}

void LmHead::logits(const float* x, int64_t rows, float* logits) const {
    Scratch scratch;
    const int64_t stride = round_up(hidden(), block_size);
    void* normed = scratch.take<char>(rows * stride * size_of(matrix_->type()));
    norm_(x, rows, matrix_->type(), normed);
    multiply({{matrix_->weights(), normed, stride, rows, nullptr, Epilogue::store, logits, vocabulary()}});
}

}  // namespace triforce
