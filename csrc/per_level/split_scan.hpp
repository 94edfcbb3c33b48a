// The scan of one split for up to queries_at_once queries: blocks in ascending order, each against tiles of queries.
#pragma once

#include "code_block.hpp"
#include "int8_block.hpp"

namespace triforce::TF_LEVEL {

// Lists of at most this number of splits are assumed to be in the caches, longer lists in memory.
constexpr int64_t splits_in_cache = 4;
// Up to this number of tiles, each tile joins codes from their nibbles by itself, because few tiles are limited by
// memory. With more tiles codes are joined once (see `whole_codes`).
#if TF_SIMD_AVX2
constexpr int tiles_of_nibbles = 2;
#else
constexpr int tiles_of_nibbles = 4;
#endif

/// Query i of `queries`, in an array q (B, T, H, D).
template <class T>
const T* query(const Attention& call, const void* q, const Queries& queries, int i) {
    const int64_t token = queries.b * call.width + (queries.first + i) / call.group();
    return static_cast<const T*>(q) + (token * call.heads + call.head(queries, i)) * call.pages->dim;
}

/// The last key that query i sees: the key of its own token.
inline int64_t last_key(const Attention& call, const Queries& queries, int i) {
    return call.starts[queries.b] + (queries.first + i) / call.group();
}

inline int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
inline int clamp_to_page(int64_t token) {
    return static_cast<int>(token < 0 ? 0 : token > page_size ? page_size : token);
}

/// Packs queries in the order in which a tile reads them: words [steps][height].
template <class T>
void pack(const Attention& call, const void* q, const Queries& queries, int first, int height, Word<T>* words) {
    const int dim = call.pages->dim;
    for (int r = 0; r < height; r++) {
        Word<T> row[largest_dim / numbers_of_word<T>];
        make_words(query<T>(call, q, queries, first + r), dim, row);
        for (int step = 0; step < dim / numbers_of_word<T>; step++) words[step * height + r] = row[step];
    }
}

/// Packs queries as int8, words [dim / 4][height], and writes the scale and the bias of each query.
template <class T, class Word>
void pack_integers(const Attention& call, const void* q, const Queries& queries, int first, int height, Word* words,
                   IntegerQuery* to) {
    const int dim = call.pages->dim;
    for (int r = 0; r < height; r++) {
        const T* from = query<T>(call, q, queries, first + r);
        alignas(64) int8_t rounded[largest_dim];
        const float scale = scale_of<int8_t>(from, dim);
        quantise(from, dim, scale, rounded);
        int32_t bias = 0;
        for (int d = 0; d < dim; d++) bias += product_bias(rounded[d]);
        to[r] = {scale, bias};
        for (int step = 0; step < dim / 4; step++) pack_word(rounded + step * 4, words[step * height + r]);
    }
}

/// The scan of one split, with queries of type T and pages of type P. `run` completes partials except their sums; `sum`
/// completes these.
template <class T, class P = T>
class SplitScan {
  public:
    SplitScan(const Attention& call, const Queries& queries, int64_t split, const Partial& to, float* page_sums)
        : call_(call), queries_(queries), list_(call.list(queries.b, queries.g)) {
        const int n = queries.count, dim = call.pages->dim, words = dim / numbers_of_word<P>;
        const int64_t visible = last_key(call, queries, n - 1) / page_size + 1;
        first_page_ = split * split_pages;
        last_page_ = smaller(first_page_ + split_pages, visible);
        coarse_page_ = smaller(call.coarse_pages(queries.b), last_page_);
        const float scale = bits_of_e / __builtin_sqrtf(static_cast<float>(dim));
        for (int i = 0; i < n * dim; i += 16) store(to.acc + i, zero());
        for (int i = 0; page_sums && i < n * split_pages; i += 16) store(page_sums + i, zero());
        for (int i = 0; i < n; i++) to.shift[i] = nothing_seen;
        const bool page_sequential = n <= tallest_tile && call.splits(queries.b) > splits_in_cache;
        for (int first = 0, height; first < n; first += height) {
            height = next_tile(n - first);
            const int i = tiles_++;
            tile_[i] = {words_ + first * words, sink_words_ + first * words, to.acc + first * dim, to.shift + first,
                        lane_sums_ + first * 16, page_sums ? page_sums + first * split_pages : nullptr, height, dim,
                        scale, call.pages->score_cap * bits_of_e, page_sequential};
            first_[i] = first;
            pack_queries(call.q, first, height, words_, integers_, scale);
            if (call.q_sinks) pack_queries(call.q_sinks, first, height, sink_words_, sink_integers_, scale);
            if constexpr (!is_code<P>)
                if (first_page_ < coarse_page_)
                    pack_integers<T>(call, call.q, queries, first, height, quads_ + first * dim / 4, integers_ + first);
        }
    }

    void run() {
        scan<std::conditional_t<is_code<P>, UpperCode, int8_t>>(first_page_, coarse_page_);
        scan<P>(coarse_page_ > first_page_ ? coarse_page_ : first_page_, last_page_);
    }

    float sum(int i) const { return reduce_add(load(lane_sums_ + i * 16)); }

  private:
    struct LastKeys {  // the last keys that the first query and the last query of a tile or a group see
        int64_t first, last;
    };

    /// Packs queries; if pages have codes, as integers with scales that are multiplied by `scale`.
    void pack_queries(const void* q, int first, int height, Word<P>* words, IntegerQuery* integers, float scale) const {
        words += first * call_.pages->dim / numbers_of_word<P>;
        if constexpr (is_code<P>) {
            pack_integers<T>(call_, q, queries_, first, height, words, integers + first);
            for (int r = first; r < first + height; r++) integers[r].scale *= scale;
        } else {
            pack<T>(call_, q, queries_, first, height, words);
        }
    }

    template <class N>
    At<N> keys_at(int32_t page) const {
        if constexpr (is_code<N>) return call_.pages->key_codes_of(queries_.g, page);
        else return call_.pages->keys_of<N>(queries_.g, page);
    }
    template <class N>
    At<N> values_at(int32_t page) const {
        if constexpr (is_code<N>) return call_.pages->value_codes_of(queries_.g, page);
        else return call_.pages->values_of<N>(queries_.g, page);
    }

    template <class N>
    KeyBlock<N> block_at(int64_t page, int64_t last) const {
        KeyBlock<N> block{};
        for (int p = 0; p < smaller(block_pages, last - page); p++) {
            block.keys[p] = keys_at<N>(list_[page + p]);
            block.values[p] = values_at<N>(list_[page + p]);
        }
        return block;
    }

    /// Sets the pages of the next block that a tile prefetches. Each tile has some of them: earlier tiles have earlier
    /// pages.
    template <class N>
    void set_prefetch(int tile, const KeyBlock<N>& next, KeyBlock<N>& block) const {
        for (int p = 0; p < block_pages; p++) {
            const bool own = p * tiles_ / block_pages == tile && next.keys[p];
            block.keys_ahead[p] = (own ? next : block).keys[p];
            block.values_ahead[p] = (own ? next : block).values[p];
        }
    }

    bool sees_nothing(const LastKeys& keys, int64_t token) const {
        if (token > keys.last) return true;
        return call_.window && token >= call_.sinks && token + block_tokens <= keys.first - call_.window + 1;
    }

    bool sees_all(const LastKeys& keys, int64_t token) const {
        if (token + block_tokens > keys.first + 1) return false;
        return token >= call_.sinks && (!call_.window || token > keys.last - call_.window);
    }

    VisibleRanges visible_ranges(int64_t last_key, int64_t token) const {
        VisibleRanges visible{};
        for (int p = 0; p < block_pages; p++, token += page_size) {
            const bool windowed = call_.window && token >= call_.sinks;
            const int start = windowed ? clamp_to_page(last_key - call_.window + 1 - token) : 0;
            visible.pages[p] = {start, clamp_to_page(last_key + 1 - token)};
        }
        return visible;
    }

    /// Number of a block's first pages whose keys meet the queries rotated for sinks.
    int sink_pages(int64_t token) const {
        if (!call_.q_sinks || token >= call_.sinks) return 0;
        return static_cast<int>(call_.sinks - token < block_tokens ? (call_.sinks - token) / page_size : block_pages);
    }

    template <class N>
    void attend(int i, const KeyBlock<N>& block, int64_t page) {
        const Tile<P>& tile = tile_[i];
        const int64_t token = page * page_size;
        const int in_split = static_cast<int>(page - first_page_), last = first_[i] + tile.height - 1;
        const LastKeys keys{last_key(call_, queries_, first_[i]), last_key(call_, queries_, last)};
        if (sees_nothing(keys, token)) return;
        const bool whole = sees_all(keys, token);
        by_height(tile.height, [&](auto rows) {
            constexpr int R = rows.value;
            VisibleRanges visible[R];
            for (int r = 0; r < R && !whole; r++)
                visible[r] = visible_ranges(last_key(call_, queries_, first_[i] + r), token);
            if constexpr (is_code<P>) {
                const CodedQueries queries{integers_ + first_[i], sink_integers_ + first_[i]};
                attend_codes<N, R>(tile, queries, block, {whole ? nullptr : visible, sink_pages(token)}, in_split);
            } else if (whole) {
                attend_block<P, R>(tile, block, in_split);
            } else {
                attend_edge<P, R>(tile, block, visible, sink_pages(token), in_split);
            }
        });
    }

    /// All queries see the whole block, because it lies before the first query.
    void attend(int i, const KeyBlock<int8_t>& block, int64_t page) {
        const Int8Queries queries{quads_ + first_[i] * call_.pages->dim / 4, integers_ + first_[i]};
        PageScales scales[block_pages];
        for (int p = 0; p < block_pages; p++) scales[p] = call_.pages->scales_of(queries_.g, list_[page + p]);
        by_height(tile_[i].height, [&](auto rows) {
            attend_int8<P, rows.value>(tile_[i], queries, block, scales, static_cast<int>(page - first_page_));
        });
    }

    template <class N>
    void scan(int64_t page, int64_t last) {
        const LastKeys keys{last_key(call_, queries_, 0), last_key(call_, queries_, queries_.count - 1)};
        KeyBlock<N> block = block_at<N>(page, last);
        for (; page < last; page += block_pages) {
            const KeyBlock<N> next = block_at<N>(page + block_pages, last);
            if (!sees_nothing(keys, page * page_size)) attend_all(block, next, page);
            block = next;
        }
    }

    template <class N>
    void attend_all(KeyBlock<N>& block, const KeyBlock<N>& next, int64_t page) {
        if constexpr (in_nibbles<N>)
            if (tiles_ > tiles_of_nibbles) {
                const KeyBlock<WholeCode> whole = whole_codes(block, next, call_.pages->dim, whole_);
                for (int i = 0; i < tiles_; i++) attend(i, whole, page);
                return;
            }
        for (int i = 0; i < tiles_; i++) {
            set_prefetch(i, next, block);
            attend(i, block, page);
        }
    }

    const Attention& call_;
    const Queries& queries_;
    const int32_t* list_;
    int64_t first_page_, coarse_page_, last_page_;  // before coarse_page_: int8 copies or upper nibbles
    int tiles_ = 0;
    Tile<P> tile_[group_queries];
    int first_[group_queries + 1];  // first query of each tile
    alignas(64) float lane_sums_[group_queries * 16] = {};
    alignas(64) Word<P> words_[group_floats / numbers_of_word<P>];
    alignas(64) Word<P> sink_words_[group_floats / numbers_of_word<P>];
    alignas(64) PackedWord quads_[group_floats / 4];
    IntegerQuery integers_[group_queries], sink_integers_[group_queries];
    alignas(64) uint8_t whole_[is_code<P> ? block_pages * whole_page_bytes(largest_dim) : 1];  // see `whole_codes`
};

}  // namespace triforce::TF_LEVEL
