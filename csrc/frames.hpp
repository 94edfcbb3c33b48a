// Which pages of a model have a place in memory, and which go when there are too few places.
//
// A place is a frame: room for a page's keys and values of one layer and KV head. A page that the store has, too, is
// clean, and goes when its frame is wanted and nothing else was left alone for longer; others stay where they are. Those
// of layers in favour go only when there is no other.
#pragma once

#include <cstdint>
#include <vector>

namespace triforce {

class Frames {
  public:
    /// Frame 0 belongs to no page.
    Frames(int layers, int heads, int64_t pages, int32_t frames);

    void favour(const std::vector<bool>& layers);
    bool favoured(int layer) const { return favoured_[layer]; }
    int64_t id(int layer, int head, int64_t page) const { return (int64_t{layer} * heads_ + head) * pages_ + page; }
    const int32_t* of_layer(int layer) const { return frame_.data() + id(layer, 0, 0); }
    int32_t frame(int64_t id) const { return frame_[id]; }
    bool stored(int64_t id) const { return stored_[id]; }
    bool dirty(int64_t id) const { return frame_[id] && !stored_[id]; }
    /// Frames that can be had, and how many of them for those in favour.
    int64_t to_be_had() const { return static_cast<int64_t>(free_.size()) + clean_[0] + clean_[1]; }
    int64_t to_be_had_by_favoured() const { return static_cast<int64_t>(free_.size()) + clean_[0]; }

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
    bool kind(int32_t frame) const { return favoured_[owner_[frame] / (heads_ * pages_)]; }
    int32_t ring(bool kind) const { return kind ? static_cast<int32_t>(owner_.size()) : 0; }
    void link(int32_t frame);
    void unlink(int32_t frame);

    int heads_;
    int64_t pages_;
    std::vector<int32_t> frame_;  // of each id; 0: none
    std::vector<char> stored_;
    std::vector<int64_t> owner_;          // of each frame
    std::vector<int32_t> newer_, older_;  // two rings of clean ones, through 0 and, of those in favour, the last
    std::vector<bool> favoured_;
    std::vector<int32_t> free_;
    int64_t clean_[2] = {0, 0};  // in each ring
};

}  // namespace triforce
