#include "frames.hpp"

#include "store.hpp"

namespace triforce {

Frames::Frames(int layers, int heads, int64_t pages, int32_t frames)
    : heads_(heads), pages_(pages), frame_(layers * heads * pages), stored_(layers * heads * pages), owner_(frames),
      newer_(frames), older_(frames) {
    for (int32_t frame = frames - 1; frame > 0; frame--) free_.push_back(frame);
}

int32_t Frames::take(int64_t id) {
    if (free_.empty()) {
        if (!clean_) throw OffloadError("--kv-memory is full of KV that cannot leave; give more of it, or make fewer texts at a time");
        const int32_t oldest = newer_[0];
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

void Frames::touch(int64_t id) {
    if (!listed(id)) return;
    unlink(frame_[id]);
    link(frame_[id]);
}

void Frames::clean(int64_t id) {
    if (listed(id)) return;
    stored_[id] = 1;
    if (frame_[id]) link(frame_[id]);
}

void Frames::spoil(int64_t id) {
    if (listed(id)) unlink(frame_[id]);
    stored_[id] = 0;
}

void Frames::forget(int64_t id) {
    spoil(id);
    if (frame_[id]) free_.push_back(frame_[id]);
    frame_[id] = 0;
}

void Frames::link(int32_t frame) {
    const int32_t newest = older_[0];
    newer_[newest] = frame, older_[frame] = newest;
    newer_[frame] = 0, older_[0] = frame;
    clean_++;
}

void Frames::unlink(int32_t frame) {
    newer_[older_[frame]] = newer_[frame];
    older_[newer_[frame]] = older_[frame];
    clean_--;
}

}  // namespace triforce
