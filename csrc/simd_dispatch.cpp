#include "simd_dispatch.hpp"

#include <atomic>
#include <cstring>
#include <stdexcept>
#include <string>

namespace triforce {
namespace {

#define TF_NAME(name, ...) #name,
const char* const names[] = {TF_LEVELS(TF_NAME, )};
#undef TF_NAME

#define TF_NEED(feature) \
    if (!__builtin_cpu_supports(feature)) return feature

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
    if (!std::strcmp(level, "avx2")) {
        TF_NEED("avx2");
        TF_NEED("fma");
    }
#endif
    (void)level;
    return nullptr;
}
#undef TF_NEED

std::vector<Available> probe() {
    std::vector<Available> found;
    for (const char* name : names) found.push_back({static_cast<Level>(found.size()), missing_for(name)});
    return found;
}

Level best() {
    Level level{};
    for (const Available& each : levels())
        if (!each.missing) level = each.level;
    return level;
}

std::atomic<Level>& in_use() {
    static std::atomic<Level> level{best()};
    return level;
}

}  // namespace

const char* name_of(Level level) { return names[static_cast<int>(level)]; }

const std::vector<Available>& levels() {
    static const std::vector<Available> found = probe();
    return found;
}

Level level() { return in_use().load(std::memory_order_relaxed); }

void use(const char* name) {
    std::string known;
    for (const Available& each : levels()) {
        if (!std::strcmp(name, name_of(each.level))) {
            if (each.missing)
                throw std::invalid_argument(std::string(name) + " needs " + each.missing + ", which this CPU has not");
            in_use() = each.level;
            return;
        }
        known += std::string(known.empty() ? "" : ", ") + name_of(each.level);
    }
    throw std::invalid_argument(std::string(name) + " is not among the levels compiled in, which are " + known);
}

}  // namespace triforce
