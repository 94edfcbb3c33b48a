// KV pages that memory has no room for: they lie in a store, [layers][heads][pages][keys | values], and a pass reads
// them ahead of its attention, a KV head's splits of 1024 tokens after another, so that what it reads is in long runs.
//
// What stays in memory, in frames: pages that are being written, and, as far as there is room, those of layers in favour
// and what was looked at last. Only pages that are full of committed tokens ever leave.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "attention.hpp"
#include "frames.hpp"
#include "reader.hpp"
#include "store.hpp"
#include "write.hpp"

namespace triforce {

class Offload {
  public:
    struct Shape {
        bool is_bf16;
        int layers, heads, dim;
        int64_t pages;  // page 0 is scratch
    };
    struct Room {
        char* data;  // aligned to `sector`: frames, and behind them the buffers
        int32_t frames;
        int64_t buffers, buffer_frames;  // how many, and how large
    };

    /// Throws std::invalid_argument if a buffer is smaller than a split may need.
    Offload(const Shape& shape, const Room& room, std::shared_ptr<Store> store);

    int layers() const { return shape_.layers; }
    const Pages& layer(int i) const { return layers_[i]; }
    int64_t page_bytes() const { return layers_[0].pitch; }  // keys and values

    /// Layers that are to stay in memory whole. What is missing of them is kept when a pass next reads it.
    void favour(const std::vector<bool>& layers) { frames_.favour(layers); }
    /// Room in the store for pages that will be written. Throws OffloadError.
    void reserve(const std::vector<int64_t>& pages);
    /// Pages that nobody needs.
    void forget(const std::vector<int64_t>& pages);

    /// These pages are full of committed tokens: the store has them from now on. Throws OffloadError.
    void commit(int layer, std::vector<int64_t> pages);
    /// As in write.hpp. What is put is committed.
    void read(int layer, const int64_t* slots, int64_t count, void* k, void* v);
    void put(int layer, const int64_t* slots, int64_t count, const void* k, const void* v);

    struct Seen {
        int64_t streamed, fetched, kept;  // pages: read ahead, read one by one, kept as they came by
    };
    Seen seen() const { return seen_; }

  private:
    friend class OffloadedPass;

    char* frame(int64_t i) const { return room_.data + i * page_bytes(); }
    int64_t place(int64_t id) const { return id * page_bytes(); }
    Run run_of(int64_t id, int64_t pages) const;
    void check_store();
    [[noreturn]] static void lost();
    void own(int layer, int64_t page, bool fresh);
    void fetch(const std::vector<int64_t>& ids);
    void fetch_run(int64_t id, int64_t pages);
    void hold(int layer, const std::vector<int64_t>& pages);

    const Shape shape_;
    const Room room_;
    const std::shared_ptr<Store> store_;
    Frames frames_;
    std::vector<Pages> layers_;
    std::vector<char> landing_;
    Seen seen_{};
};

/// One pass of a decoder over some of an offloaded memory's layers, in their order.
class OffloadedPass {
  public:
    struct How {
        bool exact;    // of committed tokens: keys before the starts are so, and may leave where they fill pages
        int64_t keep;  // pages of most attention mass that are to stay in memory, of each row, layer and KV head
    };
    /// Throws OffloadError, as do the others.
    OffloadedPass(Offload& memory, const Attention* first, const Attention* last, const How& how);

    void attend(const Attention& call);

  private:
    struct Part {  // of a row's list: what one buffer holds
        int64_t b;
        int g;
        int64_t first, last;  // splits
        std::vector<std::pair<int32_t, int64_t>> pages;  // and their frames in the buffer
    };

    void commit(const Attention& call);
    void own(const Attention& call);
    bool all_there(const Attention& call) const;
    void plan(const Attention& call, std::vector<Piece>& pieces);
    void plan(const Attention& call, int64_t b, int g, std::vector<Piece>& pieces);
    Piece pack(const Attention& call, Part& part) const;
    void hold(const Attention& call);
    void stream(Attention call);
    void stream(const Attention& call, Stepwise& steps, std::vector<int32_t>& table, int64_t b, int g);
    void keep_all(const Part& part, int layer, int64_t buffer);
    void copy(int64_t id, int64_t at);
    void keep_best(const Attention& call, int64_t b, int g, const std::vector<int32_t>& table);

    Offload& memory_;
    const How how_;
    std::vector<bool> streams_;  // layers
    std::vector<Part> parts_;
    size_t next_ = 0;
    std::unique_ptr<Reader> reader_;
};

}  // namespace triforce
