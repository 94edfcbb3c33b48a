#include "simd_dispatch.hpp"

#include <atomic>
#include <cstring>
#include <iterator>
#include <stdexcept>
#include <string>

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace triforce {
namespace {

#define TF_NAME(name, ...) #name,
const char* const names[] = {TF_LEVELS(TF_NAME, )};
#undef TF_NAME

#define TF_NEED(feature) \
    if (!__builtin_cpu_supports(feature)) return feature

#if defined(__x86_64__)
// f16c and avxvnni have no name in __builtin_cpu_supports of older compilers.
bool has_f16c() {
    unsigned a, b, c, d;
    return __get_cpuid(1, &a, &b, &c, &d) && c >> 29 & 1;
}
bool has_avxvnni() {
    unsigned a, b, c, d;
    return __get_cpuid_count(7, 1, &a, &b, &c, &d) && a >> 4 & 1;
}
#endif

const char* missing_for(const char* level) {
#if defined(__x86_64__)
    const bool bf16 = !std::strcmp(level, "avx512bf16"), vnni = bf16 || !std::strcmp(level, "avx512vnni");
    if (vnni || !std::strcmp(level, "avx512")) {
        TF_NEED("avx512f");
        TF_NEED("avx512bw");
        TF_NEED("avx512dq");
        TF_NEED("avx512vl");
    }
    if (vnni) TF_NEED("avx512vnni");
    if (bf16) TF_NEED("avx512bf16");
    const bool avxvnni = !std::strcmp(level, "avxvnni");
    if (avxvnni || !std::strcmp(level, "avx2")) {
        TF_NEED("avx2");
        TF_NEED("fma");
        if (!has_f16c()) return "f16c";
    }
    if (avxvnni && !has_avxvnni()) return "avxvnni";
#endif
    (void)level;
    return nullptr;
}
#undef TF_NEED

std::atomic<int>& in_use() {
    static std::atomic<int> number = [] {
        int best = 0;
        for (int i = 0; i < static_cast<int>(std::size(names)); i++)
            if (!missing_for(names[i])) best = i;
        return best;
    }();
    return number;
}

}  // namespace

std::vector<const char*> usable_levels() {
    std::vector<const char*> usable;
    for (const char* name : names)
        if (!missing_for(name)) usable.push_back(name);
    return usable;
}

int level() { return in_use().load(std::memory_order_relaxed); }

const char* level_name() { return names[level()]; }

void use(const char* name) {
    std::string known;
    for (const char* const& each : names) {
        if (!std::strcmp(name, each)) {
            if (const char* missing = missing_for(name))
                throw std::invalid_argument(std::string(name) + " needs " + missing + ", which this CPU has not");
            in_use() = static_cast<int>(&each - names);
            return;
        }
        known += std::string(known.empty() ? "" : ", ") + each;
    }
    throw std::invalid_argument(std::string(name) + " is not among the levels compiled in, which are " + known);
}

}  // namespace triforce
