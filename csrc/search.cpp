#include "search.hpp"

#include <algorithm>

#include "memory.hpp"
#include "threads.hpp"
#include "topk.hpp"

namespace triforce {
namespace {

constexpr int64_t chunk_pages = 512;  // pages that a chunk of the job scores

const SearchKernels& search_kernels(const Pages& pages) {
    if (pages.coded) return pages.type == Type::bf16 ? search_codes_bf16() : search_codes_f32();
    return pages.type == Type::bf16 ? search_bf16() : search_f32();
}

class PageSearch {
  public:
    PageSearch(const Search& search, const Attention& call)
        : search_(search), call_(call),
          kernels_(search_kernels(*call.pages)) {
        for (int64_t b = 0; b < call.rows; b++) {
            candidates_ = std::max(candidates_, search.last[b] - search.first[b]);
            length_ = std::max(length_, call.list_length - skipped(b));
        }
        const int64_t queries = call.rows * call.width * call.heads;
        codes_ = scratch_.take<int16_t>(queries * call.pages->dim * page_size);
        scales_ = scratch_.take<float>(queries);
        scores_ = scratch_.take<float>(queries * candidates_);
        lists_ = scratch_.take<int32_t>(call.rows * call.pages->heads * length_);
        starts_ = scratch_.take<int64_t>(call.rows), coarse_ = scratch_.take<int64_t>(call.rows);
        for (int64_t b = 0; b < call.rows; b++) {
            starts_[b] = call.starts[b] - skipped(b) * page_size;
            if (call.coarse) coarse_[b] = call.coarse[b] - skipped(b) * page_size;
        }
    }

    void run() {
        const int heads = call_.pages->heads;
        encode_queries();
        score_candidates();
        parallel(call_.rows * heads, [&](int64_t job) {
            if (call_.counts[job / heads]) pick(job / heads, static_cast<int>(job % heads));
        });
    }

    /// The call with the lists that `run` has written.
    Attention result() const {
        Attention call = call_;
        call.lists = lists_, call.list_length = length_;
        call.head_stride = length_, call.row_stride = call_.pages->heads * length_;
        call.starts = starts_;
        if (call_.coarse) call.coarse = coarse_;
        return call;
    }

  private:
    /// Index of the query of token n and of query head i of KV head g. The queries of a KV head are neighbours.
    int64_t query(int64_t n, int g, int i) const { return (g * call_.rows * call_.width + n) * call_.group() + i; }
    /// Pages of a row's list that no KV head picks.
    int64_t skipped(int64_t b) const { return search_.last[b] - search_.first[b] - search_.picks[b]; }

    void encode_queries() const {
        parallel(call_.rows * call_.width * call_.heads, [&](int64_t i) {
            const char* q = static_cast<const char*>(call_.q) + i * call_.pages->query_bytes();
            const int h = static_cast<int>(i % call_.heads);
            const int64_t at = query(i / call_.heads, h / call_.group(), h % call_.group());
            scales_[at] = kernels_.encode(*call_.pages, q, codes_ + at * call_.pages->dim * page_size);
        });
    }

    /// Makes the sketches of pages [from, to) of a list that have none.
    void sketch(int64_t b, int g, int64_t from, int64_t to) const {
        for (const int32_t* page = call_.list(b, 0) + from; page < call_.list(b, 0) + to; page++)
            if (!call_.pages->sizes_of(g, *page)->bits) kernels_.sketch(*call_.pages, g, *page);
    }

    void score(int64_t b, int g, int64_t from, int64_t to) const {
        const int64_t first = query(b * call_.width, g, 0);
        const int16_t* codes = codes_ + first * call_.pages->dim * page_size;
        float* scores = scores_ + first * candidates_ + from - search_.first[b];
        kernels_.score(*call_.pages, g, call_.list(b, 0) + from, to - from, codes, scales_ + first, call_.queries(b),
                       scores, candidates_);
    }

    void score_candidates() const {
        const int64_t last = *std::max_element(search_.last.begin(), search_.last.end());
        const int64_t chunks = (last + chunk_pages - 1) / chunk_pages;
        parallel(call_.pages->heads * chunks, [&](int job) {
            const int g = static_cast<int>(job / chunks);
            const int64_t start = job % chunks * chunk_pages;
            // Rows come one after another. A page that rows share has the same index in their lists, so one chunk
            // sketches it, once.
            for (int64_t b = 0; b < call_.rows; b++) {
                const int64_t from = std::max(start, search_.first[b]);
                const int64_t to = std::min(start + chunk_pages, search_.last[b]);
                if (!call_.counts[b] || from >= to) continue;
                sketch(b, g, from, to);
                score(b, g, from, to);
            }
        });
    }

    /// Picks pages of row b for KV head g. A page's score is its score for a query minus the query's best score, at
    /// most over the head's queries.
    void pick(int64_t b, int g) const {
        const int64_t first = search_.first[b], last = search_.last[b], candidates = last - first;
        const int64_t picks = search_.picks[b];
        float* scores = scores_ + query(b * call_.width, g, 0) * candidates_;
        for (int64_t i = 0; i < call_.queries(b) && candidates; i++) {
            const float* query_scores = scores + i * candidates_;
            const float best = *std::max_element(query_scores, query_scores + candidates);
            for (int64_t at = 0; at < candidates; at++)
                scores[at] = i ? std::max(scores[at], query_scores[at] - best) : query_scores[at] - best;
        }
        Scratch scratch;
        int64_t* ids = scratch.take<int64_t>(picks + 1);
        topk(TopK{scores, 1, candidates, 0, candidates, picks, ids});
        const int32_t* list = call_.list(b, 0);
        int32_t* to = std::copy_n(list, first, lists_ + (b * call_.pages->heads + g) * length_);
        for (int64_t i = 0; i < picks; i++) *to++ = list[first + ids[i]];
        std::copy(list + last, list + call_.list_length, to);
    }

    const Search& search_;
    const Attention& call_;
    const SearchKernels& kernels_;
    Scratch scratch_;
    int64_t candidates_ = 0, length_ = 0;  // maxima over rows: pages to search, length of a list with picked pages
    int16_t* codes_;                       // (queries, dim, 16)
    float *scales_, *scores_;              // (queries), (queries, candidates)
    int32_t* lists_;                       // (B, G, length)
    int64_t *starts_, *coarse_;            // (B)
};

}  // namespace

void check(const Search& search, const Attention& call) {
    const auto rows = static_cast<size_t>(call.rows);
    require(call.pages->sketches.codes, "a search needs room for sketches");
    require(!call.head_stride && !call.mass && !call.sinks && !call.window && !call.q_sinks,
            "a search needs lists of whole rows, and no mass, sinks or window");
    require(search.first.size() == rows && search.last.size() == rows && search.picks.size() == rows,
            "first, last and picks must have one number for each row");
    for (size_t b = 0; b < rows; b++) {
        const int64_t first = search.first[b], last = search.last[b], picks = search.picks[b];
        require(0 <= first && first <= last && last * page_size <= call.starts[b],
                "pages that are searched must lie before the new tokens");
        require(0 <= picks && picks <= last - first, "picks must not be more than there are pages to search");
        require(!call.coarse || last * page_size <= call.coarse[b], "pages that are searched must be committed");
    }
}

void search_and_attend(const Search& search, const Attention& call) {
    PageSearch pages(search, call);
    pages.run();
    attend(pages.result());
}

}  // namespace triforce
