// Few queries over many keys: jobs share out the splits of a KV head, as FlashDecoding does (Dao et al. 2023).
#pragma once

#include "attention.hpp"
#include "memory.hpp"

namespace triforce {

inline const AttentionKernels& attention_kernels(const Attention& call) {
    return call.pages->is_bf16 ? attention_bf16() : attention_f32();
}

/// Memory for the partials of up to queries_at_once queries, on the stack of the job that computes them.
struct PartialBuffer {
    alignas(64) float acc[group_floats];
    float max[group_queries], sum[group_queries];

    Partial partial() { return {acc, max, sum}; }
};

/// Makes the partials of `count` queries those of no key.
void reset(const Attention& call, const Partial& partial, int64_t count);

/// Each job takes all queries of a KV head over one split. The job that finishes a head's last split merges them.
class SplitAttention {
  public:
    /// `call` must outlive this.
    explicit SplitAttention(const Attention& call);
    /// All rows, KV heads and splits.
    void attend();
    /// Splits [first, last) of one row and KV head.
    void attend(int64_t b, int g, int64_t first, int64_t last);

  private:
    struct Task {
        int64_t b;
        int g;
        int64_t split;
    };

    int64_t offset(const Task& task, int64_t first) const;
    Partial partial(const Task& task, int64_t first) const;
    float* page_sums(const Task& task, int64_t first) const;
    void run(const Task& task) const;
    void scan(const Task& task) const;
    void merge_head(const Task& task) const;
    void add_mass(const Task& task, const Queries& queries, const Partial& all) const;
    template <class Body>
    void each_group(const Task& task, Body body) const;

    const Attention& call_;
    const AttentionKernels& kernels_;
    Scratch scratch_;
    int64_t splits_ = 0, queries_ = 0;  // the most of any row
    float *acc_, *max_, *sum_, *page_sums_ = nullptr;
    int* splits_left_;  // of each row and KV head
};

}  // namespace triforce
