// The number of CPUs that this process may use.
#pragma once

#include <optional>
#include <string>

namespace triforce {

/// CPU quota of this process's control groups (versions 1 and 2), in CPUs, rounded up: the smallest quota of its group
/// and of the groups above. None without a limit that can be read. `root`: folder of /proc and /sys.
std::optional<int> cpu_quota(const std::string& root = "");

/// The CPUs of this process's affinity, or its CPU quota, if smaller. At least 1.
int usable_cpus();

}  // namespace triforce
