// The attention of one pass over some of an offloaded memory's layers, in their order.
#pragma once

#include <memory>
#include <vector>

#include "plan_reads.hpp"

namespace triforce {

class OffloadedPass {
  public:
    struct Options {
        bool exact;    // keys before the starts are committed, and may leave memory where they fill pages
        int64_t keep;  // pages of most attention mass that are to stay in memory, of each row, layer and KV head
    };
    /// Does nothing yet. `memory` and the calls must outlive this.
    OffloadedPass(Offload& memory, const AttentionCalls& calls, const Options& options)
        : memory_(memory), calls_(calls), options_(options) {}

    /// Commits full pages if `exact`, gives frames to the pages of new tokens, and starts to read ahead. Throws
    /// OffloadError.
    void start();
    /// After `start`, once for each layer. Throws OffloadError.
    void attend(const Attention& call);

  private:
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
    const AttentionCalls calls_;
    const Options options_;
    ReadPlan plan_;
    size_t next_ = 0;  // step of the plan
    std::unique_ptr<Reader> reader_;
};

}  // namespace triforce
