// The attention of one pass over layers of an offloaded memory, in their order.
#pragma once

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "attention.hpp"
#include "offload.hpp"

namespace triforce {

/// Splits [first_split, last_split) of row b and KV head g. Their stored pages are read into one buffer.
struct ReadStep {
    int64_t b;
    int g;
    int64_t first_split, last_split;
    std::vector<std::pair<int32_t, int64_t>> pages;  // page, and its frame in the buffer
    BufferReads reads;
};

class OffloadedPass {
  public:
    /// `memory` and the calls [first, last) must outlive the OffloadedPass, which skips calls for pages of other
    /// memory. past_committed: whether keys before the starts are committed; pages that they fill may leave memory.
    /// keep: pages of most attention mass that are to stay in memory, per row, layer and KV head.
    OffloadedPass(Offload& memory, const Attention* first, const Attention* last, bool past_committed, int64_t keep);

    /// Commits full pages if `past_committed`, gives frames to the pages of new tokens, and starts to read ahead.
    /// Throws OffloadError.
    void start();
    /// Computes the attention of one layer. Called after `start`, once for each layer, in their order. Throws
    /// OffloadError.
    void attend(const Attention& call);

  private:
    bool all_resident(const Attention& call) const;
    void fill(const Attention& call, ReadStep& step) const;
    void plan_row(const Attention& call, int64_t b, int g);
    void plan_reads();
    void commit(const Attention& call);
    void make_writable(const Attention& call);
    void fetch_now(const Attention& call);
    void stream(Attention call);
    void stream_row(const Attention& call, IncrementalAttention& attention, std::vector<int32_t>& frames, int64_t b,
                    int g);
    void keep_all(const ReadStep& step, int layer, int64_t buffer);
    void keep_best(const Attention& call, int64_t b, int g, const std::vector<int32_t>& frames);
    void keep(int64_t id, int64_t frame);

    Offload& memory_;
    std::vector<Attention> calls_;
    const bool past_committed_;
    const int64_t keep_;
    // The plan. Planning sets these members only, and reads nothing from the store.
    std::vector<bool> streamed_;   // per layer of the memory: whether its attention reads buffers
    std::vector<ReadStep> steps_;  // in the order of use: by layer, then KV head, then row, then splits
    size_t next_step_ = 0;         // index of the next step
    std::unique_ptr<Reader> reader_;
};

}  // namespace triforce
