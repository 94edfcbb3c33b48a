#include "sampler.hpp"

#include <algorithm>
#include <atomic>
#include <cmath>

#include "draw.hpp"
#include "threads.hpp"

namespace triforce {
namespace {

thread_local Workspace workspace;

size_t cell(const Pass& p, int row, int column) { return static_cast<size_t>(row) * p.columns + column; }

Logits logits(const Pass& p, int row, int column, double peak) {
    const size_t start = cell(p, row, column) * p.vocabulary;
    return {p.logits_f32 ? p.logits_f32 + start : nullptr, p.logits_f64 ? p.logits_f64 + start : nullptr, p.vocabulary,
            peak};
}

/// The largest logits of all columns, padding too.
bool find_peaks(const Pass& p, std::vector<double>& peaks, Refusal& refusal) {
    parallel(p.rows * p.columns, [&](int i) {
        const Logits x = logits(p, i / p.columns, i % p.columns, 0);
        peaks[i] = peak(x.f32, x.f64, p.vocabulary);
    });
    for (int i = 0; i < p.rows * p.columns; i++) {
        if (std::isfinite(peaks[i])) continue;
        refusal = {i / p.columns, i % p.columns, peaks[i]};
        return false;
    }
    return true;
}

/// What a column decides: its token, and whether that is the guess.
struct Verdict {
    int64_t token;
    bool kept;
};

/// The guesses of each row up to the first that is not kept, and the token of that column.
void settle(const Pass& p, const std::vector<Verdict>& verdicts) {
    const int guesses = p.columns - 1;
    for (int b = 0; b < p.rows; b++) {
        const Verdict* row = verdicts.data() + cell(p, b, 0);
        int64_t *tokens = p.out_tokens + cell(p, b, 0), *origins = p.out_origins + cell(p, b, 0);
        std::copy_n(p.tokens + static_cast<size_t>(b) * guesses, guesses, tokens);
        std::copy_n(p.origins + static_cast<size_t>(b) * guesses, guesses, origins);
        tokens[guesses] = origins[guesses] = 0;
        int kept = 0;
        while (row[kept].kept) kept++;
        tokens[kept] = row[kept].token;
        origins[kept] = p.tier;
        p.out_counts[b] = kept + 1;
    }
}

/// judge(row, column, law) for the columns that matter, the early ones first.
template <class Judge>
bool verify(const std::vector<Row>& rows, const Pass& p, Refusal& refusal, Judge judge) {
    std::vector<double> peaks(static_cast<size_t>(p.rows) * p.columns);
    if (!find_peaks(p, peaks, refusal)) return false;
    std::vector<Verdict> verdicts(peaks.size(), Verdict{0, false});
    std::vector<std::atomic<int>> last(p.rows);  // the column of a row's token, as far as is known
    for (int b = 0; b < p.rows; b++) last[b] = p.live[b] ? static_cast<int>(p.counts[b]) : -1;
    std::atomic<int> next{0};
    parallel(p.rows * p.columns, [&](int) {
        const int i = next++, b = i % p.rows, j = i / p.rows;
        if (j > last[b]) return;
        const Text text{p.ids + b * p.capacity, std::clamp<int64_t>(p.lengths[b] + j, 0, p.capacity)};
        Verdict& verdict = verdicts[cell(p, b, j)];
        verdict = judge(b, j, law(rows[b], text, logits(p, b, j, peaks[cell(p, b, j)]), workspace));
        int known = last[b];
        while (!verdict.kept && j < known && !last[b].compare_exchange_weak(known, j)) {
        }
    });
    settle(p, verdicts);
    return true;
}

int64_t guess(const Pass& p, int row, int column) { return p.tokens[row * (p.columns - 1) + column]; }

void spread(const Law& law, int vocabulary, double* probabilities) {
    std::fill_n(probabilities, vocabulary, 0.0);
    for (int i = 0; i < law.count; i++) probabilities[law.tokens[i]] = law.weights[i] / law.total;
}

}  // namespace

bool verify_seeded(const std::vector<Row>& rows, const Pass& p, const Exponentials& noise, Refusal& refusal) {
    return verify(rows, p, refusal, [&](int b, int j, const Law& law) -> Verdict {
        const int64_t pick = noise.table
            ? race(law, noise.table + cell(p, b, j) * p.vocabulary)
            : race(law, p.vocabulary, noise.noise->place(b, p.lengths[b] + j), workspace);
        return {pick, j < p.counts[b] && pick == guess(p, b, j)};
    });
}

bool verify_by_rejection(const std::vector<Row>& rows, const Pass& p, const Trial& trial, Refusal& refusal) {
    return verify(rows, p, refusal, [&](int b, int j, const Law& law) -> Verdict {
        double* probabilities = trial.laws + cell(p, b, j) * p.vocabulary;
        spread(law, p.vocabulary, probabilities);
        const double* uniforms = trial.uniforms + cell(p, b, 0);
        if (j == p.counts[b]) return {draw(law, probabilities, nullptr, uniforms[0]), false};
        const double* q = trial.guessed_laws + (static_cast<size_t>(b) * (p.columns - 1) + j) * p.vocabulary;
        const int64_t token = guess(p, b, j);
        if (uniforms[1 + j] * q[token] < probabilities[token]) return {token, true};
        return {draw(law, probabilities, q, uniforms[0]), false};
    });
}

}  // namespace triforce
