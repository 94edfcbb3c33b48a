#include "burst.hpp"

#include <algorithm>
#include <stdexcept>

#include "memory.hpp"

namespace triforce {
namespace {

void require(bool fine, const char* why) {
    if (!fine) throw std::invalid_argument(why);
}

/// What each live row has not seen: at least its last token.
std::vector<int64_t> unseen(const Burst& burst) {
    std::vector<int64_t> counts(burst.feed.rows);
    for (int64_t b = 0; b < burst.feed.rows; b++) {
        if (!burst.pass.live[b]) continue;
        const int64_t length = burst.pass.lengths[b];
        require(0 <= burst.feed.positions[b] && burst.feed.positions[b] < length, "a text has tokens that were not seen");
        require(length + burst.count <= burst.pass.capacity, "the texts must have room for the tokens");
        counts[b] = length - burst.feed.positions[b];
    }
    return counts;
}

/// The ids of one pass (B, T), and the column of each row that is scored.
void feed_texts(const Burst& burst, int64_t* ids, int64_t* at) {
    const Feed& feed = burst.feed;
    std::fill_n(ids, feed.rows * feed.width, 0);
    for (int64_t b = 0; b < feed.rows; b++) {
        std::copy_n(burst.texts + b * burst.pass.capacity + feed.positions[b], feed.counts[b], ids + b * feed.width);
        at[b] = std::max<int64_t>(feed.counts[b] - 1, 0);
    }
}

void advance(Feed& feed) {
    for (int64_t b = 0; b < feed.rows; b++) {
        feed.positions[b] += feed.counts[b];
        for (View& view : feed.views) view.starts[b] += feed.counts[b];
        feed.counts[b] = std::min<int64_t>(feed.counts[b], 1);
    }
}

}  // namespace

bool run(Burst burst, const Draw& draw, Refusal& refusal) {
    Feed& feed = burst.feed;
    Pass& pass = burst.pass;
    const int64_t B = feed.rows;
    feed.counts = unseen(burst);
    std::vector<int64_t> lengths(pass.lengths, pass.lengths + B), none(B), tokens(B), origins(B), counts(B), at(B);
    Scratch scratch;
    feed.logits = scratch.take<float>(B * pass.vocabulary);
    int64_t* ids = scratch.take<int64_t>(B * std::max<int64_t>(*std::max_element(feed.counts.begin(), feed.counts.end()), 1));
    feed.ids = ids, feed.at = at.data(), feed.scored = 1;
    pass.columns = 1, pass.logits_f32 = feed.logits, pass.logits_f64 = nullptr;
    pass.lengths = lengths.data(), pass.counts = none.data();
    pass.out_tokens = tokens.data(), pass.out_origins = origins.data(), pass.out_counts = counts.data();
    for (int64_t i = 0; i < burst.count; i++) {
        feed.width = std::max<int64_t>(*std::max_element(feed.counts.begin(), feed.counts.end()), 1);
        feed_texts(burst, ids, at.data());
        burst.decoder.check(burst.memory, feed);
        burst.decoder.run(burst.memory, feed);
        if (!draw(i, pass, refusal)) return false;
        for (int64_t b = 0; b < B; b++) {
            burst.tokens[b * burst.count + i] = tokens[b];
            if (pass.live[b]) burst.texts[b * pass.capacity + lengths[b]++] = tokens[b];
        }
        advance(feed);
    }
    return true;
}

}  // namespace triforce
