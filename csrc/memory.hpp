// Memory that the kernels own, aligned to cache lines, in huge pages. Huge pages save the bandwidth of page walks.
#pragma once

#include <cstddef>
#include <cstdlib>
#include <memory>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#endif

namespace triforce {

// The address sanitizer knows the end of a malloc block, not the ends of the pieces of a block. Each piece therefore
// has a red zone behind it.
#if defined(__SANITIZE_ADDRESS__)
constexpr size_t red_zone = 64;
inline char* guarded(char* data, size_t size) {
    ASAN_UNPOISON_MEMORY_REGION(data, size);
    ASAN_POISON_MEMORY_REGION(data + size, red_zone);
    return data;
}
#else
constexpr size_t red_zone = 0;
inline char* guarded(char* data, size_t) { return data; }
#endif

/// Asks for huge pages for large memory that was never read or written.
void prefer_huge_pages(void* data, size_t bytes);

class Memory {
  public:
    Memory() = default;
    Memory(Memory&&) = default;
    Memory& operator=(Memory&&) = default;
    explicit Memory(size_t bytes);  // zeroed
    /// Memory that is not zeroed. If it is smaller than a huge page, it lies in a slab of huge pages that several
    /// memories share. A slab is freed with its last memory.
    static Memory in_slab(size_t bytes);

    char* data() const { return data_.get(); }
    size_t size() const { return size_; }

  private:
    static Memory unset(size_t bytes);

    std::shared_ptr<char> data_;
    size_t size_ = 0;
};

/// Scratch memory, not zeroed. A pointer of `take` is valid until the Scratch is destroyed. A thread destroys its
/// Scratches in reverse order of construction.
class Scratch {
  public:
    Scratch();
    Scratch(const Scratch&) = delete;
    ~Scratch();

    template <class T>
    T* take(size_t count) {
        const size_t size = count * sizeof(T);
        return reinterpret_cast<T*>(guarded(bytes(size + red_zone), size));
    }

  private:
    char* bytes(size_t size);

    size_t block_, used_;  // position in the thread's memory at construction: block, and bytes used of it
};

}  // namespace triforce
