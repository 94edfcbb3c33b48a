// A forward pass of a decoder in one call: embedding, layers, head. Between two passes only K and V are kept.
//
// Rows B, tokens T of a row in a pass, scored columns J of a row, layers L, hidden size C, query heads H, KV heads G,
// head size D, vocabulary V.
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
/// a window, queries for the sinks are rotated to their position in [sinks | window].
struct View {
    int64_t layers;
    const int32_t* lists;  // page numbers; lists of layer i begin at lists + i * layer_stride
    int64_t layer_stride, row_stride, head_stride, list_length;
    std::vector<int64_t> starts;  // (B)
    int64_t sinks, window;
    std::vector<int64_t> coarse;  // (B): see Attention; or empty
    Search search;                // without rows if there is no search
};

/// The new tokens of a pass. Token t of row b is key views[i].starts[b] + t of the row's lists in view i, which also
/// give its slot.
struct ForwardBatch {
    int64_t rows, width;
    const int64_t* ids;                      // (B, T)
    std::vector<int64_t> positions, counts;  // (B): position of the first token; number of tokens without padding
    Rotation rotation;                       // tables of all positions, with the rotations of all layers
    std::vector<View> views;                 // of all layers, in their order
    const int64_t* at;                       // (B, J): columns of the tokens that are scored; or null: all tokens
    int64_t scored;                          // J
    float* logits;                           // (B, J, V)
    char* queries;                           // (L, B, T, H, D), rotated; or null
    float* mass;                             // (L, B, G, list_length); or null
    int64_t first_layer, last_layer;         // layers that are run, last_layer excluded
    float* x;                                // (B, T, C): the residual stream, if not all layers are run; or null
    bool past_committed;                     // this and `keep` are for offloaded memory, see OffloadedPass
    int64_t keep;
    std::vector<int64_t> state_layers;       // numbers of layers after which the residual stream is copied
    float* states;                           // (state_layers, B, T, C); or null
};

/// The Attention of each layer. Queries and outputs are not set.
std::vector<Attention> attention_calls(const std::vector<const Pages*>& memory, const ForwardBatch& batch, int heads);

/// Positions of new tokens, their positions for the sinks, their slots, and the slots of the tokens before them, (B *
/// T) each; 0 for padding.
struct Places {
    int64_t *positions, *sink_positions, *slots, *previous_slots;
};
Places take_places(Scratch& scratch, int64_t count);
/// Sets the places of a batch's tokens by the lists of `call`.
void locate(const Places& at, const ForwardBatch& batch, const Attention& call);

class Decoder {
  public:
    /// rotations: index of each layer's rotation in the tables of a pass. codes: see `DecoderLayer::finish`. Throws
    /// std::invalid_argument.
    Decoder(std::vector<std::shared_ptr<DecoderLayer>> layers, std::shared_ptr<LmHead> head,
            std::shared_ptr<Embedding> embedding, std::vector<int64_t> rotations, InputCodes codes);

    const std::vector<std::shared_ptr<DecoderLayer>>& layers() const { return layers_; }
    const LmHead& head() const { return *head_; }
    /// Throws std::invalid_argument unless the pages of each layer and the batch fit each other and this model.
    void check(const std::vector<const Pages*>& memory, const ForwardBatch& batch) const;
    /// Returns `ExpertChoices::touched`, a mean over the finished layers with experts; 0 without such layers.
    double forward(const std::vector<const Pages*>& memory, const ForwardBatch& batch) const;

  private:
    void score(const ForwardBatch& batch, const float* x) const;

    std::vector<std::shared_ptr<DecoderLayer>> layers_;
    std::shared_ptr<LmHead> head_;
    std::shared_ptr<Embedding> embedding_;
    std::vector<int64_t> rotations_;
    InputCodes codes_;
};

}  // namespace triforce
