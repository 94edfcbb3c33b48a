#include "experts.hpp"

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <numeric>

#include "memory.hpp"
#include "threads.hpp"

namespace triforce {
namespace {

using Chosen = std::vector<ExpertChoices::Choice>;
constexpr int64_t rows_at_once = 8, columns_at_once = 2048;  // rows that a chunk rounds, columns that a chunk sums up
constexpr double least_sum = 1e-20;  // added to the divisor of renormalised sigmoid scores, as in training

std::optional<Tensor> at(const std::vector<Tensor>& biases, size_t expert) {
    return biases.empty() ? std::nullopt : std::optional<Tensor>(biases[expert]);
}

/// Scores of a row's logits by the router's function. Scores of a softmax are not yet divided by their sum, `whole`.
class Scores {
  public:
    Scores(const float* logits, int64_t count, bool sigmoid)
        : logits_(logits), count_(count), sigmoid_(sigmoid), top_(*std::max_element(logits, logits + count)) {}

    double operator[](int64_t expert) const {
        const double logit = logits_[expert];
        return sigmoid_ ? 1 / (1 + std::exp(-logit)) : std::exp(logit - top_);
    }
    /// Sum of the scores of the first `count` ids, in their order.
    double sum(const std::vector<int64_t>& ids, int64_t count) const {
        double all = 0;
        for (int64_t i = 0; i < count; i++) all += (*this)[ids[i]];
        return all;
    }
    double whole(const std::vector<int64_t>& ids) const { return sigmoid_ ? 1 : sum(ids, count_); }

  private:
    const float* logits_;
    int64_t count_;
    bool sigmoid_;
    double top_;
};

/// Puts the ids of the `count` largest numbers first, in descending order; among equal numbers the lowest ids.
void rank(const std::vector<double>& numbers, int64_t count, std::vector<int64_t>& ids) {
    std::partial_sort(ids.begin(), ids.begin() + count, ids.end(), [&](int64_t a, int64_t b) {
        return numbers[a] != numbers[b] ? numbers[a] > numbers[b] : a < b;
    });
}

/// Sets the worth of experts outside the `best` best groups to minus infinity. The worth of a group is the sum of its
/// two best experts' worth.
void leave_best_groups(std::vector<double>& worth, int64_t groups, int64_t best) {
    if (best == groups) return;
    const int64_t size = static_cast<int64_t>(worth.size()) / groups;
    std::vector<int64_t> ids(groups);
    std::iota(ids.begin(), ids.end(), 0);
    std::vector<double> group_worth(groups);
    for (int64_t g = 0; g < groups; g++) {
        double two[2];
        std::partial_sort_copy(worth.begin() + g * size, worth.begin() + (g + 1) * size, two, two + 2,
                               std::greater<>());
        group_worth[g] = two[0] + two[1];
    }
    rank(group_worth, best, ids);
    for (int64_t i = best; i < groups; i++)
        std::fill_n(worth.begin() + ids[i] * size, size, -std::numeric_limits<double>::infinity());
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

Experts::Experts(const std::optional<Tensor>& weight, const ExpertWeights& w, Type type, const LayerSettings& s,
                 const Routing& routing)
    : norm_(make_norm(weight, w.router.inputs(), type, s.eps)), router_({w.router}, 0), routing_(routing) {
    const size_t count = w.gate.size();
    shared_ = static_cast<int64_t>(count) - router_.outputs();
    require(router_.type() == Type::f32, "the router must be float32");
    require(shared_ >= 0 && w.up.size() == count && w.down.size() == count,
            "there must be as many experts as the router has outputs, or more");
    for (const auto* biases : {&w.gate_bias, &w.up_bias, &w.down_bias})
        require(biases->empty() || biases->size() == count, "there must be as many biases as experts, or none");
    require_choices();
    router_bias_ = floats(w.router_bias, router_.outputs(), Type::f32);
    correction_ = floats(w.correction, router_.outputs(), Type::f32);
    for (size_t e = 0; e < count; e++) {
        gates_.emplace_back(GateWeights{{}, w.gate[e], w.up[e], at(w.gate_bias, e), at(w.up_bias, e)}, s);
        downs_.emplace_back(std::vector{w.down[e]}, s.bits);
        down_biases_.push_back(floats(at(w.down_bias, e), outputs(), type));
        w.gate[e].expect(type, w.gate[0].outputs(), router_.inputs());
        w.down[e].expect(type, outputs(), w.down[0].inputs());
    }
}

void Experts::require_choices() const {
    const int64_t E = router_.outputs(), groups = routing_.groups, best = routing_.chosen_groups;
    require(0 < groups && E % groups == 0 && (groups == 1 || 2 * groups <= E),
            "groups must be of the same number of experts, of at least two");
    require(0 < best && best <= groups, "chosen_groups must lie in [1, groups]");
    require(0 < routing_.chosen && routing_.chosen <= E / groups * best, "chosen must lie in [1, experts of groups]");
}

size_t Experts::bytes() const {
    size_t sum = router_.bytes();
    for (const GatedMlp& gate : gates_) sum += gate.bytes();
    for (const Matrix& down : downs_) sum += down.bytes();
    return sum;
}

ExpertChoices Experts::choose(const float* normed, int64_t rows) const {
    const int64_t E = router_.outputs(), stride = round_up(hidden(), block_size), chosen = routing_.chosen;
    Scratch scratch;
    float* logits = scratch.take<float>(rows * E);
    multiply({{router_.weights(), normed, stride, rows, or_null(router_bias_), Epilogue::store, logits, E}});
    ExpertChoices choices{std::vector<Chosen>(gates_.size())};
    std::vector<int64_t> ids(E);
    std::vector<double> worth(E);
    for (int64_t row = 0; row < rows; row++) {
        const Scores scores(logits + row * E, E, routing_.sigmoid);
        std::iota(ids.begin(), ids.end(), 0);
        if (correction_.empty() && routing_.groups == 1) {
            std::copy_n(logits + row * E, E, worth.begin());  // scores have the order of logits, except for rounding
        } else {
            const double whole = scores.whole(ids);
            for (int64_t e = 0; e < E; e++) worth[e] = scores[e] / whole + (correction_.empty() ? 0 : correction_[e]);
            leave_best_groups(worth, routing_.groups, routing_.chosen_groups);
        }
        rank(worth, chosen, ids);
        const double least = routing_.sigmoid ? least_sum : 0;
        const double whole = routing_.renormalised ? scores.sum(ids, chosen) + least : scores.whole(ids);
        for (int64_t i = 0; i < chosen; i++)
            choices.experts[ids[i]].push_back({row, static_cast<float>(routing_.scale * (scores[ids[i]] / whole))});
        for (size_t e = E; e < gates_.size(); e++) choices.experts[e].push_back({row, 1.0f});
    }
    return choices;
}

int64_t Experts::forward(const float* x, int64_t rows, float* sum, InputCodes codes) const {
    Scratch scratch;
    void* gated = scratch.take<char>(rows * per_row() * gated_stride() * size_of(type()));
    const ExpertChoices choices = gate(x, rows, gated, codes);
    down(choices, gated, rows, sum);
    return choices.touched();
}

ExpertChoices Experts::gate(const float* x, int64_t rows, void* gated, InputCodes codes) const {
    Scratch scratch;
    const int64_t size = size_of(type()), stride = round_up(hidden(), block_size), row_bytes = stride * size;
    float* normed = scratch.take<float>(rows * stride);
    char* rounded = scratch.take<char>(rows * row_bytes);
    norm_(x, rows, Type::f32, normed);
    parallel((rows + rows_at_once - 1) / rows_at_once, [&](int64_t part) {
        for (int64_t row = part * rows_at_once; row < std::min(rows, (part + 1) * rows_at_once); row++)
            pointwise_kernels().round(normed + row * stride, hidden(), type(), rounded + row * row_bytes);
    });
    const ExpertChoices choices = choose(normed, rows);
    Linear* products = scratch.take<Linear>(2 * choices.count());
    int64_t count = 0;
    const auto to = [&](int64_t before) { return static_cast<char*>(gated) + before * gated_stride() * size; };
    choices.each([&](size_t expert, const Chosen& chosen, int64_t before) {
        const auto row_count = static_cast<int64_t>(chosen.size());
        char* from = rounded;
        if (row_count < rows) {
            from = scratch.take<char>(row_count * row_bytes);
            for (int64_t i = 0; i < row_count; i++)
                std::copy_n(rounded + chosen[i].row * row_bytes, row_bytes, from + i * row_bytes);
        }
        gates_[expert].project(from, row_count, to(before), codes, scratch, products + count);
        count += gates_[expert].products();
    });
    multiply(products, count);
    const Linear* done = products;
    choices.each([&](size_t expert, const Chosen&, int64_t before) {
        gates_[expert].activate(done, to(before));
        done += gates_[expert].products();
    });
    return choices;
}

void Experts::down(const ExpertChoices& choices, const void* gated, int64_t rows, float* sum) const {
    Scratch scratch;
    const int64_t C = outputs(), all = choices.count(), size = size_of(type());
    float* out = scratch.take<float>(all * C);
    Linear* products = scratch.take<Linear>(all);
    int64_t count = 0;
    choices.each([&](size_t expert, const Chosen& chosen, int64_t before) {
        const void* from = static_cast<const char*>(gated) + before * down_stride() * size;
        const float* bias = or_null(down_biases_[expert]);
        products[count++] = {downs_[expert].weights(), from, down_stride(), static_cast<int64_t>(chosen.size()), bias,
                             Epilogue::store, out + before * C, C};
    });
    multiply(products, count);
    parallel((C + columns_at_once - 1) / columns_at_once, [&](int64_t part) {
        const int64_t first = part * columns_at_once, last = std::min(first + columns_at_once, C);
        for (int64_t row = 0; row < rows; row++) std::fill(sum + row * C + first, sum + row * C + last, 0.0f);
        choices.each([&](size_t, const Chosen& chosen, int64_t before) {
            for (const ExpertChoices::Choice& choice : chosen) {
                const float *output = out + before++ * C, weight = choice.weight;
                float* to = sum + choice.row * C;
                for (int64_t c = first; c < last; c++) to[c] += weight * output[c];
            }
        });
    });
}

}  // namespace triforce
