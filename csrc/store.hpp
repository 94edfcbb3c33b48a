// The store of pages that memory has no room for: a file, or other memory.
#pragma once

#include <chrono>
#include <cstdint>
#include <mutex>
#include <stdexcept>
#include <vector>

namespace triforce {

/// A read or write of the store failed, or memory has no frame for a page.
struct OffloadError : std::runtime_error {
    using std::runtime_error::runtime_error;
};

constexpr int64_t sector = 4096;  // alignment of direct reads, in the file and in memory

/// A store in a file or in memory. The owner of the file closes it after the Store is destroyed. Several threads may
/// read at the same time.
class Store {
  public:
    /// `direct`: the same file, opened for reads that bypass the page cache; or below 0.
    Store(int file, int direct, int64_t bytes) : file_(file), direct_(direct), bytes_(bytes) {}
    explicit Store(char* memory) : memory_(memory) {}

    /// Alignment of the begin and the end of reads, in bytes.
    int64_t alignment() const { return direct_ < 0 ? 1 : sector; }
    /// Reads an aligned range to `to`, aligned as well. Only the first `needed` bytes must exist. Throws OffloadError.
    void read(int64_t at, int64_t bytes, int64_t needed, char* to);
    void write(int64_t at, const std::vector<const char*>& pages, int64_t page_bytes);
    /// Restores the size of a file that was truncated. Returns whether the file was truncated; its content is then
    /// lost.
    bool restore_size();
    /// Allocates room for a later write. Throws OffloadError.
    void reserve(int64_t at, int64_t bytes);

    /// Limits all reads together to this number of bytes a second; 0 is no limit.
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
