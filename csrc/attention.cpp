#include "attention.hpp"

#include <algorithm>
#include <optional>
#include <vector>

#include "split_attention.hpp"
#include "threads.hpp"
#include "write.hpp"

namespace triforce {
namespace {

/// The number of groups that the queries of a row and KV head are cut into, of which each is a job.
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

/// Scans splits [first, last) of one group of queries and merges each into `all`, which has those before `first`.
void scan_splits(const Attention& call, const Queries& queries, int64_t first, int64_t last, const Partial& all) {
    const AttentionKernels& kernels = attention_kernels(call);
    PartialBuffer next;
    if (first == 0) reset(call, all, queries.count);
    for (int64_t split = first; split < last; split++) {
        kernels.scan(call, queries, split, next.partial(), nullptr);
        kernels.merge(call, queries.count, all, next.partial());
    }
    if (last == call.splits(queries.b)) kernels.finish(call, queries, all);
}

/// Many queries: each job takes a group of them over all splits, so that memory does not grow with the context.
void attend_by_groups(const Attention& call, int64_t groups) {
    const int heads = call.pages->heads;
    parallel(static_cast<int>(call.rows * heads * groups), [&](int job) {
        const int64_t b = job / (heads * groups);
        const Queries queries = query_group(call, b, static_cast<int>(job / groups % heads), job % groups, groups);
        PartialBuffer all;
        if (queries.count) scan_splits(call, queries, 0, call.splits(b), all.partial());
    });
}

/// Makes the int8 copies that will be read and that no earlier call has made.
void make_copies(const Attention& call) {
    const int heads = call.pages->heads;
    parallel(static_cast<int>(call.rows * heads), [&](int job) {
        const int64_t b = job / heads;
        make_copies(*call.pages, job % heads, call.list(b, job % heads), call.coarse_pages(b));
    });
}

void clear_padding(const Attention& call) {
    const int64_t token_bytes = static_cast<int64_t>(call.heads) * call.pages->page_bytes() / page_size;
    for (int64_t b = 0; b < call.rows; b++) {
        char* row = static_cast<char*>(call.out) + b * call.width * token_bytes;
        std::fill(row + call.counts[b] * token_bytes, row + call.width * token_bytes, 0);
    }
}

void clear_outputs(const Attention& call) {
    clear_padding(call);
    if (call.mass) std::fill_n(call.mass, call.rows * call.pages->heads * call.list_length, 0.0f);
}

}  // namespace

void attend(const Attention& call) {
    clear_outputs(call);
    if (call.coarse) make_copies(call);
    const int64_t groups = group_count(call);
    if (groups > 1 && !call.mass) return attend_by_groups(call, groups);
    SplitAttention(call).attend();
}

struct IncrementalAttention::State {
    explicit State(const Attention& call) : call(call), groups(group_count(call)) {
        clear_outputs(call);
        if (groups > 1 && !call.mass)
            partials.resize(groups);
        else
            by_splits.emplace(call);
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
    parallel(static_cast<int>(s.groups), [&](int group) {
        const Queries queries = query_group(s.call, b, g, group, s.groups);
        if (queries.count) scan_splits(s.call, queries, first_split, last_split, s.partials[group].partial());
    });
}

}  // namespace triforce
