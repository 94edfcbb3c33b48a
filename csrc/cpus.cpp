#include "cpus.hpp"

#include <algorithm>
#include <climits>
#include <fstream>
#include <thread>

#if defined(__linux__)
#include <sched.h>
#endif

namespace triforce {
namespace {

/// The quota of one folder. What cannot be read stays 0, "max" of version 2 too; version 1 has -1 for no limit.
int quota_of(const std::string& folder, bool version_2) {
    long long time = 0, period = 0;
    if (version_2) {
        std::ifstream(folder + "/cpu.max") >> time >> period;
    } else {
        std::ifstream(folder + "/cpu.cfs_quota_us") >> time;
        std::ifstream(folder + "/cpu.cfs_period_us") >> period;
    }
    if (time <= 0 || period <= 0) return INT_MAX;
    return static_cast<int>(std::min<long long>((time - 1) / period + 1, INT_MAX));
}

/// The least quota of a group and those above it. A container may see the path that its group has outside, and only
/// the group itself where the topmost one is mounted: so folders that do not exist are passed over.
int least_quota(const std::string& mount, std::string path, bool version_2) {
    if (path.find("/..") != std::string::npos) path.clear();  // outside of what is mounted
    int least = quota_of(mount, version_2);
    for (; !path.empty(); path.resize(path.rfind('/')))
        least = std::min(least, quota_of(mount + path, version_2));
    return least;
}

int affinity() {
#if defined(__linux__)
    cpu_set_t set;
    if (!sched_getaffinity(0, sizeof set, &set)) return CPU_COUNT(&set);
#endif
    return std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
}

}  // namespace

std::optional<int> cpu_quota(const std::string& root) {
    const std::string mounts = root + "/sys/fs/cgroup";
    int least = INT_MAX;
    std::ifstream groups(root + "/proc/self/cgroup");
    for (std::string line; std::getline(groups, line);) {  // number:controllers:/path
        const size_t first = line.find(':'), second = line.find(':', first + 1), slash = line.find('/', second);
        if (slash == std::string::npos || slash != second + 1) continue;
        const std::string controllers = line.substr(first + 1, second - first - 1), path = line.substr(slash);
        if (controllers.empty()) {
            for (const char* mount : {"", "/unified"}) least = std::min(least, least_quota(mounts + mount, path, true));
        } else if (("," + controllers + ",").find(",cpu,") != std::string::npos) {
            for (const std::string& mount : {controllers, std::string("cpu")})
                least = std::min(least, least_quota(mounts + "/" + mount, path, false));
        }
    }
    if (least == INT_MAX) return {};
    return least;
}

int usable_cpus() { return std::min(affinity(), cpu_quota().value_or(INT_MAX)); }

}  // namespace triforce
