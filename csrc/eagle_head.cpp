#include "eagle_head.hpp"

#include <algorithm>

#include "memory.hpp"
#include "threads.hpp"

namespace triforce {
namespace {

constexpr int64_t rows_of_a_chunk = 8;  // a few microseconds of work

/// Calls body(row) for all rows, in one job.
template <class F>
void each_row(int64_t rows, const F& body) {
    parallel((rows + rows_of_a_chunk - 1) / rows_of_a_chunk, [&](int64_t chunk) {
        const int64_t end = std::min(rows, (chunk + 1) * rows_of_a_chunk);
        for (int64_t row = chunk * rows_of_a_chunk; row < end; row++) body(row);
    });
}

/// Writes n numbers, rounded to `type`.
void store(const float* x, int64_t n, Type type, char* y) {
    if (type == Type::f32) {
        std::copy_n(x, n, reinterpret_cast<float*>(y));
        return;
    }
    for (int64_t i = 0; i < n; i++) reinterpret_cast<bf16*>(y)[i] = to_bf16(x[i]);
}

/// Reads n numbers of `type` as floats.
void load(const char* x, int64_t n, Type type, float* y) {
    if (type == Type::f32) {
        std::copy_n(reinterpret_cast<const float*>(x), n, y);
        return;
    }
    for (int64_t i = 0; i < n; i++) y[i] = to_float(reinterpret_cast<const bf16*>(x)[i]);
}

void normed(const Norm& norm, const float* x, Type type, char* y) {
    pointwise_kernels().rms(x, norm.size, norm.weight.data(), norm.eps, type, y);
}

/// The norms of a token's hidden states, of the rows of `weights`; or none.
std::vector<Norm> norms(const std::optional<Tensor>& weights, int64_t size, Type type, float eps) {
    std::vector<Norm> state_norms;
    for (int64_t s = 0; weights && s < (*weights)[0]; s++) {
        Tensor weight = *weights;
        weight.dims = 1, weight.shape[0] = weights->shape[1];
        weight.data = static_cast<char*>(weights->data) + s * weights->row_bytes();
        state_norms.push_back(make_norm(weight, size, type, eps));
    }
    return state_norms;
}

}  // namespace

struct EagleHead::Inputs {
    char* x;          // (N, 2 C)
    float* residual;  // (N, C)
};

EagleHead::EagleHead(std::shared_ptr<Embedding> embedding, const EagleHeadWeights& w, const EagleHeadOptions& options,
                     std::vector<int64_t> tokens, int bits)
    : embedding_(std::move(embedding)), options_(options), tokens_(std::move(tokens)), fc_({w.fc}, bits),
      q_({w.q}, bits), k_({w.k}, bits), v_({w.v}, bits), o_({w.o}, bits), down_({w.down}, bits),
      mlp_({w.post_norm, w.gate, w.up, {}, {}}, LayerSettings{options.head_dim, options.eps, bits}),
      fc_norms_(norms(w.fc_norm, hidden(), type(), options.eps)),
      embedding_norm_(make_norm(w.embedding_norm, hidden(), type(), options.eps)),
      hidden_norm_(make_norm(w.hidden_norm, hidden(), type(), options.eps)),
      norm_(make_norm(w.norm, hidden(), type(), options.eps)),
      head_(w.norm, std::make_shared<Matrix>(std::vector{w.head}, bits), options.eps, 1, 0) {
    const int64_t C = hidden(), D = options.head_dim;
    require(C % block_size == 0 && D % block_size == 0, "hidden size and head_dim must be multiples of 16");
    require(embedding_->hidden() == C && fc_.inputs() % C == 0, "fc must make a state of several of the target's");
    require(fc_norms_.empty() || static_cast<int64_t>(fc_norms_.size()) == states(), "each state has a norm, or none");
    require(q_.outputs() % D == 0 && k_.outputs() % D == 0, "projections must have whole heads");
    w.q.expect(type(), -1, 2 * C), w.k.expect(type(), -1, 2 * C), w.v.expect(type(), k_.outputs(), 2 * C);
    w.o.expect(type(), C, q_.outputs()), w.gate.expect(type(), -1, C), w.down.expect(type(), C, mlp_.outputs());
    if (w.embedding_proj) {
        w.embedding_proj->expect(type(), C, C);
        embedding_proj_.emplace(std::vector{*w.embedding_proj}, bits);
    }
    w.head.expect(type(), static_cast<int64_t>(tokens_.size()), C);
    for (const int64_t token : tokens_)
        require(0 <= token && token < vocabulary(), "tokens must be in the target's vocabulary");
}

size_t EagleHead::bytes() const {
    const size_t embedding_proj_bytes = embedding_proj_ ? embedding_proj_->bytes() : 0;
    return fc_.bytes() + q_.bytes() + k_.bytes() + v_.bytes() + o_.bytes() + mlp_.bytes() + down_.bytes() +
           embedding_proj_bytes + head_.matrix().bytes();
}

void EagleHead::check(const EagleHeadMemory& memory, const ForwardBatch& batch) const {
    require(memory.entries->type == type() && memory.entries->dim == options_.head_dim &&
                memory.entries->heads * memory.entries->dim == k_.outputs() &&
                memory.slots == memory.entries->count * page_size, "memory must be of the draft's type and shape");
    require(batch.views.size() == 1 && batch.views[0].layers == 1, "a draft has one layer");
    const int64_t vocabulary = embedding_->vocabulary();
    for (int64_t i = 0; i < batch.rows * batch.width; i++)
        require(0 <= batch.ids[i] && batch.ids[i] < vocabulary, "ids must be in the vocabulary");
    for (int64_t i = 0; batch.at && i < batch.rows * batch.scored; i++)
        require(0 <= batch.at[i] && batch.at[i] < batch.width, "at must lie in [0, T)");
    triforce::check(attention_calls({memory.entries}, batch, 0)[0]);
}

void EagleHead::forward(const EagleHeadMemory& memory, const ForwardBatch& batch) const {
    Scratch scratch;
    const int64_t N = batch.rows * batch.width, C = hidden(), Q = q_.outputs(), P = k_.outputs();
    Attention call = attention_calls({memory.entries}, batch, static_cast<int>(Q / options_.head_dim))[0];
    const Places places = take_places(scratch, N);
    locate(places, batch, call);
    const Inputs in = inputs(scratch, memory, batch.ids, places.previous_slots, N);
    float *q = scratch.take<float>(N * Q), *k = scratch.take<float>(N * P), *v = scratch.take<float>(N * P);
    const auto project = [&](const Matrix& matrix, float* y) {
        return Linear{matrix.weights(), in.x, 2 * C, N, nullptr, Epilogue::store, y, matrix.outputs()};
    };
    multiply({project(q_, q), project(k_, k), project(v_, v)});
    const int64_t bytes = N * Q * size_of(type());
    char *rotated = scratch.take<char>(bytes), *attn_out = scratch.take<char>(bytes);
    char* q_sinks = call.window ? scratch.take<char>(bytes) : nullptr;
    rope_and_write(NewTokens{memory.entries, N, call.heads, q, k, v, batch.rotation, places.positions,
                             places.sink_positions, places.slots, rotated, q_sinks});
    call.q = rotated, call.q_sinks = q_sinks, call.out = attn_out;
    attend(call);
    finish(in, attn_out, N);
    const int64_t bytes_of_a_state = C * size_of(type());
    float* out = scratch.take<float>(C);
    for (int64_t b = 0; b < batch.rows; b++) {
        if (!batch.counts[b]) continue;
        const int64_t last = b * batch.width + batch.counts[b] - 1;
        const float* x = in.residual + last * C;
        if (options_.norm_output) normed(norm_, x, Type::f32, reinterpret_cast<char*>(out));
        store(options_.norm_output ? out : x, C, type(), memory.states + places.slots[last] * bytes_of_a_state);
    }
    score(batch, in.residual);
}

EagleHead::Inputs EagleHead::inputs(Scratch& scratch, const EagleHeadMemory& memory, const int64_t* ids,
                                    const int64_t* previous_slots, int64_t count) const {
    const int64_t C = hidden(), bytes = C * size_of(type());
    const Inputs in{scratch.take<char>(2 * count * bytes), scratch.take<float>(count * C)};
    float *embedded = scratch.take<float>(count * C), *hidden_normed = scratch.take<float>(count * C);
    embedding_->rows(ids, count, embedded);
    each_row(count, [&](int64_t i) {
        float* x = in.residual + i * C;
        load(memory.states + previous_slots[i] * bytes, C, type(), x);
        normed(embedding_norm_, embedded + i * C, type(), in.x + 2 * i * bytes);
        normed(hidden_norm_, x, type(), in.x + (2 * i + 1) * bytes);
        if (!options_.norm_before_residual) return;
        normed(hidden_norm_, x, Type::f32, reinterpret_cast<char*>(hidden_normed + i * C));
        std::copy_n(hidden_normed + i * C, C, x);
    });
    return in;
}

void EagleHead::finish(const Inputs& in, const void* attn_out, int64_t count) const {
    Scratch scratch;
    const int64_t C = hidden();
    const auto add = [&](const Matrix& matrix, const void* x, int64_t stride) {
        multiply({{matrix.weights(), x, stride, count, nullptr, Epilogue::add, in.residual, C}});
    };
    if (embedding_proj_) add(*embedding_proj_, in.x, 2 * C);
    add(o_, attn_out, q_.outputs());
    char* gated = scratch.take<char>(count * mlp_.stride() * size_of(type()));
    mlp_.forward(in.residual, count, gated, InputCodes::int16);
    add(down_, gated, mlp_.stride());
}

void EagleHead::score(const ForwardBatch& batch, const float* x) const {
    Scratch scratch;
    const int64_t C = hidden(), V = vocabulary(), M = static_cast<int64_t>(tokens_.size());
    const int64_t count = batch.rows * batch.scored;
    float *scored = scratch.take<float>(count * C), *proposed_logits = scratch.take<float>(count * M);
    for (int64_t i = 0; i < count; i++) {
        const int64_t column = batch.at ? batch.at[i] : i % batch.scored;
        std::copy_n(x + (i / batch.scored * batch.width + column) * C, C, scored + i * C);
    }
    head_.logits(scored, count, proposed_logits);
    for (int64_t i = 0; i < count; i++) {
        float* logits = batch.logits + i * V;
        std::fill_n(logits, V, unproposed_logit);
        for (int64_t m = 0; m < M; m++) logits[tokens_[m]] = proposed_logits[i * M + m];
    }
}

void EagleHead::fuse(const NotedTokens& tokens, float* fused) const {
    Scratch scratch;
    const int64_t C = hidden(), S = states(), stride = fc_.inputs() * size_of(type());
    char* joined = scratch.take<char>(tokens.count * stride);
    each_row(tokens.count, [&](int64_t i) {
        for (int64_t s = 0; s < S; s++) {
            const float* state = tokens.states + (s * tokens.pass_tokens + tokens.columns[i]) * C;
            char* to = joined + i * stride + s * C * size_of(type());
            if (fc_norms_.empty())
                store(state, C, type(), to);
            else
                normed(fc_norms_[s], state, type(), to);
        }
    });
    multiply({{fc_.weights(), joined, fc_.inputs(), tokens.count, nullptr, Epilogue::store, fused, C}});
}

void EagleHead::check(const EagleHeadMemory& memory, const NotedTokens& tokens) const {
    require(memory.entries->type == type() && memory.entries->heads * memory.entries->dim == k_.outputs() &&
                memory.slots == memory.entries->count * page_size, "memory must be of the draft's type and shape");
    for (int64_t i = 0; i < tokens.count; i++) {
        require(0 <= tokens.ids[i] && tokens.ids[i] < vocabulary(), "ids must be in the vocabulary");
        require(page_size <= tokens.slots[i] && tokens.slots[i] < memory.slots && 0 <= tokens.previous_slots[i] &&
                    tokens.previous_slots[i] < memory.slots, "slots must lie in the memory");
        require(0 <= tokens.columns[i] && tokens.columns[i] < tokens.pass_tokens, "columns must be of the states");
    }
}

void EagleHead::note(const EagleHeadMemory& memory, const NotedTokens& tokens, const Rotation& rotation) const {
    if (!tokens.count) return;
    Scratch scratch;
    const int64_t N = tokens.count, C = hidden(), P = k_.outputs(), bytes = C * size_of(type());
    float* fused = scratch.take<float>(N * C);
    fuse(tokens, fused);
    for (int64_t i = 0; i < N; i++) store(fused + i * C, C, type(), memory.states + tokens.slots[i] * bytes);
    const Inputs in = inputs(scratch, memory, tokens.ids, tokens.previous_slots, N);
    float *k = scratch.take<float>(N * P), *v = scratch.take<float>(N * P);
    const auto project = [&](const Matrix& matrix, float* y) {
        return Linear{matrix.weights(), in.x, 2 * C, N, nullptr, Epilogue::store, y, P};
    };
    multiply({project(k_, k), project(v_, v)});
    rope_and_write(NewTokens{memory.entries, N, 0, nullptr, k, v, rotation, tokens.positions, tokens.positions,
                             tokens.slots, nullptr, nullptr});
}

}  // namespace triforce
