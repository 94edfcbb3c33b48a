// Which chunks score highest.
#pragma once

#include <cstdint>

namespace triforce {

/// The ids of the `picks` highest of `count` scores, ascending: the lowest ids among equals, NaN above all. Each KV
/// head's `count` scores begin `stride` after the last one's; `first` is added to each id. 0 <= picks <= count.
struct Best {
    const float* scores;
    int64_t heads, stride, first, count, picks;
    int64_t* ids;  // (heads, picks)
};

void run(const Best& best);

}  // namespace triforce
