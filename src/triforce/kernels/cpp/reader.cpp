#include "reader.hpp"

namespace triforce {

Reader::Reader(Store& store, const Buffers& buffers, std::vector<Piece> pieces)
    : store_(store), buffers_(buffers), pieces_(std::move(pieces)), thread_([this] { work(); }) {}

Reader::~Reader() {
    {
        std::lock_guard lock(mutex_);
        stop_ = true;
    }
    changed_.notify_all();
    thread_.join();
}

int64_t Reader::wait(size_t i) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return read_ > i || error_; });
    if (read_ <= i) std::rethrow_exception(error_);
    return static_cast<int64_t>(i) % buffers_.count;
}

void Reader::release(size_t i) {
    {
        std::lock_guard lock(mutex_);
        if (i <= released_) return;
        released_ = i;
    }
    changed_.notify_all();
}

void Reader::work() {
    for (size_t i = 0; i < pieces_.size(); i++) {
        {
            std::unique_lock lock(mutex_);
            changed_.wait(lock, [&] { return stop_ || i < released_ + buffers_.count; });
            if (stop_) return;
        }
        std::exception_ptr error;
        try {
            char* buffer = buffers_.data + static_cast<int64_t>(i) % buffers_.count * buffers_.bytes;
            for (const Run& run : pieces_[i]) store_.read(run.at, run.bytes, run.needed, buffer + run.offset);
        } catch (...) {
            error = std::current_exception();
        }
        {
            std::lock_guard lock(mutex_);
            error ? void(error_ = error) : void(read_ = i + 1);
        }
        changed_.notify_all();
        if (error) return;
    }
}

}  // namespace triforce
