#include "logits_processor.hpp"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "vocabulary.hpp"

namespace triforce {
namespace {

/// Sets the score of each token in [first, last) to change(score, count of the token in this range). Ids are clamped to
/// the vocabulary.
template <class Change>
void for_each_token(const int64_t* first, const int64_t* last, Workspace& w, Change change) {
    const auto vocabulary = static_cast<int64_t>(w.scores.size());
    const auto token = [=](int64_t id) { return std::clamp<int64_t>(id, 0, vocabulary - 1); };
    w.counts.resize(w.scores.size());
    for (const int64_t* id = first; id < last; id++) w.counts[token(*id)]++;
    for (const int64_t* id = first; id < last; id++) {
        int32_t& count = w.counts[token(*id)];
        if (count) w.scores[token(*id)] = change(w.scores[token(*id)], count);
        count = 0;
    }
}

void penalize(const RowParams& row, Prefix prefix, Workspace& w) {
    const int64_t *end = prefix.ids + prefix.length, *output = prefix.ids + std::min(row.prompt, prefix.length);
    if (row.repetition != 1)
        for_each_token(prefix.ids, end, w, [&](double score, int) {
            return score > 0 ? score / row.repetition : score * row.repetition;
        });
    if (row.presence != 0 || row.frequency != 0)
        for_each_token(output, end, w, [&](double score, int count) {
            return score - row.presence - count * row.frequency;
        });
    for (const auto& [token, value] : row.bias) w.scores[token] += value;
}

/// Writes the scores of all tokens, before the temperature.
void load(const RowParams& row, Prefix prefix, const Logits& logits, Workspace& w) {
    if (logits.f32)
        std::copy_n(logits.f32, logits.vocabulary, w.scores.begin());
    else
        std::copy_n(logits.f64, logits.vocabulary, w.scores.begin());
    penalize(row, prefix, w);
}

/// The distribution of one token with probability 1.
Distribution single_token(int token, Workspace& w) {
    w.tokens[0] = token;
    w.scores[0] = 1;
    return {w.tokens.data(), w.scores.data(), 1, 1};
}

template <class T>
int first_at(const T* values, int n, double peak) {
    return static_cast<int>(std::find(values, values + n, static_cast<T>(peak)) - values);
}

Distribution greedy(const RowParams& row, Prefix prefix, const Logits& logits, Workspace& w) {
    const int n = logits.vocabulary;
    if (row.raw())
        return single_token(
            logits.f32 ? first_at(logits.f32, n, logits.peak) : first_at(logits.f64, n, logits.peak), w);
    load(row, prefix, logits, w);
    return single_token(static_cast<int>(std::max_element(w.scores.begin(), w.scores.end()) - w.scores.begin()), w);
}

/// Writes the scores of all tokens, after the temperature. The largest score is 0.
void scale(const RowParams& row, Prefix prefix, const Logits& logits, Workspace& w) {
    const VocabularyKernels& loops = vocabulary_kernels();
    const int n = logits.vocabulary;
    double* scores = w.scores.data();
    if (!row.raw()) {
        load(row, prefix, logits, w);
        loops.scores_f64(scores, n, loops.peak_f64(scores, n), row.temperature, scores);
    } else if (logits.f32) {
        loops.scores_f32(logits.f32, n, logits.peak, row.temperature, scores);
    } else {
        loops.scores_f64(logits.f64, n, logits.peak, row.temperature, scores);
    }
}

}  // namespace

double peak(const Logits& x) {
    const VocabularyKernels& loops = vocabulary_kernels();
    return x.f32 ? loops.peak_f32(x.f32, x.vocabulary) : loops.peak_f64(x.f64, x.vocabulary);
}

Distribution process_logits(const RowParams& row, Prefix prefix, const Logits& logits, Workspace& w) {
    const VocabularyKernels& loops = vocabulary_kernels();
    w.scores.resize(logits.vocabulary);
    w.tokens.resize(logits.vocabulary);
    if (row.temperature == 0) return greedy(row, prefix, logits, w);
    scale(row, prefix, logits, w);
    std::iota(w.tokens.begin(), w.tokens.end(), 0);
    Candidates c{w.tokens.data(), w.scores.data(), logits.vocabulary};
    if (row.min_p > 0) keep_at_least(c, std::log(row.min_p));
    if (row.top_k > 0 && row.top_k < logits.vocabulary) keep_largest(c, static_cast<int>(row.top_k), w.selection);
    loops.exponentiate(c.values, c.count);
    if (row.top_p < 1) keep_nucleus(c, row.top_p, loops.sum(c.values, c.count), w.selection);
    return {c.tokens, c.values, c.count, loops.sum(c.values, c.count)};
}

}  // namespace triforce
