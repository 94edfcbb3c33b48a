#include "linear.hpp"

#include <algorithm>

#include "threads.hpp"

namespace triforce {
namespace {

constexpr int64_t least_blocks = 8, most_chunks = 64;  // of a row of chunks: enough for many threads, few to hand out
constexpr int64_t worth_a_thread = 48 << 10;  // multiply-adds: some 2 microseconds

/// Chunks of a product. They do not depend on the number of threads, which may change at any time.
struct Grid {
    int64_t chunk_blocks, rows, blocks;
    explicit Grid(const Linear& l) {
        chunk_blocks = round_up(std::max(least_blocks, l.weights.blocks / most_chunks), least_blocks);
        rows = round_up(l.rows, linear_rows) / linear_rows;
        blocks = round_up(l.weights.blocks, chunk_blocks) / chunk_blocks;
    }
    int64_t chunks() const { return rows * blocks; }
};

void run_chunk(const Linear& l, int64_t chunk) {
    const Grid grid(l);
    const int64_t top = chunk % grid.rows * linear_rows, first = chunk / grid.rows * grid.chunk_blocks;
    const int64_t bottom = std::min(top + linear_rows, l.rows);
    linear_kernels().run(l, top, bottom, first, std::min(first + grid.chunk_blocks, l.weights.blocks));
}

}  // namespace

void run(std::initializer_list<Linear> linears) {
    int64_t chunks = 0, work = 0;
    for (const Linear& l : linears) {
        chunks += Grid(l).chunks();
        work += l.rows * l.weights.blocks * block_size * l.weights.inputs;
    }
    const auto body = [&](int64_t chunk) {
        for (const Linear& l : linears) {
            const int64_t own = Grid(l).chunks();
            if (chunk < own) return run_chunk(l, chunk);
            chunk -= own;
        }
    };
    if (work >= worth_a_thread) return parallel(static_cast<int>(chunks), body);
    for (int64_t chunk = 0; chunk < chunks; chunk++) body(chunk);
}

}  // namespace triforce
