// A whole pass of a decoder in one call: embedding, layers, head. Between two passes nothing is left but K and V.
//
// Rows B, tokens T of each in a pass, scored columns J, layers L, hidden size C, query heads H, KV heads G, head size
// D, vocabulary V.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "attention.hpp"
#include "block.hpp"
#include "search.hpp"
#include "write.hpp"

namespace triforce {

/// What the queries see in some consecutive layers; each of these has lists of its own unless layer_stride is 0. With a
/// window a query meets the sinks from its place in [sinks | window].
struct View {
    int64_t layers;
    const int32_t* lists;
    int64_t layer_stride, row_stride, head_stride, list_length;
    std::vector<int64_t> starts;  // (B)
    int64_t sinks, window;
    std::vector<int64_t> coarse;  // (B): see Attention; or empty
    Search search;                // or of no rows: there is none
};

/// The new tokens of some rows. Token t of row b is key views[i].starts[b] + t of its lists, so they name its slot too.
struct Feed {
    int64_t rows, width;
    const int64_t* ids;                      // (B, T)
    std::vector<int64_t> positions, counts;  // (B): of a row's first token; tokens that it feeds, the rest is padding
    Rotation rotation;                       // of all positions
    std::vector<View> views;                 // of all layers, in their order
    const int64_t* at;                       // (B, J): the tokens that are scored; or null: all of them
    int64_t scored;                          // J
    float* logits;                           // (B, J, V)
    char* queries;                           // (L, B, T, H, D), rotated; or null
    float* mass;                             // (L, B, G, list_length); or null
    int64_t first_layer, last_layer;         // the layers that are run, the last one excluded: a part of a pass
    float* x;                                // (B, T, C): the residual stream between its parts; or null: all is run
    bool exact;                              // these two are for memory that is not all there: see OffloadedPass::How
    int64_t keep;
};

class Decoder {
  public:
    /// `embedding` (V, C) stays its owner's; without one it is the head's matrix. Throws std::invalid_argument.
    Decoder(std::vector<std::shared_ptr<Block>> blocks, std::shared_ptr<Head> head, std::optional<Tensor> embedding);

    const std::vector<std::shared_ptr<Block>>& blocks() const { return blocks_; }
    const Head& head() const { return *head_; }
    /// Throws std::invalid_argument unless memory and feed fit each other and this model.
    void check(const std::vector<const Pages*>& memory, const Feed& feed) const;
    void run(const std::vector<const Pages*>& memory, const Feed& feed) const;

  private:
    void embed(const Feed& feed, float* x) const;
    void score(const Feed& feed, const float* x) const;

    std::vector<std::shared_ptr<Block>> blocks_;
    std::shared_ptr<Head> head_;
    std::optional<Tensor> embedding_;
};

}  // namespace triforce
