#include "low_bit_sum.hpp"

namespace triforce::TF_LEVEL {

void sum_low_bit_int8(const Linear& l, int64_t top, int rows, int64_t first, int blocks, bool, float* sums) {
    sum_low_bit<int8_t>(l, top, rows, first, blocks, sums);
}

}  // namespace triforce::TF_LEVEL
