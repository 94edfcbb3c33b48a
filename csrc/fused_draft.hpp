// Tokens of a model without a draft below it, one after another in one call; they equal single draws.
#pragma once

#include <functional>

#include "decoder.hpp"
#include "sampler.hpp"

namespace triforce {

/// Draws the i-th token of all rows from a batch of one column. Returns one without a distribution, if there is one.
using Draw = std::function<Invalid(int64_t i, const VerificationBatch& batch)>;

/// Checks a batch of a model's tier, and runs it.
using Pass = std::function<void(const ForwardBatch& batch)>;

struct FusedDraft {
    Pass pass;
    ForwardBatch forward;       // of the first pass; its ids, counts and logits are set here
    VerificationBatch verification;  // the texts, and which rows are live
    int64_t* texts;     // (B, S): the same texts; tokens are appended to them
    int64_t count;
    int64_t* tokens;    // (B, count)
};

/// Draws `count` tokens of each live row. Returns the first without a distribution, if there is one. Throws
/// std::invalid_argument where texts, memory and model do not fit each other.
Invalid decode(FusedDraft draft, const Draw& draw);

}  // namespace triforce
