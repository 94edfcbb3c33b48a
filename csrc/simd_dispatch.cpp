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

#if defined(__x86_64__)
// What CPUID reports, and the registers that the system saves (XCR0). __builtin_cpu_supports would do, but Zig's compiler
// links a table for it that is never filled.
struct CpuFeatures {
    unsigned leaf1_c = 0, leaf7_b = 0, leaf7_c = 0, leaf7_1_a = 0, saved = 0;
    CpuFeatures() {
        unsigned a, b, c, d;
        if (!__get_cpuid(1, &a, &b, &c, &d)) return;
        leaf1_c = c;
        const bool saves = c >> 27 & 1;
        if (saves) __asm__("xgetbv" : "=a"(saved), "=d"(d) : "c"(0));
        if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return;
        leaf7_b = b, leaf7_c = c;
        if (a >= 1 && __get_cpuid_count(7, 1, &a, &b, &c, &d)) leaf7_1_a = a;
    }
};
constexpr unsigned ymm = 0x6, zmm = 0xe6;
#endif

#define TF_NEED(feature, word, bit, registers) \
    if (!(cpu.word >> bit & 1) || (cpu.saved & registers) != registers) return feature

const char* missing_for(const char* level) {
#if defined(__x86_64__)
    static const CpuFeatures cpu;
    const bool bf16 = !std::strcmp(level, "avx512bf16"), vnni = bf16 || !std::strcmp(level, "avx512vnni");
    if (vnni || !std::strcmp(level, "avx512")) {
        TF_NEED("avx512f", leaf7_b, 16, zmm);
        TF_NEED("avx512bw", leaf7_b, 30, zmm);
        TF_NEED("avx512dq", leaf7_b, 17, zmm);
        TF_NEED("avx512vl", leaf7_b, 31, zmm);
        TF_NEED("fma", leaf1_c, 12, ymm);
        TF_NEED("f16c", leaf1_c, 29, ymm);
    }
    if (vnni) TF_NEED("avx512vnni", leaf7_c, 11, zmm);
    if (bf16) TF_NEED("avx512bf16", leaf7_1_a, 5, zmm);
    const bool avxvnni = !std::strcmp(level, "avxvnni");
    if (avxvnni || !std::strcmp(level, "avx2")) {
        TF_NEED("avx2", leaf7_b, 5, ymm);
        TF_NEED("fma", leaf1_c, 12, ymm);
        TF_NEED("f16c", leaf1_c, 29, ymm);
    }
    if (avxvnni) TF_NEED("avxvnni", leaf7_1_a, 4, ymm);
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
