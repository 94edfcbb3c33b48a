#include "tile.hpp"

namespace triforce::TF_LEVEL {

// In a file of its own, because the compiler's code for sums of other types changes with the amount of code in their
// file.
void sum_half(const Linear& l, int64_t top, int rows, int64_t first, int blocks, bool last, float* sums) {
    sum<half>(l, top, rows, first, blocks, last, sums);
}

}  // namespace triforce::TF_LEVEL
