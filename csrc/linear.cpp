#include "linear.hpp"

#include <algorithm>

#include "memory.hpp"
#include "threads.hpp"

namespace triforce {
namespace {

constexpr int64_t most_chunks = 64;                // of a row of chunks: enough for many threads, few to claim
constexpr int64_t least_parallel_work = 48 << 10;  // multiply-adds: some 2 microseconds

/// Chunks of a product. They do not depend on the number of threads, which may change at any time.
struct Grid {
    int64_t chunk_blocks, rows, blocks;
    explicit Grid(const Linear& l) {
        const int64_t least_blocks = l.weights.format == Format::none ? 8 : 4;  // of a tile of a single row
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

Rounding rounding(const Weights& weights) {
    const bool widen = weights.rounding() == Rounding::none && weights.type == Type::bf16 && !linear_kernels().pairs;
    return widen ? Rounding::widen : weights.rounding();
}

/// The rows of x, as the weights want them.
const int8_t* rounded_rows(Scratch& scratch, const Linear& l) {
    constexpr int64_t at_once = 8;  // some microseconds of work
    int8_t* rows = scratch.take<int8_t>(l.rows * rounded_stride(l.weights));
    parallel((l.rows + at_once - 1) / at_once, [&](int64_t job) {
        linear_kernels().quantise(l, job * at_once, std::min((job + 1) * at_once, l.rows), rows);
    });
    return rows;
}

}  // namespace

void multiply(std::initializer_list<Linear> products) {
    Scratch scratch;
    const int8_t* rounded[4] = {};  // x as each kind of weights wants it, if any does
    int64_t chunks = 0, work = 0;
    for (const Linear& l : products) {
        const Rounding kind = rounding(l.weights);
        const int8_t*& rows = rounded[static_cast<int>(kind)];
        if (kind != Rounding::none && !rows) rows = rounded_rows(scratch, l);
        chunks += Grid(l).chunks();
        work += l.rows * l.weights.blocks * block_size * l.weights.inputs;
    }
    const auto body = [&](int64_t chunk) {
        for (Linear l : products) {
            const int64_t own = Grid(l).chunks();
            const Rounding kind = rounding(l.weights);
            if (const int8_t* rows = rounded[static_cast<int>(kind)])
                l.x = rows, l.x_stride = kind == Rounding::widen ? widened_stride(l.weights) : rounded_stride(l.weights);
            if (chunk < own) return run_chunk(l, chunk);
            chunk -= own;
        }
    };
    if (work >= least_parallel_work) return parallel(chunks, body);
    for (int64_t chunk = 0; chunk < chunks; chunk++) body(chunk);
}

}  // namespace triforce
