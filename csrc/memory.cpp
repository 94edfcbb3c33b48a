#include "memory.hpp"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <new>
#include <vector>

#if defined(__linux__)
#include <sys/mman.h>
#endif

#include "threads.hpp"
#include "types.hpp"

namespace triforce {
namespace {

constexpr size_t cache_line = 64, huge_page = size_t{2} << 20;

// Blocks are kept from call to call. A call that needs more gets another block; the next call, one of the whole size.
struct Arena {
    std::vector<Memory> blocks;
    size_t block = 0, used = 0;  // blocks before `block` are in use, and `used` bytes of it
    int open = 0;
};

Arena& arena() {
    thread_local Arena it;
    return it;
}

}  // namespace

void prefer_huge_pages(void* data, size_t bytes) {
#if defined(__linux__)
    const uintptr_t first = round_up(reinterpret_cast<uintptr_t>(data), 4096);
    const uintptr_t last = reinterpret_cast<uintptr_t>(data) + bytes;
    if (last > first && last - first >= huge_page) madvise(reinterpret_cast<void*>(first), last - first, MADV_HUGEPAGE);
#else
    (void)data, (void)bytes;
#endif
}

Memory::Memory(size_t bytes) : size_(bytes) {
    const size_t alignment = bytes >= huge_page ? huge_page : cache_line;
    const size_t allocated = round_up(bytes + cache_line, alignment);
    data_.reset(static_cast<char*>(std::aligned_alloc(alignment, allocated)));
    if (!data_) throw std::bad_alloc();
    prefer_huge_pages(data(), bytes / huge_page * huge_page);  // what is left over would fill another one with nothing
    // The first to write a page decides where it lies. All threads do it, so that pages lie near all of them.
    const size_t all = bytes + cache_line;
    parallel((all + huge_page - 1) / huge_page, [&](int64_t page) {
        std::memset(data() + page * huge_page, 0, std::min(huge_page, all - page * huge_page));
    });
    guarded(data(), bytes);
}

Scratch::Scratch() {
    Arena& a = arena();
    if (a.open++ == 0 && a.blocks.size() > 1) {
        size_t whole = 0;
        for (const Memory& each : a.blocks) whole += each.size();
        a.blocks.clear();
        a.blocks.emplace_back(whole);
    }
    block_ = a.block, used_ = a.used;
}

Scratch::~Scratch() {
    Arena& a = arena();
    a.open--;
    a.block = block_, a.used = used_;
}

char* Scratch::bytes(size_t size) {
    Arena& a = arena();
    size = round_up(size, cache_line);
    for (; a.block < a.blocks.size() && a.used + size > a.blocks[a.block].size(); a.block++) a.used = 0;
    if (a.block == a.blocks.size()) a.blocks.emplace_back(std::max(size, size_t{1} << 16));
    a.used += size;
    return a.blocks[a.block].data() + a.used - size;
}

}  // namespace triforce
