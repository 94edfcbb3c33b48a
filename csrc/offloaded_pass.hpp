// The attention of one pass over some of an offloaded memory's layers, in their order.
#pragma once

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "attention.hpp"
#include "offload.hpp"

namespace triforce {

/// Some splits of one row and KV head, whose stored pages are read into one buffer.
struct ReadStep {
    int64_t b;
    int g;
    int64_t first_split, last_split;
    std::vector<std::pair<int32_t, int64_t>> pages;  // page, and its frame in the buffer
    BufferReads reads;
};

class OffloadedPass {
  public:
    /// Does nothing yet. `memory` and the calls [first, last) must outlive this. It takes the calls of its layers.
    /// exact: keys before the starts are committed, and may leave memory where they fill pages. keep: pages of most
    /// attention mass that are to stay in memory, of each row, layer and KV head.
    OffloadedPass(Offload& memory, const Attention* first, const Attention* last, bool exact, int64_t keep);

    /// Commits full pages if `exact`, gives frames to the pages of new tokens, and starts to read ahead. Throws
    /// OffloadError.
    void start();
    /// After `start`, once for each of its layers. Throws OffloadError.
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
    const bool exact_;
    const int64_t keep_;
    // The plan. Planning changes nothing else and reads nothing.
    std::vector<bool> streamed_;   // of each layer of the memory: its attention reads buffers
    std::vector<ReadStep> steps_;  // layers, then KV heads, then rows, then splits: the order in which they are needed
    size_t next_ = 0;              // step
    std::unique_ptr<Reader> reader_;
};

}  // namespace triforce
