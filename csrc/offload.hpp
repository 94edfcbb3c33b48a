// KV pages that memory has no room for lie in a store, [layers][heads][pages][keys | values]. A pass reads them ahead
// of its attention. It takes the splits of 1024 tokens of one KV head after another, so that reads are long.
//
// Frames in memory hold the pages that are being written, then pages of preferred layers, then the most recently used
// pages. Only pages that are full of committed tokens ever leave memory.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "frame_table.hpp"
#include "pages.hpp"
#include "reader.hpp"
#include "store.hpp"

namespace triforce {

class Offload {
  public:
    struct Shape {
        Type type;
        int layers, heads, dim;
        int64_t pages;  // page 0 is scratch
        bool coded, hadamard;  // as in Pages; so are the fields below
        const float* attention_sink_logits;  // (layers, query_heads), or null
        int query_heads;
        float score_cap;
    };
    struct Arena {
        char* data;  // aligned to `sector`: the frames, then the read-ahead buffers
        int32_t frames;
        int64_t buffers, buffer_frames;  // number of buffers; frames of one buffer
    };

    /// Throws std::invalid_argument if a buffer is smaller than a split may need.
    Offload(const Shape& shape, const Arena& arena, std::shared_ptr<Store> store);

    int layers() const { return shape_.layers; }
    const Pages& layer(int i) const { return layers_[i]; }
    int64_t page_bytes() const { return layers_[0].pitch; }  // of keys and values
    /// Offset of a page in the store, in bytes.
    int64_t offset(int64_t id) const { return id * page_bytes(); }
    /// The aligned read that covers `pages` pages from `id` on.
    StoreRead read_of(int64_t id, int64_t pages) const;

    /// Sets the layers that are to stay in memory whole. Pages of these layers that are not in memory stay there after
    /// the next pass has read them.
    void prefer(const std::vector<bool>& layers) { frames_.prefer(layers); }
    /// Makes room in the store for pages that will be written. Throws OffloadError.
    void reserve(const std::vector<int64_t>& pages);
    /// Drops pages that are no longer needed.
    void forget(const std::vector<int64_t>& pages);

    /// Writes pages, which are full of committed tokens, to the store. Throws OffloadError.
    void commit(int layer, std::vector<int64_t> pages);
    /// `read` and `write` of write.hpp for one layer. Tokens that `write` takes are committed.
    void read(int layer, const int64_t* slots, int64_t count, void* k, void* v);
    void write(int layer, const int64_t* slots, int64_t count, const void* k, const void* v);

    struct PageCounts {
        int64_t read_ahead, read_on_demand, kept;  // kept: copied from a read-ahead buffer to a frame
    };
    PageCounts page_counts() const { return page_counts_; }

    /// Throws OffloadError for a page that is neither in the store nor in memory.
    [[noreturn]] static void throw_lost();

  private:
    friend class OffloadedPass;

    char* frame(int64_t i) const { return arena_.data + i * page_bytes(); }
    void check_store();
    void make_writable(int layer, int64_t page, bool fresh);
    void fetch(const std::vector<int64_t>& ids);
    void fetch_run(int64_t id, int64_t pages);

    const Shape shape_;
    const Arena arena_;
    const std::shared_ptr<Store> store_;
    FrameTable frames_;
    std::vector<Pages> layers_;
    std::vector<char> landing_;  // buffer of reads on demand
    PageCounts page_counts_{};
};

}  // namespace triforce
