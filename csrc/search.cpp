#include "search.hpp"

#include <algorithm>
#include <stdexcept>

#include "best.hpp"
#include "memory.hpp"
#include "threads.hpp"

namespace triforce {
namespace {

constexpr int64_t part = 512;  // pages of a job

const SearchKernels& kernels(const Attention& call) { return call.pages->is_bf16 ? search_bf16() : search_f32(); }

void require(bool fine, const char* why) {
    if (!fine) throw std::invalid_argument(why);
}

class Lists {
  public:
    Lists(const Search& search, const Attention& call);
    void find();
    Attention found() const;

  private:
    /// Those of a KV head lie together: query head i of its group, of token n.
    int64_t query(int64_t n, int g, int i) const {
        return (g * call_.rows * call_.width + n) * call_.group() + i;
    }
    int64_t left_out(int64_t b) const { return search_.last[b] - search_.first[b] - search_.picks[b]; }
    void sketch(int64_t b, int g, int64_t from, int64_t to) const;
    void score(int64_t b, int g, int64_t from, int64_t to) const;
    void pick(int64_t b, int g) const;

    const Search& search_;
    const Attention& call_;
    const SearchKernels& k_;
    Scratch scratch_;
    int64_t candidates_ = 0, length_ = 0;  // the most of any row
    int16_t* words_;                       // (queries, dim, 16)
    float *units_, *scores_;               // (queries), (queries, candidates)
    int32_t* lists_;                       // (B, G, length)
    int64_t *starts_, *coarse_;            // (B)
};

Lists::Lists(const Search& search, const Attention& call) : search_(search), call_(call), k_(kernels(call)) {
    for (int64_t b = 0; b < call.rows; b++) {
        candidates_ = std::max(candidates_, search.last[b] - search.first[b]);
        length_ = std::max(length_, call.list_length - left_out(b));
    }
    const int64_t queries = call.rows * call.width * call.heads;
    words_ = scratch_.take<int16_t>(queries * call.pages->dim * page_size);
    units_ = scratch_.take<float>(queries);
    scores_ = scratch_.take<float>(queries * candidates_);
    lists_ = scratch_.take<int32_t>(call.rows * call.pages->heads * length_);
    starts_ = scratch_.take<int64_t>(call.rows), coarse_ = scratch_.take<int64_t>(call.rows);
    for (int64_t b = 0; b < call.rows; b++) {
        starts_[b] = call.starts[b] - left_out(b) * page_size;
        if (call.coarse) coarse_[b] = call.coarse[b] - left_out(b) * page_size;
    }
}

/// Those that have been made for an earlier call are still there.
void Lists::sketch(int64_t b, int g, int64_t from, int64_t to) const {
    for (const int32_t* page = call_.list(b, 0) + from; page < call_.list(b, 0) + to; page++)
        if (!call_.pages->sizes_of(g, *page)->bits) k_.sketch(*call_.pages, g, *page);
}

void Lists::score(int64_t b, int g, int64_t from, int64_t to) const {
    const int64_t first = query(b * call_.width, g, 0);
    k_.score(*call_.pages, g, call_.list(b, 0) + from, to - from, words_ + first * call_.pages->dim * page_size,
             units_ + first, call_.queries(b), scores_ + first * candidates_ + from - search_.first[b], candidates_);
}

/// A page counts by how near its keys come to the nearest one of a query, for the query for which they come nearest.
void Lists::pick(int64_t b, int g) const {
    const int64_t first = search_.first[b], last = search_.last[b], among = last - first, picks = search_.picks[b];
    float* scores = scores_ + query(b * call_.width, g, 0) * candidates_;
    for (int64_t i = 0; i < call_.queries(b) && among; i++) {
        const float* of_query = scores + i * candidates_;
        const float most = *std::max_element(of_query, of_query + among);
        for (int64_t at = 0; at < among; at++)
            scores[at] = i ? std::max(scores[at], of_query[at] - most) : of_query[at] - most;
    }
    Scratch scratch;
    int64_t* ids = scratch.take<int64_t>(picks + 1);
    triforce::run(Best{scores, 1, among, 0, among, picks, ids});
    const int32_t* list = call_.list(b, 0);
    int32_t* to = std::copy_n(list, first, lists_ + (b * call_.pages->heads + g) * length_);
    for (int64_t i = 0; i < picks; i++) *to++ = list[first + ids[i]];
    std::copy(list + last, list + call_.list_length, to);
}

void Lists::find() {
    const int heads = call_.pages->heads;
    parallel(static_cast<int>(call_.rows * call_.width * call_.heads), [&](int64_t i) {
        const char* q = static_cast<const char*>(call_.q) + i * call_.pages->page_bytes() / page_size;
        const int h = static_cast<int>(i % call_.heads);
        const int64_t at = query(i / call_.heads, h / call_.group(), h % call_.group());
        units_[at] = k_.turn(*call_.pages, q, words_ + at * call_.pages->dim * page_size);
    });
    const int64_t parts = (*std::max_element(search_.last.begin(), search_.last.end()) + part - 1) / part;
    parallel(static_cast<int>(heads * parts), [&](int job) {
        const int g = static_cast<int>(job / parts);
        const int64_t start = job % parts * part;
        // One row after another: a page that they share has the same place in their lists, and is sketched once.
        for (int64_t b = 0; b < call_.rows; b++) {
            const int64_t from = std::max(start, search_.first[b]), to = std::min(start + part, search_.last[b]);
            if (!call_.counts[b] || from >= to) continue;
            sketch(b, g, from, to);
            score(b, g, from, to);
        }
    });
    parallel(static_cast<int>(call_.rows * heads), [&](int64_t job) {
        if (call_.counts[job / heads]) pick(job / heads, static_cast<int>(job % heads));
    });
}

Attention Lists::found() const {
    Attention call = call_;
    call.lists = lists_, call.list_length = length_;
    call.head_stride = length_, call.row_stride = call_.pages->heads * length_;
    call.starts = starts_;
    if (call_.coarse) call.coarse = coarse_;
    return call;
}

}  // namespace

void check(const Search& search, const Attention& call) {
    const auto rows = static_cast<size_t>(call.rows);
    require(call.pages->sketches.words, "a search needs room for sketches");
    require(!call.head_stride && !call.mass && !call.sinks && !call.window && !call.q_sinks,
            "a search needs lists of whole rows, and no mass, sinks or window");
    require(search.first.size() == rows && search.last.size() == rows && search.picks.size() == rows,
            "first, last and picks must have one number for each row");
    for (size_t b = 0; b < rows; b++) {
        const int64_t first = search.first[b], last = search.last[b], picks = search.picks[b];
        require(0 <= first && first <= last && last * page_size <= call.starts[b],
                "pages that are searched must lie before the new tokens");
        require(0 <= picks && picks <= last - first, "picks must not be more than there are pages to search");
        require(!call.coarse || last * page_size <= call.coarse[b], "what is searched must be committed");
    }
}

void run(const Search& search, const Attention& call) {
    Lists lists(search, call);
    lists.find();
    run(lists.found());
}

}  // namespace triforce
