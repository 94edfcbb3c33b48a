#include "split_attention.hpp"

#include <algorithm>

#include "threads.hpp"

namespace triforce {

void reset(const Attention& call, const Partial& partial, int64_t count) {
    std::fill_n(partial.acc, count * call.pages->dim, 0.0f);
    std::fill_n(partial.max, count, nothing_seen);
    std::fill_n(partial.sum, count, 0.0f);
}

SplitAttention::SplitAttention(const Attention& call) : call_(call), kernels_(attention_kernels(call)) {
    for (int64_t b = 0; b < call.rows; b++) {
        splits_ = std::max(splits_, call.splits(b));
        queries_ = std::max(queries_, call.queries(b));
    }
    const int64_t heads = call.rows * call.pages->heads, partials = heads * splits_ * queries_;
    acc_ = scratch_.take<float>(partials * call.pages->dim);
    max_ = scratch_.take<float>(partials);
    sum_ = scratch_.take<float>(partials);
    if (call.mass) page_sums_ = scratch_.take<float>(partials * split_pages);
    splits_left_ = scratch_.take<int>(heads);
    for (int64_t i = 0; i < heads; i++) splits_left_[i] = static_cast<int>(call.splits(i / call.pages->heads));
}

int64_t SplitAttention::offset(const Task& task, int64_t first) const {
    return ((task.b * call_.pages->heads + task.g) * splits_ + task.split) * queries_ + first;
}

Partial SplitAttention::partial(const Task& task, int64_t first) const {
    const int64_t at = offset(task, first);
    return {acc_ + at * call_.pages->dim, max_ + at, sum_ + at};
}

float* SplitAttention::page_sums(const Task& task, int64_t first) const {
    return page_sums_ ? page_sums_ + offset(task, first) * split_pages : nullptr;
}

template <class Body>
void SplitAttention::each_group(const Task& task, Body body) const {
    const int64_t count = call_.queries(task.b), at_once = queries_at_once(call_.pages->dim);
    for (int64_t first = 0; first < count; first += at_once)
        body(Queries{task.b, task.g, first, static_cast<int>(std::min(at_once, count - first))});
}

void SplitAttention::attend() {
    const int heads = call_.pages->heads;
    parallel(static_cast<int>(call_.rows * heads * splits_), [&](int job) {
        const Task task{job / splits_ / heads, static_cast<int>(job / splits_ % heads), job % splits_};
        if (call_.counts[task.b] && task.split < call_.splits(task.b)) run(task);
    });
}

void SplitAttention::attend(int64_t b, int g, int64_t first, int64_t last) {
    parallel(static_cast<int>(last - first), [&](int job) { run({b, g, first + job}); });
}

void SplitAttention::run(const Task& task) const {
    scan(task);
    int* left = &splits_left_[task.b * call_.pages->heads + task.g];
    if (__atomic_sub_fetch(left, 1, __ATOMIC_ACQ_REL) == 0) merge_head(task);
}

void SplitAttention::scan(const Task& task) const {
    each_group(task, [&](const Queries& queries) {
        kernels_.scan(call_, queries, task.split, partial(task, queries.first), page_sums(task, queries.first));
    });
}

void SplitAttention::merge_head(const Task& task) const {
    const int64_t splits = call_.splits(task.b);
    each_group(task, [&](const Queries& queries) {
        PartialBuffer buffer;
        const Partial all = buffer.partial();
        reset(call_, all, queries.count);
        for (int64_t split = 0; split < splits; split++)
            kernels_.merge(call_, queries.count, all, partial({task.b, task.g, split}, queries.first));
        kernels_.finish(call_, queries, all);
        if (call_.mass) add_mass(task, queries, all);
    });
}

void SplitAttention::add_mass(const Task& task, const Queries& queries, const Partial& all) const {
    float* mass = call_.mass + (task.b * call_.pages->heads + task.g) * call_.list_length;
    for (int64_t split = 0; split < call_.splits(task.b); split++) {
        const Task of{task.b, task.g, split};
        const int64_t first = split * split_pages;
        const int64_t pages = std::min<int64_t>(split_pages, call_.list_length - first);
        kernels_.add_mass(call_, queries.count, all, partial(of, queries.first), page_sums(of, queries.first),
                          mass + first, static_cast<int>(pages));
    }
}

}  // namespace triforce
