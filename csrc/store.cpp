#include "store.hpp"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <string>
#include <thread>

#include <fcntl.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

namespace triforce {
namespace {

constexpr auto oversleeping = std::chrono::milliseconds(4);  // delay of a sleep for which later reads may make up
constexpr size_t most_pieces = 512;                          // most pieces of one write; systems take 1024

[[noreturn]] void failed(const char* what, int why) {
    const char* advice = why == ENOSPC || why == EDQUOT
                             ? "set TMPDIR to a folder with more room, or use a shorter prompt, a smaller max_tokens "
                               "or --kv-offload host"
                             : "ask again, and if it fails again set TMPDIR to a folder on another disk";
    throw OffloadError(std::string(what) + " (" + std::strerror(why) + "); " + advice);
}

}  // namespace

void Store::read(int64_t at, int64_t bytes, int64_t needed, char* to) {
    const auto due = due_after(bytes);
    if (memory_)
        std::memcpy(to, memory_ + at, needed);
    else
        read_file(at, bytes, needed, to);
    if (due != Time{}) std::this_thread::sleep_until(due);
}

void Store::read_file(int64_t at, int64_t bytes, int64_t needed, char* to) const {
    for (int64_t done = 0; done < needed;) {
        const ssize_t got = pread(direct_ < 0 ? file_ : direct_, to + done, bytes - done, at + done);
        if (got < 0 && errno == EINTR) continue;
        if (got < 0) failed("KV cannot be read back from its file", errno);
        if (got == 0) throw OffloadError("the file with KV is shorter than what was written to it; ask again");
        done += got;
    }
}

void Store::write(int64_t at, const std::vector<const char*>& pages, int64_t page_bytes) {
    if (memory_) {
        for (const char* page : pages) std::memcpy(memory_ + at, page, page_bytes), at += page_bytes;
        return;
    }
    const int64_t end = at + static_cast<int64_t>(pages.size()) * page_bytes;
    for (int64_t done = at; done < end;) {
        std::vector<iovec> pieces;
        int64_t skip = (done - at) % page_bytes;  // bytes of a partly written page that are written
        for (size_t i = (done - at) / page_bytes; i < pages.size() && pieces.size() < most_pieces; i++, skip = 0)
            pieces.push_back({const_cast<char*>(pages[i]) + skip, static_cast<size_t>(page_bytes - skip)});
        const ssize_t written = pwritev(file_, pieces.data(), static_cast<int>(pieces.size()), done);
        if (written < 0 && errno == EINTR) continue;
        if (written < 0) failed("KV cannot be written to its file", errno);
        done += written;
    }
}

bool Store::restore_size() {
    struct stat status;
    if (memory_ || fstat(file_, &status) || !S_ISREG(status.st_mode) || status.st_size >= bytes_) return false;
    if (ftruncate(file_, bytes_)) failed("the file for KV was cut and cannot be made as large again", errno);
    return true;
}

void Store::reserve(int64_t at, int64_t bytes) {
    if (memory_) return;
#if defined(__linux__)
    int why = 0;
    do why = fallocate(file_, 0, at, bytes) ? errno : 0;
    while (why == EINTR);
    const bool unknown = why == EOPNOTSUPP || why == ENOSYS || why == ENODEV;  // then a write fails if there is no room
    if (why && !unknown) failed("the file for KV cannot be made larger", why);
#else
    (void)at, (void)bytes;
#endif
}

Store::Time Store::due_after(int64_t bytes) {
    std::lock_guard lock(mutex_);
    bytes_read_ += bytes;
    if (limit_ <= 0) return {};
    const auto takes = std::chrono::duration<double>(static_cast<double>(bytes) / limit_);
    const auto now = std::chrono::steady_clock::now();
    return due_ = std::max(due_, now - oversleeping) + std::chrono::duration_cast<Time::duration>(takes);
}

}  // namespace triforce
