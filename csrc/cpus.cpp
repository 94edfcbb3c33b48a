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

/// The quota of one folder, in CPUs; INT_MAX without a limit. Values that cannot be read stay 0, including `max` of
/// version 2. Version 1 writes -1 for no limit.
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

/// The smallest quota of a group and of the groups above. A container may see its group's path as it is outside the
/// container, while its mount shows only the group itself. Folders that do not exist are therefore skipped.
int least_quota(const std::string& mount, std::string path, bool version_2) {
    if (path.find("/..") != std::string::npos) path.clear();  // the group is outside of the mount
    int quota = quota_of(mount, version_2);
    for (; !path.empty(); path.resize(path.rfind('/')))
        quota = std::min(quota, quota_of(mount + path, version_2));
    return quota;
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
    int quota = INT_MAX;
    std::ifstream groups(root + "/proc/self/cgroup");
    for (std::string line; std::getline(groups, line);) {  // number:controllers:/path
        const size_t first = line.find(':'), second = line.find(':', first + 1), slash = line.find('/', second);
        if (slash == std::string::npos || slash != second + 1) continue;
        const std::string controllers = line.substr(first + 1, second - first - 1), path = line.substr(slash);
        if (controllers.empty()) {
            for (const char* mount : {"", "/unified"}) quota = std::min(quota, least_quota(mounts + mount, path, true));
        } else if (("," + controllers + ",").find(",cpu,") != std::string::npos) {
            for (const std::string& mount : {controllers, std::string("cpu")})
                quota = std::min(quota, least_quota(mounts + "/" + mount, path, false));
        }
    }
    if (quota == INT_MAX) return {};
    return quota;
}

int usable_cpus() { return std::min(affinity(), cpu_quota().value_or(INT_MAX)); }

}  // namespace triforce
