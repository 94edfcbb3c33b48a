// Which pages of a model have a place in memory, and which go when there are too few places.
//
// A place is a frame: room for a page's keys and values of one layer and KV head. A page that the store has, too, is
// clean, and goes when its frame is wanted and nothing else was left alone for longer; others stay where they are.
#pragma once

#include <cstdint>
#include <vector>

namespace triforce {

class Frames {
  public:
    /// Frame 0 belongs to no page.
    Frames(int layers, int heads, int64_t pages, int32_t frames);

    int64_t id(int layer, int head, int64_t page) const { return (int64_t{layer} * heads_ + head) * pages_ + page; }
    const int32_t* of_layer(int layer) const { return frame_.data() + id(layer, 0, 0); }
    int32_t frame(int64_t id) const { return frame_[id]; }
    bool stored(int64_t id) const { return stored_[id]; }
    bool dirty(int64_t id) const { return frame_[id] && !stored_[id]; }
    int64_t in_use() const { return static_cast<int64_t>(owner_.size()) - 1 - static_cast<int64_t>(free_.size()); }
    /// Frames that can be had.
    int64_t to_be_had() const { return static_cast<int64_t>(free_.size()) + clean_; }

    /// A frame for a page that has none. Throws OffloadError when there is none to be had.
    int32_t take(int64_t id);
    /// A clean page is in use.
    void touch(int64_t id);
    /// The store has the page as it is in its frame.
    void clean(int64_t id);
    /// The store has it no more, or must not count: it stays in its frame, if it has one.
    void spoil(int64_t id);
    /// Nobody needs the page.
    void forget(int64_t id);

  private:
    bool listed(int64_t id) const { return frame_[id] && stored_[id]; }
    void link(int32_t frame);
    void unlink(int32_t frame);

    int heads_;
    int64_t pages_;
    std::vector<int32_t> frame_;  // of each id; 0: none
    std::vector<char> stored_;
    std::vector<int64_t> owner_;          // of each frame
    std::vector<int32_t> newer_, older_;  // a ring of the clean ones through frame 0
    std::vector<int32_t> free_;
    int64_t clean_ = 0;
};

}  // namespace triforce
