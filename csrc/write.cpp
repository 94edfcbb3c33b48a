#include "write.hpp"

#include <algorithm>

#include "threads.hpp"

namespace triforce {
namespace {

const WriteKernels& kernels_of(const Pages& pages) {
    if (pages.coded) return pages.type == Type::bf16 ? write_codes_bf16() : write_codes_f32();
    return pages.type == Type::bf16 ? write_bf16() : write_f32();
}

/// Drops the int8 copies and sketches of pages that are written to.
void drop_copies(const Pages& pages, const int64_t* slots, int64_t count) {
    for (int64_t i = 0; i < count; i++)
        for (int head = 0; head < pages.heads; head++) {
            const int64_t page = slots[i] / page_size;
            if (pages.copies.scales) pages.scales_of(head, page).keys = -1;
            if (!pages.sketches.codes) continue;
            bf16& size = *pages.sizes_of(head, page);
            if (size.bits) size.bits = 0;  // memory that was never written to stays unallocated
        }
}

}  // namespace

void rope_and_write(const NewTokens& tokens) {
    constexpr int64_t at_once = 32;  // a few microseconds of work
    const WriteKernels& kernels = kernels_of(*tokens.pages);
    const int64_t chunks = (tokens.count + at_once - 1) / at_once;
    const int heads = tokens.pages->heads;
    // Tokens of a page share bytes of codes, so one chunk writes all tokens of a head.
    const bool by_head = tokens.pages->coded && chunks > 1;
    drop_copies(*tokens.pages, tokens.slots, tokens.count);
    parallel(chunks + (by_head ? heads : 0), [&](int64_t job) {
        if (job >= chunks) return kernels.write_new(tokens, static_cast<int>(job - chunks), 0, tokens.count);
        const int64_t first = job * at_once, last = std::min(first + at_once, tokens.count);
        kernels.rotate_queries(tokens, first, last);
        for (int g = 0; g < heads && !by_head; g++) kernels.write_new(tokens, g, first, last);
    });
}

void read(const Pages& pages, const int64_t* slots, int64_t count, void* k, void* v) {
    kernels_of(pages).read(pages, slots, count, k, v);
}

void write(const Pages& pages, const int64_t* slots, int64_t count, const void* k, const void* v) {
    constexpr int64_t at_once = 64;  // about ten microseconds of work
    const int64_t bytes = pages.heads * pages.row_bytes();
    drop_copies(pages, slots, count);
    const WriteKernels& kernels = kernels_of(pages);
    if (pages.coded)  // see rope_and_write
        return parallel(pages.heads, [&](int head) { kernels.write(pages, {head, head + 1}, slots, count, k, v); });
    parallel((count + at_once - 1) / at_once, [&](int64_t job) {
        const int64_t first = job * at_once, from = first * bytes;
        kernels.write(pages, {0, pages.heads}, slots + first, std::min(at_once, count - first),
                      static_cast<const char*>(k) + from, static_cast<const char*>(v) + from);
    });
}

void make_copies(const Pages& pages, int head, const int32_t* list, int64_t count) {
    for (int64_t i = 0; i < count; i++)
        if (pages.scales_of(head, list[i]).keys < 0) kernels_of(pages).copy(pages, head, list[i]);
}

}  // namespace triforce
