#include "linear.hpp"

#include <algorithm>

#include "memory.hpp"
#include "threads.hpp"

namespace triforce {
namespace {

constexpr int64_t most_chunks = 64;  // of a job, or slightly more: enough for many threads, few enough to claim
constexpr int64_t least_parallel_work = 48 << 10;  // multiply-adds: about 2 microseconds

/// The chunks of a product. Their size depends on the number of blocks in the job, not on the number of threads, which
/// may change at any time. Few large chunks are faster, because a chunk's first weights were not prefetched.
struct Grid {
    int64_t chunk_blocks, rows, blocks;
    Grid(const Linear& l, int64_t blocks_of_job) {
        const int64_t tile = l.weights.format == Format::none ? 8 : 4;  // blocks of a tile of one row
        // A router has few blocks, and still makes several chunks. The number is even, because blocks of gate and up
        // projection alternate.
        const int64_t least_blocks = std::clamp<int64_t>(blocks_of_job / 4 * 2, 2, tile);
        chunk_blocks = round_up(std::max(least_blocks, blocks_of_job / most_chunks), least_blocks);
        rows = round_up(l.rows, linear_rows) / linear_rows;
        blocks = round_up(l.weights.blocks, chunk_blocks) / chunk_blocks;
    }
    int64_t chunks() const { return rows * blocks; }
};

void run_chunk(const Linear& l, const Grid& grid, int64_t chunk) {
    const int64_t top = chunk % grid.rows * linear_rows, first = chunk / grid.rows * grid.chunk_blocks;
    const int64_t bottom = std::min(top + linear_rows, l.rows);
    linear_kernels().run(l, top, bottom, first, std::min(first + grid.chunk_blocks, l.weights.blocks));
}

Rounding rounding(const Linear& l) {
    const bool widen = l.rounding() == Rounding::none && l.weights.type == Type::bf16 && !linear_kernels().pairs;
    return widen ? Rounding::widen : l.rounding();
}

constexpr int64_t rows_at_once = 8;                  // rows of a rounding chunk: a few microseconds of work
constexpr int64_t least_rounded_numbers = 16 << 10;  // least work of several threads

/// Rows of x, rounded or widened for products that share them.
struct RoundedRows {
    Linear product;  // the first product that needs these rows, with the original x
    Rounding rounding;
    int8_t* rows;
    int64_t first_job;  // index of the first chunk that rounds these rows

    bool suit(const Linear& l) const {
        return product.x == l.x && product.rows == l.rows && product.x_stride == l.x_stride &&
               product.weights.type == l.weights.type && product.weights.inputs == l.weights.inputs &&
               rounding == triforce::rounding(l);
    }
    int64_t stride() const {
        return product.rounded_stride() / (rounding == Rounding::widen ? static_cast<int64_t>(sizeof(float)) : 1);
    }
    int64_t jobs() const { return (product.rows + rows_at_once - 1) / rows_at_once; }
    void round(int64_t job) const {
        linear_kernels().quantise(product, job * rows_at_once, std::min((job + 1) * rows_at_once, product.rows), rows);
    }
};

/// A product whose x is rounded, and the end of its chunks among the chunks of all products.
struct Part {
    Linear linear;
    Grid grid;
    int64_t end;
};

/// Calls run(i) for all i below `count`, by several threads if `enough`.
template <class Run>
void parallel_if(bool enough, int64_t count, const Run& run) {
    if (enough) return parallel(count, run);
    for (int64_t i = 0; i < count; i++) run(i);
}

}  // namespace

void multiply(const Linear* products, int64_t count) {
    Scratch scratch;
    Part* parts = scratch.take<Part>(count);
    RoundedRows* rounded = scratch.take<RoundedRows>(count);
    int64_t rounded_count = 0, jobs = 0, numbers = 0, chunks = 0, work = 0, blocks = 0;
    for (int64_t i = 0; i < count; i++) blocks += products[i].weights.blocks;
    for (int64_t i = 0; i < count; i++) {
        Linear l = products[i];
        if (rounding(l) != Rounding::none) {
            RoundedRows* shared_rows = std::find_if(rounded, rounded + rounded_count,
                                            [&](const RoundedRows& each) { return each.suit(l); });
            if (shared_rows == rounded + rounded_count) {
                *shared_rows = {l, rounding(l), scratch.take<int8_t>(l.rows * l.rounded_stride()), jobs};
                rounded_count++, jobs += shared_rows->jobs(), numbers += l.rows * l.weights.inputs;
            }
            l.x = shared_rows->rows, l.x_stride = shared_rows->stride();
        }
        const Grid grid(l, blocks);
        chunks += grid.chunks();
        work += l.rows * l.weights.blocks * block_size * l.weights.inputs;
        parts[i] = {l, grid, chunks};
    }
    parallel_if(numbers >= least_rounded_numbers, jobs, [&](int64_t job) {
        const auto before = [](int64_t at, const RoundedRows& each) { return at < each.first_job; };
        const RoundedRows* shared_rows = std::upper_bound(rounded, rounded + rounded_count, job, before) - 1;
        shared_rows->round(job - shared_rows->first_job);
    });
    parallel_if(work >= least_parallel_work, chunks, [&](int64_t chunk) {
        const auto before = [](int64_t at, const Part& part) { return at < part.end; };
        const Part* part = std::upper_bound(parts, parts + count, chunk, before);
        run_chunk(part->linear, part->grid, chunk - (part == parts ? 0 : part[-1].end));
    });
}

}  // namespace triforce
