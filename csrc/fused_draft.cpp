#include "fused_draft.hpp"

#include <algorithm>

#include "memory.hpp"

namespace triforce {
namespace {

/// The number of tokens of each live row that the model has not seen: at least the last token.
std::vector<int64_t> unseen(const FusedDraft& draft) {
    std::vector<int64_t> counts(draft.forward.rows);
    for (int64_t b = 0; b < draft.forward.rows; b++) {
        if (!draft.verification.live[b]) continue;
        const int64_t length = draft.verification.lengths[b];
        const int64_t position = draft.forward.positions[b];
        require(0 <= position && position < length, "a text has tokens that were not seen");
        require(length + draft.count <= draft.verification.capacity, "the texts must have room for the tokens");
        counts[b] = length - position;
    }
    return counts;
}

/// Writes the ids (B, T) of one pass, and the scored column of each row.
void set_ids(const FusedDraft& draft, int64_t* ids, int64_t* at) {
    const ForwardBatch& forward = draft.forward;
    std::fill_n(ids, forward.rows * forward.width, 0);
    for (int64_t b = 0; b < forward.rows; b++) {
        const int64_t* text = draft.texts + b * draft.verification.capacity;
        std::copy_n(text + forward.positions[b], forward.counts[b], ids + b * forward.width);
        at[b] = std::max<int64_t>(forward.counts[b] - 1, 0);
    }
}

int64_t longest(const std::vector<int64_t>& counts) {
    return std::max<int64_t>(*std::max_element(counts.begin(), counts.end()), 1);
}

void advance(ForwardBatch& forward) {
    for (int64_t b = 0; b < forward.rows; b++) {
        forward.positions[b] += forward.counts[b];
        for (View& view : forward.views) view.starts[b] += forward.counts[b];
        forward.counts[b] = std::min<int64_t>(forward.counts[b], 1);
    }
}

}  // namespace

Invalid decode(FusedDraft draft, const Draw& draw) {
    ForwardBatch& forward = draft.forward;
    VerificationBatch& columns = draft.verification;
    const int64_t B = forward.rows;
    forward.counts = unseen(draft);
    std::vector<int64_t> lengths(columns.lengths, columns.lengths + B), none(B), at(B);
    std::vector<int64_t> tokens(B), origins(B), counts(B);
    Scratch scratch;
    forward.logits = scratch.take<float>(B * columns.vocabulary);
    int64_t* ids = scratch.take<int64_t>(B * longest(forward.counts));
    forward.ids = ids, forward.at = at.data(), forward.scored = 1;
    columns.columns = 1, columns.logits_f32 = forward.logits, columns.logits_f64 = nullptr;
    columns.lengths = lengths.data(), columns.counts = none.data();
    columns.out_tokens = tokens.data(), columns.out_origins = origins.data();
    columns.out_counts = counts.data();
    for (int64_t i = 0; i < draft.count; i++) {
        forward.width = longest(forward.counts);
        set_ids(draft, ids, at.data());
        draft.pass(forward);
        if (const Invalid invalid = draw(i, columns)) return invalid;
        for (int64_t b = 0; b < B; b++) {
            draft.tokens[b * draft.count + i] = tokens[b];
            if (columns.live[b]) draft.texts[b * columns.capacity + lengths[b]++] = tokens[b];
        }
        advance(forward);
    }
    return std::nullopt;
}

}  // namespace triforce
