#include "linear.hpp"

#include <algorithm>

#include "memory.hpp"
#include "threads.hpp"

namespace triforce {
namespace {

constexpr int64_t most_chunks = 64;  // of a job's products, or little more: enough for many threads, few to claim
constexpr int64_t least_parallel_work = 48 << 10;  // multiply-adds: some 2 microseconds

/// Chunks of a product, by blocks of its job. They do not depend on the number of threads, which may change at
/// any time. A chunk's first weights come late, as they were not prefetched: few large ones are faster.
struct Grid {
    int64_t chunk_blocks, rows, blocks;
    Grid(const Linear& l, int64_t blocks_of_job) {
        const int64_t tile = l.weights.format == Format::none ? 8 : 4;  // of a single row
        // A router has few, for several chunks. Even, as a gate and its up projection lie side by side.
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

Rounding rounding(const Weights& weights) {
    const bool widen = weights.rounding() == Rounding::none && weights.type == Type::bf16 && !linear_kernels().pairs;
    return widen ? Rounding::widen : weights.rounding();
}

constexpr int64_t rows_at_once = 8;               // that a thread rounds: some microseconds of work
constexpr int64_t least_rounded_numbers = 16 << 10;  // that several threads round

/// Rows of x, as some weights want them.
struct RoundedRows {
    Linear of;  // with x as it was
    Rounding rounding;
    int8_t* rows;
    int64_t first_job;  // of the jobs that round rows

    bool suit(const Linear& l) const {
        return of.x == l.x && of.rows == l.rows && of.x_stride == l.x_stride && of.weights.type == l.weights.type &&
               of.weights.inputs == l.weights.inputs && rounding == triforce::rounding(l.weights);
    }
    int64_t stride() const {
        return rounding == Rounding::widen ? widened_stride(of.weights) : rounded_stride(of.weights);
    }
    int64_t jobs() const { return (of.rows + rows_at_once - 1) / rows_at_once; }
    void round(int64_t job) const {
        linear_kernels().quantise(of, job * rows_at_once, std::min((job + 1) * rows_at_once, of.rows), rows);
    }
};

/// A product whose x is as its weights want it, and the end of its chunks among those of all.
struct Part {
    Linear linear;
    Grid grid;
    int64_t end;
};

/// Calls run(i) for all i below `count`, by several threads if there is enough work.
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
    int64_t kinds = 0, jobs = 0, numbers = 0, chunks = 0, work = 0, blocks = 0;
    for (int64_t i = 0; i < count; i++) blocks += products[i].weights.blocks;
    for (int64_t i = 0; i < count; i++) {
        Linear l = products[i];
        if (rounding(l.weights) != Rounding::none) {
            RoundedRows* own = std::find_if(rounded, rounded + kinds, [&](const RoundedRows& each) { return each.suit(l); });
            if (own == rounded + kinds) {
                *own = {l, rounding(l.weights), scratch.take<int8_t>(l.rows * rounded_stride(l.weights)), jobs};
                kinds++, jobs += own->jobs(), numbers += l.rows * l.weights.inputs;
            }
            l.x = own->rows, l.x_stride = own->stride();
        }
        const Grid grid(l, blocks);
        chunks += grid.chunks();
        work += l.rows * l.weights.blocks * block_size * l.weights.inputs;
        parts[i] = {l, grid, chunks};
    }
    parallel_if(numbers >= least_rounded_numbers, jobs, [&](int64_t job) {
        const auto before = [](int64_t at, const RoundedRows& each) { return at < each.first_job; };
        const RoundedRows* own = std::upper_bound(rounded, rounded + kinds, job, before) - 1;
        own->round(job - own->first_job);
    });
    parallel_if(work >= least_parallel_work, chunks, [&](int64_t chunk) {
        const auto before = [](int64_t at, const Part& part) { return at < part.end; };
        const Part* part = std::upper_bound(parts, parts + count, chunk, before);
        run_chunk(part->linear, part->grid, chunk - (part == parts ? 0 : part[-1].end));
    });
}

}  // namespace triforce
