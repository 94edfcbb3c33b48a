// Tokens of a model with nothing below it, one after another in one call: each is scored by a pass over what came
// before it, and drawn from that law, as pass after pass would do it.
#pragma once

#include <functional>

#include "decoder.hpp"
#include "sampler.hpp"

namespace triforce {

/// How a pass of one column draws the tokens of all rows: the token behind that many, or a column without a law.
using Draw = std::function<bool(int64_t behind, const Pass& pass, Refusal& refusal)>;

struct Burst {
    const Decoder& decoder;
    const std::vector<const Pages*>& memory;
    Feed feed;           // what the first pass sees; its ids, counts and logits are found here
    Pass pass;           // the texts, and which rows are live
    int64_t* texts;      // (B, S): those of `pass`, behind which the tokens are written
    int64_t count;
    int64_t* tokens;     // (B, count)
};

/// Whether there was a law for every token. Throws std::invalid_argument where texts, memory and model do not fit.
bool run(Burst burst, const Draw& draw, Refusal& refusal);

}  // namespace triforce
