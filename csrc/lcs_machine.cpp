// Owns what the machine has left for this process: free memory and swap, cut to the limits of the cgroups it is in.
#include "lcs_internal.hpp"

#include <algorithm>
#include <fstream>
#include <string>

namespace lcs {

#if defined(__linux__)

namespace {

constexpr uint64_t UNKNOWN = UINT64_MAX;

// A line "<name> <number>[ kB]" of a /proc or cgroup file.
uint64_t read_number(const std::string & path, const std::string & name, uint64_t unit) {
    std::ifstream file(path);
    std::string   word;
    while (file >> word) {
        if (word == name) {
            uint64_t value = 0;
            return file >> value ? value * unit : UNKNOWN;
        }
        file.ignore(1 << 16, '\n');
    }
    return UNKNOWN;
}

uint64_t read_number(const std::string & path) {
    std::ifstream file(path);
    uint64_t      value = 0;
    return file >> value ? value : UNKNOWN; // "max" is no number
}

// The files of one version of cgroups.
struct cgroup_files {
    const char * root;
    const char * limit;
    const char * used;
    const char * cached; // the entry of memory.stat
};
constexpr cgroup_files V1 = {"/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_cache"};
constexpr cgroup_files V2 = {"/sys/fs/cgroup", "memory.max", "memory.current", "file"};

uint64_t left_in(const cgroup_files & files, const std::string & folder) {
    const uint64_t limit = read_number(folder + "/" + files.limit);
    const uint64_t used = read_number(folder + "/" + files.used);
    if (limit == UNKNOWN || used == UNKNOWN) {
        return UNKNOWN;
    }
    // Mapped weights count as used there, but the kernel takes them back before it kills.
    const uint64_t cached = read_number(folder + "/memory.stat", files.cached, 1);
    const uint64_t kept = used - std::min(used, cached == UNKNOWN ? 0 : cached);
    return limit - std::min(limit, kept);
}

// A limit binds every group below it: the least that the group and those above it leave. Where a container shows only
// its own part of the tree, that is what stands at the root.
uint64_t left_above(const cgroup_files & files, std::string group) {
    uint64_t left = left_in(files, files.root);
    while (group.size() > 1) {
        left = std::min(left, left_in(files, files.root + group));
        group.resize(group.rfind('/'));
    }
    return left;
}

// Lines "<id>:<controllers>:<path>"; version 2 has the id 0 and names no controller.
uint64_t left_in_cgroups() {
    std::ifstream file("/proc/self/cgroup");
    std::string   line;
    uint64_t      left = UNKNOWN;
    while (std::getline(file, line)) {
        const size_t first = line.find(':');
        const size_t second = first == std::string::npos ? first : line.find(':', first + 1);
        if (second == std::string::npos || second + 1 >= line.size() || line[second + 1] != '/') {
            continue;
        }
        const std::string controllers = "," + line.substr(first + 1, second - first - 1) + ",";
        const std::string group = line.substr(second + 1);
        if (controllers == ",,") {
            left = std::min(left, left_above(V2, group));
        } else if (controllers.find(",memory,") != std::string::npos) {
            left = std::min(left, left_above(V1, group));
        }
    }
    return left;
}

} // namespace

uint64_t available_memory_bytes() {
    const uint64_t free_ram = read_number("/proc/meminfo", "MemAvailable:", 1024);
    const uint64_t swap = read_number("/proc/meminfo", "SwapFree:", 1024);
    const uint64_t machine = free_ram == UNKNOWN ? UNKNOWN : free_ram + (swap == UNKNOWN ? 0 : swap);
    return std::min(machine, left_in_cgroups());
}

#else

uint64_t available_memory_bytes() {
    return UINT64_MAX;
}

#endif

} // namespace lcs

extern "C" uint64_t lcs_available_memory(void) {
    try {
        const uint64_t available = lcs::available_memory_bytes();
        return available == UINT64_MAX ? 0 : available;
    } catch (...) { // bad_alloc
        return 0;
    }
}
