// Residency of offloaded pages: which have a frame in memory, and which are evicted.
//
// A frame has room for a page's keys and values of one layer and KV head. A page whose content is also in the store may
// be evicted. The least recently used page goes first; pages of preferred layers go only if no other page can. Dirty
// pages stay.
#pragma once

#include <cstdint>
#include <vector>

namespace triforce {

class FrameTable {
  public:
    /// Frame 0 belongs to no page.
    FrameTable(int layers, int heads, int64_t pages, int32_t frames);

    void prefer(const std::vector<bool>& layers);
    bool preferred(int layer) const { return preferred_[layer]; }
    int64_t id(int layer, int head, int64_t page) const { return (int64_t{layer} * heads_ + head) * pages_ + page; }
    const int32_t* of_layer(int layer) const { return frame_.data() + id(layer, 0, 0); }
    int32_t frame(int64_t id) const { return frame_[id]; }
    bool stored(int64_t id) const { return stored_[id]; }
    /// Whether the page has a frame, and the store lacks its content.
    bool dirty(int64_t id) const { return frame_[id] && !stored_[id]; }
    /// Number of frames that are free or can be evicted.
    int64_t available() const { return static_cast<int64_t>(free_.size()) + evictable_[0] + evictable_[1]; }
    /// Number of such frames, without evictable frames of preferred layers.
    int64_t available_to_preferred() const { return static_cast<int64_t>(free_.size()) + evictable_[0]; }

    /// Gives a frame to a page that has none. Throws OffloadError when none is available.
    int32_t take(int64_t id);
    /// Counts a page as used now.
    void touch(int64_t id);
    /// Marks that the store has the content of the page's frame.
    void mark_stored(int64_t id);
    /// Marks that the content in the store is no longer valid. The page stays in its frame, if it has one.
    void mark_unstored(int64_t id);
    /// Drops the page and frees its frame.
    void forget(int64_t id);

  private:
    bool evictable(int64_t id) const { return frame_[id] && stored_[id]; }
    bool is_preferred(int32_t frame) const { return preferred_[owner_[frame] / (heads_ * pages_)]; }
    int32_t ring(bool preferred) const { return preferred ? static_cast<int32_t>(owner_.size()) : 0; }
    void link(int32_t frame);
    void unlink(int32_t frame);

    int heads_;
    int64_t pages_;
    std::vector<int32_t> frame_;  // frame of each id; 0: none
    std::vector<char> stored_;    // by id
    std::vector<int64_t> owner_;  // id of each frame's page
    // Two rings of evictable frames, in the order of their last use. The ring of preferred layers passes through index
    // owner_.size(), the ring of other layers through frame 0.
    std::vector<int32_t> newer_, older_;
    std::vector<bool> preferred_;
    std::vector<int32_t> free_;
    int64_t evictable_[2] = {0, 0};  // frames in each ring
};

}  // namespace triforce
