// Reads a store ahead of a pass, in threads of its own, into a ring of buffers.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <exception>
#include <mutex>
#include <thread>
#include <vector>

#include "store.hpp"

namespace triforce {

/// A read of bytes [at, at + bytes) of a store to bytes [to, to + bytes) of a buffer. The first `needed` bytes must
/// exist in the store.
struct StoreRead {
    int64_t at, bytes, needed, to;

    int64_t end() const { return to + bytes; }
};
/// The reads that fill one buffer.
using BufferReads = std::vector<StoreRead>;

struct Buffers {
    char* data;
    int64_t bytes;  // of one buffer
    int64_t count;
};

/// Fill i goes into buffer i % count, as soon as the previous fill of that buffer is released.
class Reader {
  public:
    Reader(Store& store, const Buffers& buffers, std::vector<BufferReads> fills);
    ~Reader();

    /// Starts the threads.
    void start();
    /// Waits for fill i. Returns the index of its buffer. Throws the error of its reads.
    int64_t wait(size_t i);
    /// Releases fills before i: their buffers may be reused.
    void release(size_t i);

  private:
    void work();

    Store& store_;
    const Buffers buffers_;
    const std::vector<BufferReads> fills_;
    std::mutex mutex_;
    std::condition_variable changed_;
    size_t begun_ = 0, released_ = 0;
    std::vector<char> done_;
    bool stop_ = false;
    std::exception_ptr error_;
    std::thread threads_[2];  // two: one reads while the other hands over its buffer
};

}  // namespace triforce
