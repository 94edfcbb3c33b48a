#include "experts.hpp"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "memory.hpp"

namespace triforce {
namespace {

std::optional<Tensor> at(const std::vector<Tensor>& biases, size_t expert) {
    return biases.empty() ? std::nullopt : std::optional<Tensor>(biases[expert]);
}

}  // namespace

int64_t ExpertChoices::count() const {
    size_t sum = 0;
    for (const auto& rows : experts) sum += rows.size();
    return static_cast<int64_t>(sum);
}

int64_t ExpertChoices::touched() const {
    return std::count_if(experts.begin(), experts.end(),
                         [](const auto& rows) { return !rows.empty() && rows.front().row < sampled; });
}

Experts::Experts(const std::optional<Tensor>& weight, const ExpertWeights& w, Type type, const LayerSettings& s)
    : norm_(make_norm(weight, w.router.inputs(), type, s.eps)), router_({w.router}, 0), chosen_(s.chosen),
      renormalised_(s.renormalised) {
    const auto count = static_cast<size_t>(router_.outputs());
    require(0 < chosen_ && chosen_ <= router_.outputs(), "chosen must lie in [1, experts]");
    require(router_.type() == Type::f32, "the router must be float32");
    require(w.gate.size() == count && w.up.size() == count && w.down.size() == count,
            "there must be as many experts as the router has outputs");
    for (const auto* biases : {&w.gate_bias, &w.up_bias, &w.down_bias})
        require(biases->empty() || biases->size() == count, "there must be as many biases as experts, or none");
    router_bias_ = floats(w.router_bias, router_.outputs(), Type::f32);
    for (size_t e = 0; e < count; e++) {
        gates_.emplace_back(GateWeights{{}, w.gate[e], w.up[e], at(w.gate_bias, e), at(w.up_bias, e)}, s);
        downs_.emplace_back(std::vector{w.down[e]}, s.bits);
        down_biases_.push_back(floats(at(w.down_bias, e), outputs(), type));
        w.gate[e].expect(type, w.gate[0].outputs(), router_.inputs());
        w.down[e].expect(type, outputs(), w.down[0].inputs());
    }
}

size_t Experts::bytes() const {
    size_t sum = router_.bytes();
    for (const GatedMlp& gate : gates_) sum += gate.bytes();
    for (const Matrix& down : downs_) sum += down.bytes();
    return sum;
}

const float* Experts::normed(Scratch& scratch, const float* x, int64_t rows) const {
    float* normed = scratch.take<float>(rows * round_up(hidden(), block_size));
    norm_(x, rows, Type::f32, normed);
    return normed;
}

ExpertChoices Experts::choose(const float* normed, int64_t rows) const {
    const int64_t E = router_.outputs(), stride = round_up(hidden(), block_size);
    Scratch scratch;
    float* logits = scratch.take<float>(rows * E);
    multiply({{router_.weights(), normed, stride, rows, or_null(router_bias_), Epilogue::store, logits, E}});
    ExpertChoices choices{std::vector<Chosen>(E)};
    std::vector<int64_t> ids(E);
    for (int64_t row = 0; row < rows; row++) {
        const float* of_row = logits + row * E;
        std::iota(ids.begin(), ids.end(), 0);
        std::partial_sort(ids.begin(), ids.begin() + chosen_, ids.end(), [&](int64_t a, int64_t b) {
            return of_row[a] != of_row[b] ? of_row[a] > of_row[b] : a < b;
        });
        const double top = of_row[ids[0]];
        double sum = 0;
        for (int64_t i = 0; i < (renormalised_ ? chosen_ : E); i++) sum += std::exp(of_row[ids[i]] - top);
        for (int64_t i = 0; i < chosen_; i++)
            choices.experts[ids[i]].push_back({row, static_cast<float>(std::exp(of_row[ids[i]] - top) / sum)});
    }
    return choices;
}

void Experts::gate(size_t expert, const Chosen& rows, const float* normed, void* gated) const {
    Scratch scratch;
    const int64_t C = hidden(), stride = round_up(C, block_size), count = static_cast<int64_t>(rows.size());
    float* from = scratch.take<float>(count * C);
    for (int64_t i = 0; i < count; i++) std::copy_n(normed + rows[i].row * stride, C, from + i * C);
    gates_[expert].forward(from, count, gated);
}

void Experts::down(size_t expert, const Chosen& rows, const void* gated, float* sum) const {
    Scratch scratch;
    const int64_t C = outputs(), count = static_cast<int64_t>(rows.size());
    float* out = scratch.take<float>(count * C);
    const float* bias = or_null(down_biases_[expert]);
    multiply({{downs_[expert].weights(), gated, down_stride(), count, bias, Epilogue::store, out, C}});
    for (int64_t i = 0; i < count; i++) {
        float* to = sum + rows[i].row * C;
        for (int64_t c = 0; c < C; c++) to[c] += rows[i].weight * out[i * C + c];
    }
}

int64_t Experts::forward(const float* x, int64_t rows, float* sum) const {
    Scratch scratch;
    const float* read = normed(scratch, x, rows);
    std::fill_n(sum, rows * outputs(), 0.0f);
    const ExpertChoices choices = choose(read, rows);
    for (size_t e = 0; e < choices.experts.size(); e++) {
        const Chosen& chosen = choices.experts[e];
        if (chosen.empty()) continue;
        Scratch own;
        void* gated = own.take<char>(chosen.size() * gated_stride() * size_of(type()));
        gate(e, chosen, read, gated);
        down(e, chosen, gated, sum);
    }
    return choices.touched();
}

ExpertChoices Experts::gate(const float* x, int64_t rows, void* gated) const {
    Scratch scratch;
    const float* read = normed(scratch, x, rows);
    ExpertChoices choices = choose(read, rows);
    char* to = static_cast<char*>(gated);
    for (size_t e = 0; e < choices.experts.size(); e++) {
        const Chosen& chosen = choices.experts[e];
        if (chosen.empty()) continue;
        gate(e, chosen, read, to);
        to += chosen.size() * gated_stride() * size_of(type());
    }
    return choices;
}

void Experts::down(const ExpertChoices& choices, const void* gated, int64_t rows, float* sum) const {
    std::fill_n(sum, rows * outputs(), 0.0f);
    const char* from = static_cast<const char*>(gated);
    for (size_t e = 0; e < choices.experts.size(); e++) {
        const Chosen& chosen = choices.experts[e];
        if (chosen.empty()) continue;
        down(e, chosen, from, sum);
        from += chosen.size() * down_stride() * size_of(type());
    }
}

}  // namespace triforce
