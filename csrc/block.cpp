#include "block.hpp"

#include <algorithm>
#include <stdexcept>

#include "norm.hpp"
#include "threads.hpp"

namespace triforce {
namespace {

constexpr int64_t rows_of_a_chunk = 8;  // normed by one thread: some microseconds

template <class Body>
void each_row(int64_t rows, Body&& body) {
    const int64_t chunks = (rows + rows_of_a_chunk - 1) / rows_of_a_chunk;
    parallel(static_cast<int>(chunks), [&](int64_t chunk) {
        const int64_t end = std::min(rows, (chunk + 1) * rows_of_a_chunk);
        for (int64_t row = chunk * rows_of_a_chunk; row < end; row++) body(row);
    });
}

Floats floats(const Tensor& vector, int64_t size, Type type) {
    vector.expect(type, {size});
    Floats out(round_up(size, block_size));
    for (int64_t i = 0; i < size; i++)
        out[i] = type == Type::bf16 ? to_float(static_cast<const bf16*>(vector.data)[i])
                                    : static_cast<const float*>(vector.data)[i];
    return out;
}

Floats floats(const std::optional<Tensor>& vector, int64_t size, Type type) {
    return vector ? floats(*vector, size, type) : Floats();
}

Norm norm(const Tensor& weight, int64_t size, Type type, float eps) { return {floats(weight, size, type), size, eps}; }

std::optional<Norm> norm(const std::optional<Tensor>& weight, int64_t size, Type type, float eps) {
    return weight ? std::optional(norm(*weight, size, type, eps)) : std::nullopt;
}

const float* data_or_null(const Floats& vector) { return vector.empty() ? nullptr : vector.data(); }

}  // namespace

void Norm::operator()(const float* x, int64_t rows, Type type, void* y) const {
    const int64_t stride = round_up(size, block_size) * size_of(type);
    each_row(rows, [&](int64_t row) {
        norm_kernels().rms(x + row * size, size, weight.data(), eps, type, static_cast<char*>(y) + row * stride);
    });
}

Projections::Projections(const Parts& p, int64_t head_dim, float eps, bool int8)
    : q_(p.q, int8), k_(p.k, int8), v_(p.v, int8), head_dim_(head_dim) {
    const int64_t hidden = q_.inputs();
    if (head_dim < block_size || head_dim % block_size)
        throw std::invalid_argument("head_dim must be a multiple of 16");
    if (q_.outputs() % head_dim) throw std::invalid_argument("q_proj does not have whole heads");
    if (k_.outputs() % head_dim) throw std::invalid_argument("k_proj does not have whole heads");
    p.k.expect(type(), {-1, hidden});
    p.v.expect(type(), {k_.outputs(), hidden});
    norm_ = norm(p.input_norm, hidden, type(), eps);
    q_bias_ = floats(p.q_bias, q_.outputs(), type());
    k_bias_ = floats(p.k_bias, k_.outputs(), type());
    v_bias_ = floats(p.v_bias, v_.outputs(), type());
    q_norm_ = norm(p.q_norm, head_dim, type(), eps);
    k_norm_ = norm(p.k_norm, head_dim, type(), eps);
}

void Projections::qkv(const float* x, int64_t rows, float* q, float* k, float* v) const {
    Scratch scratch;
    const int64_t stride = round_up(hidden(), block_size);
    void* normed = scratch.take<char>(rows * stride * size_of(type()));
    norm_(x, rows, type(), normed);
    const auto project = [&](const Matrix& matrix, const Floats& bias, float* y) {
        const float* added = data_or_null(bias);
        return Linear{matrix.weights(), normed, stride, rows, added, Epilogue::store, y, matrix.outputs()};
    };
    run({project(q_, q_bias_, q), project(k_, k_bias_, k), project(v_, v_bias_, v)});
    if (q_norm_) (*q_norm_)(q, rows * q_size() / head_dim_, Type::f32, q);
    if (k_norm_) (*k_norm_)(k, rows * kv_size() / head_dim_, Type::f32, k);
}

Gate::Gate(const Tensor& weight, const Tensor& gate, const Tensor& up, float eps, bool int8)
    : matrix_(gate, up, int8), norm_(norm(weight, matrix_.inputs(), type(), eps)) {}

void Gate::run(const float* x, int64_t rows, void* gated) const {
    Scratch scratch;
    const int64_t from = round_up(hidden(), block_size);
    void* normed = scratch.take<char>(rows * from * size_of(type()));
    norm_(x, rows, type(), normed);
    triforce::run({{matrix_.weights(), normed, from, rows, nullptr, Epilogue::swiglu, gated, stride()}});
}

Block::Block(const Parts& p, int64_t head_dim, float eps, bool int8)
    : qkv_(p, head_dim, eps, int8), o_(p.o, int8), gate_(p.post_norm, p.gate, p.up, eps, int8), down_(p.down, int8) {
    p.o.expect(type(), {hidden(), q_size()});
    p.gate.expect(type(), {gate_.outputs(), hidden()});
    p.down.expect(type(), {hidden(), gate_.outputs()});
}

void Block::finish(float* x, int64_t rows, const void* mixed) const {
    Scratch scratch;
    void* gated = scratch.take<char>(rows * gate_.stride() * size_of(type()));
    run({{o_.weights(), mixed, q_size(), rows, nullptr, Epilogue::add, x, hidden()}});
    gate_.run(x, rows, gated);
    run({{down_.weights(), gated, gate_.stride(), rows, nullptr, Epilogue::add, x, hidden()}});
}

Head::Head(const Tensor& weight, std::shared_ptr<Matrix> matrix, float eps)
    : norm_(norm(weight, matrix->inputs(), matrix->type(), eps)), matrix_(std::move(matrix)) {}

void Head::logits(const float* x, int64_t rows, float* logits) const {
    Scratch scratch;
    const int64_t stride = round_up(hidden(), block_size);
    void* normed = scratch.take<char>(rows * stride * size_of(matrix_->type()));
    norm_(x, rows, matrix_->type(), normed);
    run({{matrix_->weights(), normed, stride, rows, nullptr, Epilogue::store, logits, vocabulary()}});
}

}  // namespace triforce
