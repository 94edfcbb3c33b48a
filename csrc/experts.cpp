#include "experts.hpp"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "memory.hpp"

namespace triforce {

Experts::Experts(const std::optional<Tensor>& weight, const ExpertWeights& w, Type type, const LayerSettings& s)
    : norm_(make_norm(weight, w.router.inputs(), type, s.eps)), router_({w.router}, 0), chosen_(s.chosen),
      renormalised_(s.renormalised) {
    const auto count = static_cast<size_t>(router_.outputs());
    require(0 < chosen_ && chosen_ <= router_.outputs(), "chosen must lie in [1, experts]");
    require(router_.type() == Type::f32, "the router must be float32");
    require(w.gate.size() == count && w.up.size() == count && w.down.size() == count,
            "there must be as many experts as the router has outputs");
    for (size_t e = 0; e < count; e++) {
        gates_.emplace_back(std::nullopt, w.gate[e], w.up[e], s);
        downs_.emplace_back(std::vector{w.down[e]}, s.bits);
        w.gate[e].expect(type, w.gate[0].outputs(), router_.inputs());
        w.down[e].expect(type, router_.inputs(), w.gate[0].outputs());
    }
}

size_t Experts::bytes() const {
    size_t sum = router_.bytes();
    for (const GatedMlp& gate : gates_) sum += gate.bytes();
    for (const Matrix& down : downs_) sum += down.bytes();
    return sum;
}

/// The rows that have chosen each expert, ascending.
std::vector<std::vector<Experts::Choice>> Experts::choose(const float* normed, int64_t rows, int64_t stride) const {
    const int64_t E = router_.outputs();
    Scratch scratch;
    float* logits = scratch.take<float>(rows * E);
    multiply({{router_.weights(), normed, stride, rows, nullptr, Epilogue::store, logits, E}});
    std::vector<std::vector<Choice>> choices(E);
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
            choices[ids[i]].push_back({row, static_cast<float>(std::exp(of_row[ids[i]] - top) / sum)});
    }
    return choices;
}

void Experts::forward(const float* x, int64_t rows, float* sum) const {
    Scratch scratch;
    const int64_t C = norm_.size, stride = round_up(C, block_size);
    float* normed = scratch.take<float>(rows * stride);
    norm_(x, rows, Type::f32, normed);
    std::fill_n(sum, rows * C, 0.0f);
    const std::vector<std::vector<Choice>> choices = choose(normed, rows, stride);
    for (size_t e = 0; e < choices.size(); e++) {
        const auto count = static_cast<int64_t>(choices[e].size());
        if (!count) continue;
        Scratch own;
        float* from = own.take<float>(count * C);
        float* out = own.take<float>(count * C);
        void* gated = own.take<char>(count * gates_[e].stride() * size_of(gates_[e].type()));
        for (int64_t i = 0; i < count; i++) std::copy_n(normed + choices[e][i].row * stride, C, from + i * C);
        gates_[e].forward(from, count, gated);
        multiply({{downs_[e].weights(), gated, gates_[e].stride(), count, nullptr, Epilogue::store, out, C}});
        for (int64_t i = 0; i < count; i++) {
            float* to = sum + choices[e][i].row * C;
            for (int64_t c = 0; c < C; c++) to[c] += choices[e][i].weight * out[i * C + c];
        }
    }
}

}  // namespace triforce
