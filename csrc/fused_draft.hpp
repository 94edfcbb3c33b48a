// Drafting of several tokens in one call, by a model that has no draft of its own. The tokens equal those of one call
// per token.
#pragma once

#include <functional>

#include "decoder.hpp"
#include "sampler.hpp"

namespace triforce {

/// Draws the i-th token of all rows from a batch of one column. Returns a column without a distribution, if any.
using Draw = std::function<Invalid(int64_t i, const VerificationBatch& batch)>;

/// Checks a batch and runs a pass of the model over it.
using Pass = std::function<void(const ForwardBatch& batch)>;

struct FusedDraft {
    Pass pass;
    ForwardBatch forward;            // the first pass; `decode` sets its ids, counts and logits
    VerificationBatch verification;  // the texts, and which rows are live
    int64_t* texts;                  // (B, S): verification.ids; tokens are appended to them
    int64_t count;
    int64_t* tokens;                 // (B, count): output
};

/// Draws `count` tokens of each live row. Returns a column without a distribution, if any. Throws
/// std::invalid_argument if texts, memory and model do not fit each other.
Invalid decode(FusedDraft draft, const Draw& draw);

}  // namespace triforce
