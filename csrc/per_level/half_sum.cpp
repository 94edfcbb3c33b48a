#include "tile.hpp"

namespace triforce::TF_LEVEL {

// Apart from the sums of other types: what a compiler makes of those depends on how much there is in their file.
void sum_half(const Linear& l, int64_t top, int rows, int64_t first, int blocks, bool last, float* sums) {
    sum<half>(l, top, rows, first, blocks, last, sums);
}

}  // namespace triforce::TF_LEVEL
