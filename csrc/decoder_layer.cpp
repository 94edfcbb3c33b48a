#include "decoder_layer.hpp"

#include <algorithm>
#include <utility>

#include "experts.hpp"
#include "threads.hpp"

namespace triforce {
namespace {

constexpr int64_t rows_of_a_chunk = 8;           // a few microseconds of work
constexpr int64_t numbers_of_a_chunk = 8 << 10;  // a few microseconds of work; a multiple of 16

/// Interleaves biases block by block, like the outputs of two interleaved matrices.
Floats interleaved(const Floats& first, const Floats& second) {
    Floats out;
    for (size_t at = 0; at < first.size(); at += block_size)
        for (const Floats* each : {&first, &second})
            out.insert(out.end(), each->begin() + at, each->begin() + at + block_size);
    return out;
}

/// Calls body(first, n) for chunks of n numbers that cover [0, count), in one job.
template <class Body>
void by_chunks(int64_t count, Body body) {
    parallel((count + numbers_of_a_chunk - 1) / numbers_of_a_chunk, [&](int64_t chunk) {
        const int64_t first = chunk * numbers_of_a_chunk;
        body(first, std::min(numbers_of_a_chunk, count - first));
    });
}

}  // namespace

Floats floats(const std::optional<Tensor>& vector, int64_t size, Type type) {
    if (!vector) return {};
    vector->expect(vector->type == Type::f32 ? Type::f32 : type, {size});
    Floats out(round_up(size, block_size));
    for (int64_t i = 0; i < size; i++)
        out[i] = vector->type == Type::bf16 ? to_float(static_cast<const bf16*>(vector->data)[i])
                                    : static_cast<const float*>(vector->data)[i];
    return out;
}

Norm make_norm(const std::optional<Tensor>& weight, int64_t size, Type type, float eps) {
    return {floats(weight, size, type), size, eps};
}

void Norm::operator()(const float* x, int64_t rows, Type type, void* y) const {
    const int64_t stride = round_up(size, block_size) * size_of(type);
    parallel((rows + rows_of_a_chunk - 1) / rows_of_a_chunk, [&](int64_t chunk) {
        const int64_t end = std::min(rows, (chunk + 1) * rows_of_a_chunk);
        for (int64_t row = chunk * rows_of_a_chunk; row < end; row++)
            if (weight.empty())
                pointwise_kernels().round(x + row * size, size, type, static_cast<char*>(y) + row * stride);
            else
                pointwise_kernels().rms(x + row * size, size, weight.data(), eps, type,
                                        static_cast<char*>(y) + row * stride);
    });
}

Activation activation_named(const std::string& name) {
    if (name == "clamped") return Activation::clamped;
    require(name == "silu" || name == "gelu", "activation must be silu, gelu or clamped");
    return name == "gelu" ? Activation::gelu : Activation::silu;
}

void scale(float* y, int64_t count, float factor) {
    if (factor == 1) return;
    by_chunks(count, [&](int64_t first, int64_t n) {
        for (int64_t i = first; i < first + n; i++) y[i] *= factor;
    });
}

QkvProjections::QkvProjections(const LayerWeights& w, const LayerSettings& s)
    : q_({w.q}, s.bits), k_({w.k}, s.bits), v_({w.v}, s.bits), query_scale_(s.query_scale) {
    const int64_t hidden = q_.inputs(), head_dim = s.head_dim;
    require(head_dim >= block_size && head_dim % block_size == 0, "head_dim must be a multiple of 16");
    require(q_.outputs() % head_dim == 0, "q_proj does not have whole heads");
    require(k_.outputs() % head_dim == 0, "k_proj does not have whole heads");
    w.k.expect(type(), -1, hidden);
    w.v.expect(type(), k_.outputs(), hidden);
    norm_ = make_norm(w.input_norm, hidden, type(), s.eps);
    q_bias_ = floats(w.q_bias, q_.outputs(), type());
    k_bias_ = floats(w.k_bias, k_.outputs(), type());
    v_bias_ = floats(w.v_bias, v_.outputs(), type());
    const bool by_head = !w.q_norm || (w.q_norm->dims == 1 && (*w.q_norm)[0] == head_dim);
    q_norm_ = make_norm(w.q_norm, by_head ? head_dim : q_.outputs(), type(), s.eps);
    k_norm_ = make_norm(w.k_norm, by_head ? head_dim : k_.outputs(), type(), s.eps);
}

void QkvProjections::qkv(const float* x, int64_t rows, float* q, float* k, float* v) const {
    Scratch scratch;
    const int64_t stride = round_up(hidden(), block_size);
    void* normed = scratch.take<char>(rows * stride * size_of(type()));
    norm_(x, rows, type(), normed);
    const auto project = [&](const Matrix& matrix, const Floats& bias, float* y) {
        return Linear{matrix.weights(), normed, stride, rows, or_null(bias), Epilogue::store, y, matrix.outputs()};
    };
    multiply({project(q_, q_bias_, q), project(k_, k_bias_, k), project(v_, v_bias_, v)});
    if (q_norm_) q_norm_(q, rows * q_size() / q_norm_.size, Type::f32, q);
    if (k_norm_) k_norm_(k, rows * kv_size() / k_norm_.size, Type::f32, k);
    scale(q, rows * q_size(), query_scale_);
}

GatedMlp::GatedMlp(const GateWeights& w, const LayerSettings& s)
    : gate_(w.gate.alike(w.up) ? std::vector{w.gate, w.up} : std::vector{w.gate}, s.bits),
      norm_(make_norm(w.norm, gate_.inputs(), type(), s.eps)), activation_(s.activation) {
    w.up.expect(type(), outputs(), hidden());
    bias_ = floats(w.gate_bias, outputs(), type()), up_bias_ = floats(w.up_bias, outputs(), type());
    require(bias_.size() == up_bias_.size(), "gate and up projection both have biases, or none");
    if (w.gate.alike(w.up))
        bias_ = interleaved(bias_, up_bias_);
    else
        up_.emplace(std::vector{w.up}, s.bits);
}

void GatedMlp::forward(const float* x, int64_t rows, void* gated, InputCodes codes) const {
    Scratch scratch;
    const int64_t input_stride = round_up(hidden(), block_size);
    void* normed = scratch.take<char>(rows * input_stride * size_of(type()));
    norm_(x, rows, type(), normed);
    Linear products[2]{};
    project(normed, rows, gated, codes, scratch, products);
    multiply(products, this->products());
    activate(products, gated);
}

void GatedMlp::project(const void* normed, int64_t rows, void* gated, InputCodes codes, Scratch& scratch,
                       Linear* products) const {
    const int64_t input_stride = round_up(hidden(), block_size), gated_stride = stride();
    if (!up_) {
        *products = {gate_.weights(), normed, input_stride, rows, or_null(bias_),
                     Epilogue::gate, gated, gated_stride, activation_, codes};
        return;
    }
    const auto product = [&](const Matrix& matrix, const Floats& bias) {
        Weights weights = matrix.weights();
        weights.outputs = gated_stride;  // outputs beyond are zeros, as the next matrix needs
        return Linear{weights, normed, input_stride, rows, or_null(bias), Epilogue::store,
                      scratch.take<float>(rows * gated_stride), gated_stride, activation_, codes};
    };
    products[0] = product(gate_, bias_), products[1] = product(*up_, up_bias_);
}

void GatedMlp::activate(const Linear* products, void* gated) const {
    if (!up_) return;
    by_chunks(products[0].rows * stride(), [&](int64_t at, int64_t n) {
        pointwise_kernels().gate(activation_, static_cast<const float*>(products[0].y) + at,
                                 static_cast<const float*>(products[1].y) + at, n, type(),
                                 static_cast<char*>(gated) + at * size_of(type()));
    });
}

DecoderLayer::DecoderLayer(const LayerWeights& w, std::shared_ptr<Experts> experts, const LayerSettings& s)
    : QkvProjections(w, s), o_({w.o}, s.bits), experts_(std::move(experts)),
      attn_out_norm_(make_norm(w.attn_out_norm, hidden(), type(), s.eps)),
      mlp_out_norm_(make_norm(w.mlp_out_norm, hidden(), type(), s.eps)), residual_scale_(s.residual_scale) {
    w.o.expect(type(), hidden(), q_size());
    o_bias_ = floats(w.o_bias, hidden(), type());
    if (experts_) {
        require(experts_->hidden() == hidden() && experts_->type() == type() && experts_->whole(),
                "experts must be whole, of the layer's type and size");
        return;
    }
    gate_.emplace(GateWeights{w.post_norm, w.gate, w.up, w.gate_bias, w.up_bias}, s);
    down_.emplace(std::vector{w.down}, s.bits);
    down_bias_ = floats(w.down_bias, hidden(), type());
    w.gate.expect(type(), gate_->outputs(), hidden());
    w.down.expect(type(), hidden(), gate_->outputs());
}

DecoderLayer::~DecoderLayer() = default;

size_t DecoderLayer::bytes() const {
    const size_t mlp = experts_ ? experts_->bytes() : gate_->bytes() + down_->bytes();
    return QkvProjections::bytes() + o_.bytes() + mlp;
}

int64_t DecoderLayer::finish(float* x, int64_t rows, const void* attn_out, InputCodes codes) const {
    Scratch scratch;
    add(o_, o_bias_, attn_out, q_size(), rows, attn_out_norm_, codes, x);
    if (experts_) {
        float* sum = scratch.take<float>(rows * hidden());
        const int64_t touched = experts_->forward(x, rows, sum, codes);
        add(sum, rows, mlp_out_norm_, x);
        return touched;
    }
    void* gated = scratch.take<char>(rows * gate_->stride() * size_of(type()));
    gate_->forward(x, rows, gated, codes);
    add(*down_, down_bias_, gated, gate_->stride(), rows, mlp_out_norm_, InputCodes::int16, x);
    return 0;
}

/// Adds the product of `matrix` and rows of `from`, `stride` numbers apart, to x. The product is first normed, if there
/// is a norm, and multiplied by residual_scale.
void DecoderLayer::add(const Matrix& matrix, const Floats& bias, const void* from, int64_t stride, int64_t rows,
                       const Norm& norm, InputCodes codes, float* x) const {
    const int64_t C = hidden();
    Linear product{matrix.weights(), from, stride, rows, or_null(bias), Epilogue::add, x, C};
    product.input_codes = codes;
    if (!norm && residual_scale_ == 1) return multiply({product});
    Scratch scratch;
    float* part = scratch.take<float>(rows * C);
    product.epilogue = Epilogue::store, product.y = part;
    multiply({product});
    add(part, rows, norm, x);
}

/// Adds rows of `part` to x. They are first normed, if there is a norm, and multiplied by residual_scale.
void DecoderLayer::add(const float* part, int64_t rows, const Norm& norm, float* x) const {
    Scratch scratch;
    const int64_t C = hidden();
    const int64_t stride = norm ? round_up(C, block_size) : C;
    const float* added = part;
    if (norm) {
        float* normed = scratch.take<float>(rows * stride);
        norm(part, rows, Type::f32, normed);
        added = normed;
    }
    parallel((rows + rows_of_a_chunk - 1) / rows_of_a_chunk, [&](int64_t chunk) {
        const int64_t end = std::min(rows, (chunk + 1) * rows_of_a_chunk);
        for (int64_t row = chunk * rows_of_a_chunk; row < end; row++)
            for (int64_t i = 0; i < C; i++) x[row * C + i] += residual_scale_ * added[row * stride + i];
    });
}

LmHead::LmHead(const Tensor& weight, std::shared_ptr<Matrix> matrix, float eps, float logit_scale, float logit_cap)
    : norm_(make_norm(weight, matrix->inputs(), matrix->type(), eps)), matrix_(std::move(matrix)),
      logit_scale_(logit_scale), logit_cap_(logit_cap) {}

void LmHead::logits(const float* x, int64_t rows, float* logits) const {
    Scratch scratch;
    const int64_t stride = round_up(hidden(), block_size);
    void* normed = scratch.take<char>(rows * stride * size_of(matrix_->type()));
    norm_(x, rows, matrix_->type(), normed);
    multiply({{matrix_->weights(), normed, stride, rows, nullptr, Epilogue::store, logits, vocabulary()}});
    scale(logits, rows * vocabulary(), logit_scale_);
    if (logit_cap_)
        by_chunks(rows * vocabulary(), [&](int64_t at, int64_t n) {
            pointwise_kernels().cap(logits + at, n, logit_cap_);
        });
}

}  // namespace triforce
