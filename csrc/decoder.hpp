// A forward pass of a decoder in one call: embedding, layers, head. Between two passes only K and V are kept.
//
// Rows B, tokens T of each in a pass, scored columns J, layers L, hidden size C, query heads H, KV heads G, head size
// D, vocabulary V.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "attention.hpp"
#include "decoder_layer.hpp"
#include "embedding.hpp"
#include "memory.hpp"
#include "search.hpp"
#include "write.hpp"

namespace triforce {

/// The keys that queries see in some consecutive layers. Each layer has lists of its own unless layer_stride is 0. With
/// a window a query meets the sinks as from its position in [sinks | window].
struct View {
    int64_t layers;
    const int32_t* lists;
    int64_t layer_stride, row_stride, head_stride, list_length;
    std::vector<int64_t> starts;  // (B)
    int64_t sinks, window;
    std::vector<int64_t> coarse;  // (B): see Attention; or empty
    Search search;                // of no rows where there is none
};

/// The new tokens of some rows. Token t of row b is key views[i].starts[b] + t of its lists, which also give its slot.
struct ForwardBatch {
    int64_t rows, width;
    const int64_t* ids;                      // (B, T)
    std::vector<int64_t> positions, counts;  // (B): of a row's first token; of its tokens, the rest is padding
    Rotation rotation;                       // tables of all positions, with the rotations of all layers
    std::vector<View> views;                 // of all layers, in their order
    const int64_t* at;                       // (B, J): the tokens that are scored; or null: all of them
    int64_t scored;                          // J
    float* logits;                           // (B, J, V)
    char* queries;                           // (L, B, T, H, D), rotated; or null
    float* mass;                             // (L, B, G, list_length); or null
    int64_t first_layer, last_layer;         // layers that are run, last_layer excluded
    float* x;                                // (B, T, C): the residual stream, if not all layers are run; or null
    bool exact;                              // for offloaded memory, as `keep`: see OffloadedPass
    int64_t keep;
    std::vector<int64_t> state_layers;       // numbers of layers after which the residual stream is copied
    float* states;                           // (state_layers, B, T, C); or null
};

/// The attention of each layer, without queries and outputs.
std::vector<Attention> attention_calls(const std::vector<const Pages*>& memory, const ForwardBatch& batch, int heads);

/// Where new tokens stand, (B * T): their positions, their slots, and the slots before them; padding is at 0.
struct Places {
    int64_t *positions, *sink_positions, *slots, *before;
};
Places take_places(Scratch& scratch, int64_t count);
void locate(const Places& at, const ForwardBatch& batch, const Attention& call);

class Decoder {
  public:
    /// `rotations`: the number of each layer's in the tables of a pass. Throws std::invalid_argument.
    Decoder(std::vector<std::shared_ptr<DecoderLayer>> layers, std::shared_ptr<LmHead> head,
            std::shared_ptr<Embedding> embedding, std::vector<int64_t> rotations);

    const std::vector<std::shared_ptr<DecoderLayer>>& layers() const { return layers_; }
    const LmHead& head() const { return *head_; }
    /// Throws std::invalid_argument unless the pages of each layer and the batch fit each other and this model.
    void check(const std::vector<const Pages*>& memory, const ForwardBatch& batch) const;
    /// Returns how many experts were touched in the mean of the finished layers that have some, see `ExpertChoices`.
    double forward(const std::vector<const Pages*>& memory, const ForwardBatch& batch) const;

  private:
    void score(const ForwardBatch& batch, const float* x) const;

    std::vector<std::shared_ptr<DecoderLayer>> layers_;
    std::shared_ptr<LmHead> head_;
    std::shared_ptr<Embedding> embedding_;
    std::vector<int64_t> rotations_;
};

}  // namespace triforce
