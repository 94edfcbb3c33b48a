// Where pages lie that memory has no room for: a file, or memory of another kind that is copied from.
#pragma once

#include <chrono>
#include <cstdint>
#include <mutex>
#include <stdexcept>
#include <vector>

namespace triforce {

/// What an offloaded memory could not do: a read or a write that failed, or too little room.
struct OffloadError : std::runtime_error {
    using std::runtime_error::runtime_error;
};

constexpr int64_t sector = 4096;  // what direct reads begin and end at, in the file and in memory

/// Bytes of a file that somebody else opened, and closes after this is gone; or of memory. Threads may read at once.
class Store {
  public:
    /// `direct`: the file again, opened so that reads pass the system's cache by; or below 0.
    Store(int file, int direct, int64_t bytes) : file_(file), direct_(direct), bytes_(bytes) {}
    explicit Store(char* memory) : memory_(memory) {}

    /// What reads are widened to begin and end at.
    int64_t alignment() const { return direct_ < 0 ? 1 : sector; }
    /// Both ends of the range must be aligned, `to` too, and only the first `needed` bytes must be there.
    void read(int64_t at, int64_t bytes, int64_t needed, char* to);
    void write(int64_t at, const std::vector<const char*>& pages, int64_t page_bytes);
    /// Whether somebody has cut the file since; it has its size again, but not what was in it.
    bool was_cut();
    /// So many bytes will be written; where that fails now, no write has to. Throws OffloadError.
    void reserve(int64_t at, int64_t bytes);

    /// Reads take as long as if they had at most so many bytes a second, all together; 0 is without a limit.
    void limit(double bytes_per_second) { limit_ = bytes_per_second; }
    int64_t bytes_read() const { return bytes_read_; }

  private:
    using Time = std::chrono::steady_clock::time_point;

    void read_file(int64_t at, int64_t bytes, int64_t needed, char* to) const;
    Time due_after(int64_t bytes);

    int file_ = -1, direct_ = -1;
    int64_t bytes_ = 0;
    char* memory_ = nullptr;
    std::mutex mutex_;
    double limit_ = 0;
    Time due_{};
    int64_t bytes_read_ = 0;
};

}  // namespace triforce
