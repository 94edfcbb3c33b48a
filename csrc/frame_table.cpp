#include "frame_table.hpp"

#include "store.hpp"

namespace triforce {

FrameTable::FrameTable(int layers, int heads, int64_t pages, int32_t frames)
    : heads_(heads), pages_(pages), frame_(layers * heads * pages), stored_(layers * heads * pages), owner_(frames),
      newer_(frames + 1), older_(frames + 1), preferred_(layers) {
    newer_[frames] = older_[frames] = frames;
    for (int32_t frame = frames - 1; frame > 0; frame--) free_.push_back(frame);
}

void FrameTable::prefer(const std::vector<bool>& layers) {
    for (size_t layer = 0; layer < preferred_.size(); layer++) {
        if (preferred_[layer] == layers[layer]) continue;
        const int64_t first = id(static_cast<int>(layer), 0, 0), last = first + heads_ * pages_;
        for (int64_t i = first; i < last; i++)
            if (evictable(i)) unlink(frame_[i]);
        preferred_[layer] = layers[layer];
        for (int64_t i = first; i < last; i++)
            if (evictable(i)) link(frame_[i]);
    }
}

int32_t FrameTable::take(int64_t id) {
    if (free_.empty()) {
        if (!evictable_[0] && !evictable_[1])
            throw OffloadError(
                "--kv-memory is full of KV that cannot leave; give more of it, or fewer texts at a time");
        const int32_t oldest = newer_[ring(!evictable_[0])];
        unlink(oldest);
        free_.push_back(oldest);
        frame_[owner_[oldest]] = 0;
    }
    const int32_t frame = free_.back();
    free_.pop_back();
    owner_[frame] = id;
    frame_[id] = frame;
    if (stored_[id]) link(frame);
    return frame;
}

void FrameTable::touch(int64_t id) {
    if (!evictable(id)) return;
    unlink(frame_[id]);
    link(frame_[id]);
}

void FrameTable::mark_stored(int64_t id) {
    if (evictable(id)) return;
    stored_[id] = 1;
    if (frame_[id]) link(frame_[id]);
}

void FrameTable::mark_unstored(int64_t id) {
    if (evictable(id)) unlink(frame_[id]);
    stored_[id] = 0;
}

void FrameTable::forget(int64_t id) {
    mark_unstored(id);
    if (frame_[id]) free_.push_back(frame_[id]);
    frame_[id] = 0;
}

void FrameTable::link(int32_t frame) {
    const int32_t head = ring(is_preferred(frame)), newest = older_[head];
    newer_[newest] = frame, older_[frame] = newest;
    newer_[frame] = head, older_[head] = frame;
    evictable_[is_preferred(frame)]++;
}

void FrameTable::unlink(int32_t frame) {
    newer_[older_[frame]] = newer_[frame];
    older_[newer_[frame]] = older_[frame];
    evictable_[is_preferred(frame)]--;
}

}  // namespace triforce
