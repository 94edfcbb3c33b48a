#include "sampler.hpp"

#include <algorithm>
#include <atomic>
#include <cmath>

#include "threads.hpp"

namespace triforce {
namespace {

thread_local Workspace workspace;

size_t cell(const VerificationBatch& p, int row, int column) { return static_cast<size_t>(row) * p.columns + column; }

Logits logits(const VerificationBatch& p, int row, int column, double peak) {
    const size_t start = cell(p, row, column) * p.vocabulary;
    return {p.logits_f32 ? p.logits_f32 + start : nullptr, p.logits_f64 ? p.logits_f64 + start : nullptr, p.vocabulary,
            peak};
}

/// Writes the largest logit of each column, including padding. Returns a column whose peak is not finite, if any.
Invalid find_peaks(const VerificationBatch& p, std::vector<double>& peaks) {
    parallel(p.rows * p.columns, [&](int i) { peaks[i] = peak(logits(p, i / p.columns, i % p.columns, 0)); });
    for (int i = 0; i < p.rows * p.columns; i++)
        if (!std::isfinite(peaks[i])) return InvalidColumn{i / p.columns, i % p.columns, peaks[i]};
    return std::nullopt;
}

/// The distribution of a column, in this thread's workspace.
Distribution distribution(const Sampler& sampler, const VerificationBatch& p, int row, int column, double peak) {
    const Prefix prefix{p.ids + row * p.capacity, std::clamp<int64_t>(p.lengths[row] + column, 0, p.capacity)};
    return process_logits(sampler.rows[row], prefix, logits(p, row, column, peak), workspace);
}

/// The token of a column, and whether it is the accepted draft token.
struct Decision {
    int64_t token;
    bool accepted;
};

/// Writes the accepted draft tokens of each row, up to the first column without acceptance, and that column's token.
void commit(const VerificationBatch& p, const std::vector<Decision>& decisions) {
    const int drafted = p.columns - 1;
    for (int b = 0; b < p.rows; b++) {
        const Decision* row = decisions.data() + cell(p, b, 0);
        int64_t *tokens = p.out_tokens + cell(p, b, 0), *origins = p.out_origins + cell(p, b, 0);
        std::copy_n(p.tokens + static_cast<size_t>(b) * drafted, drafted, tokens);
        std::copy_n(p.origins + static_cast<size_t>(b) * drafted, drafted, origins);
        tokens[drafted] = origins[drafted] = 0;
        int accepted = 0;
        while (row[accepted].accepted) accepted++;
        tokens[accepted] = row[accepted].token;
        origins[accepted] = p.tier;
        p.out_counts[b] = accepted + 1;
    }
}

/// Calls decide(row, column, probs) for the columns up to a row's first rejection, early columns first. Threads may
/// also decide later columns.
template <class Decide>
Invalid verify(const Sampler& sampler, const VerificationBatch& p, Decide decide) {
    std::vector<double> peaks(static_cast<size_t>(p.rows) * p.columns);
    if (const Invalid invalid = find_peaks(p, peaks)) return invalid;
    std::vector<Decision> decisions(peaks.size(), Decision{0, false});
    std::vector<std::atomic<int>> last(p.rows);  // of each row: the first column known not to be accepted
    for (int b = 0; b < p.rows; b++) last[b] = p.live[b] ? static_cast<int>(p.counts[b]) : -1;
    std::atomic<int> next{0};
    parallel(p.rows * p.columns, [&](int) {
        const int i = next++, b = i % p.rows, j = i / p.rows;
        if (j > last[b]) return;
        Decision& decision = decisions[cell(p, b, j)];
        decision = decide(b, j, distribution(sampler, p, b, j, peaks[cell(p, b, j)]));
        int known = last[b];
        while (!decision.accepted && j < known && !last[b].compare_exchange_weak(known, j)) {
        }
    });
    commit(p, decisions);
    return std::nullopt;
}

int64_t draft_token(const VerificationBatch& p, int row, int column) {
    return p.tokens[row * (p.columns - 1) + column];
}

void write_dense(const Distribution& probs, int vocabulary, double* to) {
    std::fill_n(to, vocabulary, 0.0);
    for (int i = 0; i < probs.count; i++) to[probs.tokens[i]] = probs.weights[i] / probs.total;
}

}  // namespace

Invalid verify_seeded(const Sampler& sampler, const VerificationBatch& p, const Exponentials& noise) {
    return verify(sampler, p, [&](int b, int j, const Distribution& probs) -> Decision {
        const int64_t token = noise.table
            ? race(probs, noise.table + cell(p, b, j) * p.vocabulary)
            : race(probs, p.vocabulary, noise.noise->key(b, p.lengths[b] + j), workspace);
        return {token, j < p.counts[b] && token == draft_token(p, b, j)};
    });
}

Invalid verify_by_rejection(const Sampler& sampler, const VerificationBatch& batch, const RejectionInputs& inputs) {
    return verify(sampler, batch, [&](int b, int j, const Distribution& probs) -> Decision {
        double* p = inputs.out_probs + cell(batch, b, j) * batch.vocabulary;
        write_dense(probs, batch.vocabulary, p);
        const double* uniforms = inputs.uniforms + cell(batch, b, 0);
        if (j == batch.counts[b]) return {draw(probs, p, nullptr, uniforms[0]), false};
        const double* q = inputs.draft_probs + (static_cast<size_t>(b) * (batch.columns - 1) + j) * batch.vocabulary;
        const int64_t token = draft_token(batch, b, j);
        if (uniforms[1 + j] * q[token] < p[token]) return {token, true};
        return {draw(probs, p, q, uniforms[0]), false};
    });
}

Invalid verify_by_block(const Sampler& sampler, const VerificationBatch& batch, const RejectionInputs& inputs) {
    const int columns = batch.columns, vocabulary = batch.vocabulary;
    const auto target = [&](int b, int j) { return inputs.out_probs + cell(batch, b, j) * vocabulary; };
    std::vector<double> peaks(static_cast<size_t>(batch.rows) * columns);
    if (const Invalid invalid = find_peaks(batch, peaks)) return invalid;
    parallel(batch.rows * columns, [&](int i) {
        const int b = i / columns, j = i % columns;
        if (batch.live[b] && j <= batch.counts[b])
            write_dense(distribution(sampler, batch, b, j, peaks[i]), vocabulary, target(b, j));
    });
    std::vector<Decision> decisions(peaks.size(), Decision{0, false});
    parallel(batch.rows, [&](int b) {
        if (!batch.live[b]) return;
        const int drafted = static_cast<int>(batch.counts[b]);
        const double* uniforms = inputs.uniforms + cell(batch, b, 0);
        const double* draft = inputs.draft_probs + static_cast<size_t>(b) * (columns - 1) * vocabulary;
        BlockResidual place{target(b, 0), drafted ? draft : nullptr, 1, vocabulary}, end = place;
        int accepted = 0;
        for (int j = 1; j <= drafted; j++) {
            const int64_t token = draft_token(batch, b, j - 1);
            const double reach = std::min(place.reach * (place.p[token] / place.q[token]), 1.0);
            const double* q = j < drafted ? draft + static_cast<size_t>(j) * vocabulary : nullptr;
            place = {target(b, j), q, reach, vocabulary};
            const double residual = place.total();
            if (uniforms[j] * (residual + (1 - reach)) < residual) {
                accepted = j;
                end = place;
            }
        }
        for (int j = 0; j < accepted; j++) decisions[cell(batch, b, j)] = {draft_token(batch, b, j), true};
        decisions[cell(batch, b, accepted)] = {end.draw(uniforms[0]), false};
    });
    commit(batch, decisions);
    return std::nullopt;
}

}  // namespace triforce
