// Memory that the kernels own: cache-line aligned, in huge pages where it is large (page walks cost a fifth of the
// bandwidth).
#pragma once

#include <cstddef>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#endif

namespace triforce {

// The address sanitizer knows the ends of what malloc gives, not of the pieces that are made of it: each of them has
// bytes behind it that nobody may touch.
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

/// Large memory that has not been touched will be in huge pages, where the system has them.
void prefer_huge_pages(void* data, size_t bytes);

class Memory {
  public:
    Memory() = default;
    explicit Memory(size_t bytes);  // zeroed
    Memory(Memory&& other) noexcept : Memory() { swap(other); }
    Memory& operator=(Memory&& other) noexcept {
        swap(other);
        return *this;
    }
    ~Memory();

    char* data() const { return data_; }
    size_t size() const { return size_; }

  private:
    void swap(Memory& other) noexcept;

    char* data_ = nullptr;
    size_t size_ = 0;
};

/// Scratch memory: what `take` returned is valid as long as the Scratch is. Not zeroed. Those of a thread go in the
/// reverse order in which they came.
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

    size_t block_, used_;  // how far the thread's memory was in use before
};

}  // namespace triforce
