// Reads what a pass will need ahead of it, in threads of its own, into a ring of buffers.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <exception>
#include <mutex>
#include <thread>
#include <vector>

#include "store.hpp"

namespace triforce {

/// Bytes [at, at + bytes) of a store, the first `needed` of which are there, to `offset` in a buffer.
struct Run {
    int64_t at, bytes, needed, offset;
};
using Piece = std::vector<Run>;

struct Buffers {
    char* data;
    int64_t bytes;  // of each
    int64_t count;
};

/// Piece i comes into buffer i % count, as soon as what was there is released.
class Reader {
  public:
    Reader(Store& store, const Buffers& buffers, std::vector<Piece> pieces);
    ~Reader();

    /// The buffer with piece i, which is read by then. Throws what reading it threw.
    int64_t wait(size_t i);
    /// The pieces before i are not needed any more.
    void release(size_t i);

  private:
    void work();

    Store& store_;
    const Buffers buffers_;
    const std::vector<Piece> pieces_;
    std::mutex mutex_;
    std::condition_variable changed_;
    size_t begun_ = 0, released_ = 0;
    std::vector<char> read_;
    bool stop_ = false;
    std::exception_ptr error_;
    std::thread threads_[2];  // a disk has work while the other one hands out its piece
};

}  // namespace triforce
