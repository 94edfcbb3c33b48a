#include "../attention.hpp"

#include "hadamard.hpp"
#include "split_scan.hpp"

namespace triforce::TF_LEVEL {
namespace {

template <class T, class P = T>
void scan(const Attention& call, const Queries& queries, int64_t split, const Partial& to, float* page_sums) {
    SplitScan<T, P> scan(call, queries, split, to, page_sums);
    scan.run();
    for (int i = 0; i < queries.count; i++) to.sum[i] = scan.sum(i);
}

/// The factor that turns weights relative to shift `from` into weights relative to shift `to`.
F16 rescale(float from, float to) { return exp2(set1(from - to)); }

void merge(const Attention& call, int count, const Partial& into, const Partial& next) {
    const int dim = call.pages->dim;
    for (int i = 0; i < count; i++) {
        if (next.sum[i] == 0) continue;
        const float larger = into.shift[i] > next.shift[i] ? into.shift[i] : next.shift[i];
        const F16 a = rescale(into.shift[i], larger), b = rescale(next.shift[i], larger);
        float *acc = into.acc + i * dim, *added = next.acc + i * dim;
        for (int d = 0; d < dim; d += 16) store(acc + d, fma(load(added + d), b, load(acc + d) * a));
        store_n(into.sum + i, fma(set1(next.sum[i]), b, set1(into.sum[i]) * a), 1);
        into.shift[i] = larger;
    }
}

template <class T>
void finish(const Attention& call, const Queries& queries, const Partial& all) {
    const int dim = call.pages->dim;
    for (int i = 0; i < queries.count; i++) {
        T* to = const_cast<T*>(query<T>(call, call.out, queries, i));
        if (call.pages->hadamard) hadamard(all.acc + i * dim, dim);
        for (int d = 0; d < dim; d += 16) store(to + d, load(all.acc + i * dim + d) / set1(all.sum[i]));
    }
}

void add_mass(const Attention&, int count, const Partial& all, const Partial& split, const float* page_sums,
              float* mass, int pages) {
    for (int i = 0; i < count; i++) {
        const F16 factor = rescale(split.shift[i], all.shift[i]) / set1(all.sum[i]);
        const float* sums = page_sums + i * split_pages;
        for (int p = 0; p < pages; p += 16)
            store_n(mass + p, fma(load(sums + p), factor, load_n(mass + p, pages - p)), pages - p);
    }
}

}  // namespace

const AttentionKernels attention_bf16 = {scan<bf16>, merge, finish<bf16>, add_mass};
const AttentionKernels attention_f32 = {scan<float>, merge, finish<float>, add_mass};
const AttentionKernels attention_codes_bf16 = {scan<bf16, Code>, merge, finish<bf16>, add_mass};
const AttentionKernels attention_codes_f32 = {scan<float, Code>, merge, finish<float>, add_mass};

}  // namespace triforce::TF_LEVEL
