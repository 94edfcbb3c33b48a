// Memory that the kernels own: cache-line aligned, in huge pages (page walks cost a fifth of the bandwidth).
#pragma once

#include <cstddef>
#include <cstdlib>
#include <memory>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#endif

namespace triforce {

// The address sanitizer knows the ends of a block that malloc gives, not of the pieces that it is cut into. So each
// piece has a red zone behind it.
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

/// Asks for huge pages for large memory that has not been touched.
void prefer_huge_pages(void* data, size_t bytes);

class Memory {
  public:
    Memory() = default;
    Memory(Memory&&) = default;
    Memory& operator=(Memory&&) = default;
    explicit Memory(size_t bytes);  // zeroed
    /// The same in a slab of huge pages that it shares with others, if it is smaller than one. A slab is given back with
    /// the last of them.
    static Memory in_slab(size_t bytes);

    char* data() const { return data_.get(); }
    size_t size() const { return size_; }

  private:
    std::shared_ptr<char> data_;
    size_t size_ = 0;
};

/// Scratch memory, not zeroed. A pointer of `take` is valid as long as the Scratch. A thread's Scratches are destroyed
/// in reverse order.
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

    size_t block_, used_;  // the part of the thread's memory that was in use before
};

}  // namespace triforce
