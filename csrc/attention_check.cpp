#include <algorithm>
#include <stdexcept>

#include "attention.hpp"

namespace triforce {
namespace {

void require(bool fine, const char* why) {
    if (!fine) throw std::invalid_argument(why);
}

void check_row(const Attention& call, int64_t b) {
    const int64_t start = call.starts[b], count = call.counts[b];
    require(0 <= count && count <= call.width, "counts must lie in [0, T]");
    require(0 <= start && start < INT32_MAX, "starts must lie in [0, 2^31 - 1)");
    if (call.coarse) require(0 <= call.coarse[b] && call.coarse[b] <= start, "coarse must lie in [0, starts]");
    const int64_t used = call.visible_pages(b);
    require(used <= call.list_length, "lists must have a page for each key that is seen");
    const int lists = call.head_stride ? call.pages->heads : 1;
    for (int g = 0; g < lists; g++) {
        uint32_t largest = 0;
        const int32_t* list = call.list(b, g);
        for (int64_t i = 0; i < used; i++) largest = std::max(largest, static_cast<uint32_t>(list[i]));
        require(largest < call.pages->count, "lists must hold page numbers of the pool");
    }
}

}  // namespace

void check(const Attention& call) {
    require(call.sinks >= 0 && call.sinks % page_size == 0, "sinks must be whole pages");
    require(0 <= call.window && call.window <= INT32_MAX, "window must lie in [0, 2^31 - 1]");
    require(!call.coarse || (call.pages->copies.keys && !call.window && !call.q_sinks),
            "coarse needs int8 copies, and no window");
    for (int64_t b = 0; b < call.rows; b++) check_row(call, b);
}

}  // namespace triforce
