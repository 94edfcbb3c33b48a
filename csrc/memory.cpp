#include "memory.hpp"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <mutex>
#include <new>
#include <vector>

#if defined(__linux__)
#include <sys/mman.h>
#endif

#include "threads.hpp"
#include "types.hpp"

namespace triforce {
namespace {

constexpr size_t cache_line = 64, huge_page = size_t{2} << 20, slab_size = size_t{32} << 20;

std::shared_ptr<char> allocate(size_t bytes, size_t alignment) {
    char* data = static_cast<char*>(std::aligned_alloc(alignment, bytes));
    if (!data) throw std::bad_alloc();
    return {data, [](char* all) { std::free(all); }};
}

// The scratch memory of a thread. Blocks are kept from call to call. A call that needs more memory gets another block;
// the next call gets one block of the total size.
struct Arena {
    std::vector<Memory> blocks;
    size_t block = 0, used = 0;  // blocks before `block` are in use, and `used` bytes of `block`
    int open_scratches = 0;      // number of Scratches that exist
};

Arena& arena() {
    thread_local Arena instance;
    return instance;
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

Memory::Memory(size_t bytes) : Memory(unset(bytes)) {
    // The thread that first writes a page decides the page's NUMA node. All threads write, so that pages lie near all
    // of them.
    parallel((bytes + huge_page - 1) / huge_page, [&](int64_t page) {
        std::memset(data() + page * huge_page, 0, std::min(huge_page, bytes - page * huge_page));
    });
}

Memory Memory::unset(size_t bytes) {
    const size_t alignment = bytes >= huge_page ? huge_page : cache_line;
    Memory memory;
    memory.data_ = allocate(round_up(bytes + cache_line, alignment), alignment);
    memory.size_ = bytes;
    // The remainder would waste most of a huge page.
    prefer_huge_pages(memory.data(), bytes / huge_page * huge_page);
    guarded(memory.data(), bytes);
    return memory;
}

Memory Memory::in_slab(size_t bytes) {
    const size_t size = round_up(bytes + cache_line, cache_line);
    if (size >= huge_page || red_zone) return unset(bytes);
    static std::mutex in_use;
    static std::weak_ptr<char> latest;
    static size_t used;
    std::lock_guard lock(in_use);
    std::shared_ptr<char> slab = latest.lock();
    if (!slab || used + size > slab_size) {
        latest = slab = allocate(slab_size, huge_page), used = 0;
        prefer_huge_pages(slab.get(), slab_size);
    }
    Memory memory;
    memory.data_ = {slab, slab.get() + used};
    memory.size_ = bytes;
    used += size;
    return memory;
}

Scratch::Scratch() {
    Arena& a = arena();
    if (a.open_scratches++ == 0 && a.blocks.size() > 1) {
        size_t total_bytes = 0;
        for (const Memory& each : a.blocks) total_bytes += each.size();
        a.blocks.clear();
        a.blocks.emplace_back(total_bytes);
    }
    block_ = a.block, used_ = a.used;
}

Scratch::~Scratch() {
    Arena& a = arena();
    a.open_scratches--;
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
