// The one place that says how many CPUs this process may use.
#pragma once

#include <optional>
#include <string>

namespace triforce {

/// CPUs' worth of time that the control groups of this process grant it, versions 1 and 2: the least of its own and
/// those above it, rounded up. None without a limit that can be read. `root` is where /proc and /sys lie.
std::optional<int> cpu_quota(const std::string& root = "");

/// The CPUs of this process's affinity, or its quota's where that is less. At least 1.
int usable_cpus();

}  // namespace triforce
