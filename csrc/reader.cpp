#include "reader.hpp"

namespace triforce {

Reader::Reader(Store& store, const Buffers& buffers, std::vector<BufferReads> fills)
    : store_(store), buffers_(buffers), fills_(std::move(fills)), done_(fills_.size()) {}

void Reader::start() {
    for (std::thread& each : threads_) each = std::thread([this] { work(); });
}

Reader::~Reader() {
    {
        std::lock_guard lock(mutex_);
        stop_ = true;
    }
    changed_.notify_all();
    for (std::thread& each : threads_)
        if (each.joinable()) each.join();
}

int64_t Reader::wait(size_t i) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return done_[i] || error_; });
    if (!done_[i]) std::rethrow_exception(error_);
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
    std::unique_lock lock(mutex_);
    while (true) {
        changed_.wait(lock, [&] {
            return stop_ || error_ || begun_ == fills_.size() || begun_ < released_ + buffers_.count;
        });
        if (stop_ || error_ || begun_ == fills_.size()) return;
        const size_t i = begun_++;
        lock.unlock();
        std::exception_ptr error;
        try {
            char* buffer = buffers_.data + static_cast<int64_t>(i) % buffers_.count * buffers_.bytes;
            for (const StoreRead& read : fills_[i]) store_.read(read.at, read.bytes, read.needed, buffer + read.to);
        } catch (...) {
            error = std::current_exception();
        }
        lock.lock();
        done_[i] = !error;
        if (error) error_ = error;
        changed_.notify_all();
    }
}

}  // namespace triforce
