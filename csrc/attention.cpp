#include "attention.hpp"

#include <algorithm>
#include <optional>
#include <stdexcept>
#include <vector>

#include "memory.hpp"
#include "threads.hpp"
#include "write.hpp"

namespace triforce {
namespace {

const AttentionKernels& kernels(const Attention& call) {
    return call.pages->is_bf16 ? attention_bf16() : attention_f32();
}

void clear(const Attention& call, float* most, float* total, float* mixed, int64_t count) {
    std::fill_n(mixed, count * call.pages->dim, 0.0f);
    std::fill_n(most, count, nothing_seen);
    std::fill_n(total, count, 0.0f);
}

// Partials of up to queries_at_once queries, on the stack of whoever works on them.
struct Held {
    alignas(64) float mixed[group_floats];
    float most[group_queries], total[group_queries];

    Partial partial() { return {mixed, most, total}; }
};

/// Splits [first, last) of one group of queries, behind those before them.
void go_on(const Attention& call, const Queries& queries, int64_t first, int64_t last, const Partial& all) {
    const AttentionKernels& k = kernels(call);
    Held next;
    if (first == 0) clear(call, all.most, all.total, all.mixed, queries.count);
    for (int64_t split = first; split < last; split++) {
        k.scan(call, queries, split, next.partial(), nullptr);
        k.fold(call, queries.count, all, next.partial());
    }
    if (last == call.splits(queries.b)) k.finish(call, queries, all);
}

Queries group_of(const Attention& call, int64_t b, int g, int64_t group, int64_t groups) {
    const int64_t count = call.queries(b), first = count * group / groups;
    return {b, g, first, static_cast<int>(count * (group + 1) / groups - first)};
}

/// Many queries: each job takes a group of them over all splits, so that memory does not grow with the context.
void run_by_queries(const Attention& call, int64_t groups) {
    const int heads = call.pages->heads;
    parallel(static_cast<int>(call.rows * heads * groups), [&](int job) {
        const int64_t b = job / (heads * groups);
        const Queries queries = group_of(call, b, static_cast<int>(job / groups % heads), job % groups, groups);
        Held all;
        if (queries.count) go_on(call, queries, 0, call.splits(b), all.partial());
    });
}

/// Few queries: each job takes all of a KV head's over one split, and whoever finishes a head's last one merges them.
class BySplits {
  public:
    explicit BySplits(const Attention& call);
    void run();
    void run(int64_t b, int g, int64_t first, int64_t last);

  private:
    struct Place {
        int64_t b;
        int g;
        int64_t split;
    };

    Partial partial(const Place& place, int64_t first) const;
    float* sums(const Place& place, int64_t first) const;
    void scan(const Place& place) const;
    void take(const Place& place) const;
    void merge(const Place& place) const;
    template <class Body>
    void each_group(const Place& place, Body body) const;

    const Attention& call_;
    const AttentionKernels& k_;
    Scratch scratch_;
    int64_t splits_ = 0, queries_ = 0;
    float *mixed_, *most_, *total_, *sums_ = nullptr;
    int* left_;
};

BySplits::BySplits(const Attention& call) : call_(call), k_(kernels(call)) {
    for (int64_t b = 0; b < call.rows; b++) {
        splits_ = std::max(splits_, call.splits(b));
        queries_ = std::max(queries_, call.queries(b));
    }
    const int64_t heads = call.rows * call.pages->heads, partials = heads * splits_ * queries_;
    mixed_ = scratch_.take<float>(partials * call.pages->dim);
    most_ = scratch_.take<float>(partials);
    total_ = scratch_.take<float>(partials);
    if (call.mass) sums_ = scratch_.take<float>(partials * split_pages);
    left_ = scratch_.take<int>(heads);
    for (int64_t i = 0; i < heads; i++) left_[i] = static_cast<int>(call.splits(i / call.pages->heads));
}

Partial BySplits::partial(const Place& place, int64_t first) const {
    const int64_t at = ((place.b * call_.pages->heads + place.g) * splits_ + place.split) * queries_ + first;
    return {mixed_ + at * call_.pages->dim, most_ + at, total_ + at};
}

float* BySplits::sums(const Place& place, int64_t first) const {
    const int64_t at = ((place.b * call_.pages->heads + place.g) * splits_ + place.split) * queries_ + first;
    return sums_ + at * split_pages;
}

template <class Body>
void BySplits::each_group(const Place& place, Body body) const {
    const int64_t count = call_.queries(place.b), at_once = queries_at_once(call_.pages->dim);
    for (int64_t first = 0; first < count; first += at_once)
        body(Queries{place.b, place.g, first, static_cast<int>(std::min(at_once, count - first))});
}

void BySplits::scan(const Place& place) const {
    each_group(place, [&](const Queries& queries) {
        float* to = sums_ ? sums(place, queries.first) : nullptr;
        k_.scan(call_, queries, place.split, partial(place, queries.first), to);
    });
}

void BySplits::merge(const Place& place) const {
    const int64_t splits = call_.splits(place.b);
    each_group(place, [&](const Queries& queries) {
        Held all;
        clear(call_, all.most, all.total, all.mixed, queries.count);
        for (int64_t split = 0; split < splits; split++)
            k_.fold(call_, queries.count, all.partial(), partial({place.b, place.g, split}, queries.first));
        k_.finish(call_, queries, all.partial());
        if (!sums_) return;
        float* mass = call_.mass + (place.b * call_.pages->heads + place.g) * call_.list_length;
        for (int64_t split = 0; split < splits; split++) {
            const Place at{place.b, place.g, split};
            const int64_t first = split * split_pages;
            const int64_t pages = std::min<int64_t>(split_pages, call_.list_length - first);
            k_.weigh(call_, queries.count, all.partial(), partial(at, queries.first), sums(at, queries.first),
                     mass + first, static_cast<int>(pages));
        }
    });
}

void BySplits::run() {
    const int heads = call_.pages->heads;
    parallel(static_cast<int>(call_.rows * heads * splits_), [&](int job) {
        const Place place{job / splits_ / heads, static_cast<int>(job / splits_ % heads), job % splits_};
        if (call_.counts[place.b] && place.split < call_.splits(place.b)) take(place);
    });
}

void BySplits::run(int64_t b, int g, int64_t first, int64_t last) {
    parallel(static_cast<int>(last - first), [&](int job) { take({b, g, first + job}); });
}

void BySplits::take(const Place& place) const {
    scan(place);
    if (__atomic_sub_fetch(&left_[place.b * call_.pages->heads + place.g], 1, __ATOMIC_ACQ_REL) == 0) merge(place);
}

/// Those that will be read and have not been made for an earlier call.
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
        char* row = static_cast<char*>(call.mixed) + b * call.width * token_bytes;
        std::fill(row + call.counts[b] * token_bytes, row + call.width * token_bytes, 0);
    }
}

void check(bool fine, const char* why) {
    if (!fine) throw std::invalid_argument(why);
}

void check_row(const Attention& call, int64_t b) {
    const int64_t start = call.starts[b], count = call.counts[b];
    check(0 <= count && count <= call.width, "counts must lie in [0, T]");
    check(0 <= start && start < INT32_MAX, "starts must lie in [0, 2^31 - 1)");
    if (call.coarse) check(0 <= call.coarse[b] && call.coarse[b] <= start, "coarse must lie in [0, starts]");
    const int64_t used = count ? (start + count - 1) / page_size + 1 : 0;
    check(used <= call.list_length, "lists must have a page for each key that is seen");
    const int lists = call.head_stride ? call.pages->heads : 1;
    for (int g = 0; g < lists; g++) {
        uint32_t largest = 0;
        const int32_t* list = call.list(b, g);
        for (int64_t i = 0; i < used; i++) largest = std::max(largest, static_cast<uint32_t>(list[i]));
        check(largest < call.pages->count, "lists must hold page numbers of the pool");
    }
}

}  // namespace

void check(const Attention& call) {
    check(call.sinks >= 0 && call.sinks % page_size == 0, "sinks must be whole pages");
    check(0 <= call.window && call.window <= INT32_MAX, "window must lie in [0, 2^31 - 1]");
    check(!call.coarse || (call.pages->copies.keys && !call.window && !call.q_sinks),
          "coarse needs int8 copies, and no window");
    for (int64_t b = 0; b < call.rows; b++) check_row(call, b);
}

namespace {

/// Groups of queries that each job of many takes.
int64_t groups_of(const Attention& call) {
    int64_t queries = 0;
    for (int64_t b = 0; b < call.rows; b++) queries = std::max(queries, call.queries(b));
    const int64_t at_once = queries_at_once(call.pages->dim);
    return (queries + at_once - 1) / at_once;
}

void prepare(const Attention& call) {
    clear_padding(call);
    if (call.mass) std::fill_n(call.mass, call.rows * call.pages->heads * call.list_length, 0.0f);
}

}  // namespace

void run(const Attention& call) {
    prepare(call);
    if (call.coarse) make_copies(call);
    const int64_t groups = groups_of(call);
    if (groups > 1 && !call.mass) return run_by_queries(call, groups);
    BySplits(call).run();
}

struct Stepwise::State {
    explicit State(const Attention& call) : call(call), groups(groups_of(call)) {
        prepare(call);
        if (groups > 1 && !call.mass)
            held.resize(groups);
        else
            by_splits.emplace(call);
    }

    const Attention& call;
    const int64_t groups;
    std::vector<Held> held;  // of each group of the row and head whose turn it is
    std::optional<BySplits> by_splits;
};

Stepwise::Stepwise(const Attention& call) : state_(std::make_unique<State>(call)) {}
Stepwise::~Stepwise() = default;

void Stepwise::run(int64_t b, int g, int64_t first, int64_t last) {
    State& s = *state_;
    if (s.by_splits) return s.by_splits->run(b, g, first, last);
    parallel(static_cast<int>(s.groups), [&](int group) {
        const Queries queries = group_of(s.call, b, g, group, s.groups);
        if (queries.count) go_on(s.call, queries, first, last, s.held[group].partial());
    });
}

}  // namespace triforce
