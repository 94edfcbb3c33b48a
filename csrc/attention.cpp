#include "attention.hpp"

#include <algorithm>
#include <optional>
#include <vector>

#include "memory.hpp"
#include "threads.hpp"
#include "write.hpp"

namespace triforce {
namespace {

void check_row(const Attention& call, int64_t b) {
    const int64_t start = call.starts[b], count = call.counts[b];
    require(0 <= count && count <= call.width, "counts must lie in [0, T]");
    require(0 <= start && start < INT32_MAX, "starts must lie in [0, 2^31 - 1)");
    if (call.coarse) require(0 <= call.coarse[b] && call.coarse[b] <= start, "coarse must lie in [0, starts]");
    const int64_t used = call.visible_pages(b);
    require(used <= call.list_length, "lists must have a page for each key that is seen");
    const int lists = call.head_stride ? call.pages->heads : 1;
    for (int g = 0; g < lists; g++) {
        uint32_t largest = 0;
        const int32_t* list = call.list(b, g);
        for (int64_t i = 0; i < used; i++) largest = std::max(largest, static_cast<uint32_t>(list[i]));
        require(largest < call.pages->count, "lists must hold page numbers of the pool");
    }
}

const AttentionKernels& attention_kernels(const Attention& call) {
    const bool is_bf16 = call.pages->type == Type::bf16;
    if (call.pages->coded) return is_bf16 ? attention_codes_bf16() : attention_codes_f32();
    return is_bf16 ? attention_bf16() : attention_f32();
}

/// Memory for the partials of up to queries_at_once queries, on the stack of the job that computes them.
struct PartialBuffer {
    alignas(64) float acc[group_floats];
    float shift[group_queries], sum[group_queries];

    Partial partial() { return {acc, shift, sum}; }
};

/// Resets partials to queries that have seen no key. A sink logit, if any, counts from the beginning, with weight 1.
void reset(const Attention& call, const Queries& queries, const Partial& partial) {
    const float* sinks = call.pages->attention_sink_logits;
    std::fill_n(partial.acc, queries.count * call.pages->dim, 0.0f);
    std::fill_n(partial.sum, queries.count, sinks ? 1.0f : 0.0f);
    for (int i = 0; i < queries.count; i++)
        partial.shift[i] = sinks ? sinks[call.head(queries, i)] * bits_of_e : nothing_seen;
}

/// For few queries over many keys. A job takes all queries of a row and KV head over one split, as in FlashDecoding
/// (Dao et al. 2023). The job that finishes the last split of a row and head merges all of its splits.
class SplitAttention {
  public:
    /// `call` must outlive the SplitAttention.
    explicit SplitAttention(const Attention& call) : call_(call), kernels_(attention_kernels(call)) {
        for (int64_t b = 0; b < call.rows; b++) {
            splits_ = std::max(splits_, call.splits(b));
            queries_ = std::max(queries_, call.queries(b));
        }
        const int64_t heads = call.rows * call.pages->heads, partials = heads * splits_ * queries_;
        acc_ = scratch_.take<float>(partials * call.pages->dim);
        shift_ = scratch_.take<float>(partials);
        sum_ = scratch_.take<float>(partials);
        if (call.mass) page_sums_ = scratch_.take<float>(partials * split_pages);
        splits_left_ = scratch_.take<int>(heads);
        for (int64_t i = 0; i < heads; i++) splits_left_[i] = static_cast<int>(call.splits(i / call.pages->heads));
    }

    /// Takes all rows, KV heads and splits.
    void attend() {
        const int heads = call_.pages->heads;
        parallel(call_.rows * heads * splits_, [&](int job) {
            const Task task{job / splits_ / heads, static_cast<int>(job / splits_ % heads), job % splits_};
            if (call_.counts[task.b] && task.split < call_.splits(task.b)) run(task);
        });
    }

    /// Takes splits [first, last) of one row and KV head.
    void attend(int64_t b, int g, int64_t first, int64_t last) {
        parallel(last - first, [&](int job) { run({b, g, first + job}); });
    }

  private:
    struct Task {
        int64_t b;
        int g;
        int64_t split;
    };

    int64_t offset(const Task& task, int64_t first) const {
        return ((task.b * call_.pages->heads + task.g) * splits_ + task.split) * queries_ + first;
    }

    Partial partial(const Task& task, int64_t first) const {
        const int64_t at = offset(task, first);
        return {acc_ + at * call_.pages->dim, shift_ + at, sum_ + at};
    }

    float* page_sums(const Task& task, int64_t first) const {
        return page_sums_ ? page_sums_ + offset(task, first) * split_pages : nullptr;
    }

    template <class Body>
    void each_group(const Task& task, Body body) const {
        const int64_t count = call_.queries(task.b), at_once = queries_at_once(call_.pages->dim);
        for (int64_t first = 0; first < count; first += at_once)
            body(Queries{task.b, task.g, first, static_cast<int>(std::min(at_once, count - first))});
    }

    void run(const Task& task) const {
        each_group(task, [&](const Queries& queries) {
            kernels_.scan(call_, queries, task.split, partial(task, queries.first), page_sums(task, queries.first));
        });
        int* left = &splits_left_[task.b * call_.pages->heads + task.g];
        if (__atomic_sub_fetch(left, 1, __ATOMIC_ACQ_REL) == 0) merge_head(task);
    }

    void merge_head(const Task& task) const {
        each_group(task, [&](const Queries& queries) {
            PartialBuffer buffer;
            const Partial all = buffer.partial();
            reset(call_, queries, all);
            for (int64_t split = 0; split < call_.splits(task.b); split++)
                kernels_.merge(call_, queries.count, all, partial({task.b, task.g, split}, queries.first));
            kernels_.finish(call_, queries, all);
            if (call_.mass) add_mass(task, queries, all);
        });
    }

    void add_mass(const Task& task, const Queries& queries, const Partial& all) const {
        float* mass = call_.mass + (task.b * call_.pages->heads + task.g) * call_.list_length;
        for (int64_t split = 0; split < call_.splits(task.b); split++) {
            const Task split_task{task.b, task.g, split};
            const int64_t first = split * split_pages;
            const int64_t pages = std::min<int64_t>(split_pages, call_.list_length - first);
            kernels_.add_mass(call_, queries.count, all, partial(split_task, queries.first),
                              page_sums(split_task, queries.first), mass + first, static_cast<int>(pages));
        }
    }

    const Attention& call_;
    const AttentionKernels& kernels_;
    Scratch scratch_;
    int64_t splits_ = 0, queries_ = 0;  // maxima over rows
    float *acc_, *shift_, *sum_, *page_sums_ = nullptr;
    int* splits_left_;  // (B, G): splits that are not finished
};

/// The number of groups that the queries of a row and KV head are cut into. Each group is a job.
int64_t group_count(const Attention& call) {
    int64_t queries = 0;
    for (int64_t b = 0; b < call.rows; b++) queries = std::max(queries, call.queries(b));
    const int64_t at_once = queries_at_once(call.pages->dim);
    return (queries + at_once - 1) / at_once;
}

Queries query_group(const Attention& call, int64_t b, int g, int64_t group, int64_t groups) {
    const int64_t count = call.queries(b), first = count * group / groups;
    return {b, g, first, static_cast<int>(count * (group + 1) / groups - first)};
}

/// Scans splits [first, last) of one group of queries and merges each into `all`, which has the splits before `first`.
void scan_splits(const Attention& call, const Queries& queries, int64_t first, int64_t last, const Partial& all) {
    const AttentionKernels& kernels = attention_kernels(call);
    PartialBuffer next;
    if (first == 0) reset(call, queries, all);
    for (int64_t split = first; split < last; split++) {
        kernels.scan(call, queries, split, next.partial(), nullptr);
        kernels.merge(call, queries.count, all, next.partial());
    }
    if (last == call.splits(queries.b)) kernels.finish(call, queries, all);
}

/// For many queries. A job takes a group of queries over all splits, so that memory does not grow with the context.
void attend_by_groups(const Attention& call, int64_t groups) {
    const int heads = call.pages->heads;
    parallel(call.rows * heads * groups, [&](int job) {
        const int g = static_cast<int>(job / groups % heads);
        const Queries queries = query_group(call, job / (heads * groups), g, job % groups, groups);
        PartialBuffer all;
        if (queries.count) scan_splits(call, queries, 0, call.splits(queries.b), all.partial());
    });
}

/// Makes the int8 copies that the call reads and that do not exist yet.
void make_copies(const Attention& call) {
    const int heads = call.pages->heads;
    parallel(call.rows * heads, [&](int job) {
        make_copies(*call.pages, job % heads, call.list(job / heads, job % heads), call.coarse_pages(job / heads));
    });
}

/// Zeroes the padding of outputs, and the mass.
void clear_outputs(const Attention& call) {
    const int64_t token_bytes = call.heads * call.pages->query_bytes();
    for (int64_t b = 0; b < call.rows; b++) {
        char* row = static_cast<char*>(call.out) + b * call.width * token_bytes;
        std::fill(row + call.counts[b] * token_bytes, row + call.width * token_bytes, 0);
    }
    if (call.mass) std::fill_n(call.mass, call.rows * call.pages->heads * call.list_length, 0.0f);
}

}  // namespace

void check(const Attention& call) {
    require(call.sinks >= 0 && call.sinks % page_size == 0, "sinks must be whole pages");
    require(0 <= call.window && call.window <= INT32_MAX, "window must lie in [0, 2^31 - 1]");
    require(!call.coarse || ((call.pages->copies.keys || call.pages->coded) && !call.window && !call.q_sinks),
            "coarse needs int8 copies or int8 pages, and no window");
    require(!call.pages->attention_sink_logits || call.heads == call.pages->query_heads,
            "each query head has a sink logit");
    for (int64_t b = 0; b < call.rows; b++) check_row(call, b);
}

void attend(const Attention& call) {
    clear_outputs(call);
    if (call.coarse && !call.pages->coded) make_copies(call);
    const int64_t groups = group_count(call);
    if (groups > 1 && !call.mass) return attend_by_groups(call, groups);
    SplitAttention(call).attend();
}

struct IncrementalAttention::State {
    explicit State(const Attention& call) : call(call), groups(group_count(call)) {
        clear_outputs(call);
        if (groups > 1 && !call.mass) partials.resize(groups);
        else by_splits.emplace(call);
    }

    const Attention& call;
    const int64_t groups;
    std::vector<PartialBuffer> partials;  // of each group of the current row and KV head
    std::optional<SplitAttention> by_splits;
};

IncrementalAttention::IncrementalAttention(const Attention& call) : state_(std::make_unique<State>(call)) {}
IncrementalAttention::~IncrementalAttention() = default;

void IncrementalAttention::attend(int64_t b, int g, int64_t first_split, int64_t last_split) {
    State& s = *state_;
    if (s.by_splits) return s.by_splits->attend(b, g, first_split, last_split);
    parallel(s.groups, [&](int group) {
        const Queries queries = query_group(s.call, b, g, group, s.groups);
        if (queries.count) scan_splits(s.call, queries, first_split, last_split, s.partials[group].partial());
    });
}

}  // namespace triforce
