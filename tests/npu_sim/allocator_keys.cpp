// Lets torch_npu load beside a torch that was built for CUDA, on a machine without an accelerator: both register the
// same key of the allocator's configuration, which torch refuses. Here each caller has a set of its own.
#include <string>
#include <unordered_set>

namespace c10::CachingAllocator {

struct AcceleratorAllocatorConfig {
    static std::unordered_set<std::string>& getMutableKeys();
};

std::unordered_set<std::string>& AcceleratorAllocatorConfig::getMutableKeys() {
    return *new std::unordered_set<std::string>();
}

}  // namespace c10::CachingAllocator
