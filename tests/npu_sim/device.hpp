// What the simulated device is made of: memory of the host, a thread for each stream, and graphs that are lists of
// tasks.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "acl/acl.h"

#define EXPORTED extern "C" __attribute__((visibility("default")))

namespace simulated {

struct Stream;
struct Graph;

// Error numbers are this simulation's own but for the two that callers look for; nothing is to depend on the others.
constexpr int OUT_OF_MEMORY = 207001;
constexpr int OUT_OF_STREAMS = 207008;
constexpr int REFUSED_IN_CAPTURE = 107027;
constexpr int FOREIGN_EVENT = 107028;
constexpr int CAPTURE_INVALIDATED = 107029;
constexpr int CAPTURE_MISUSED = 107025;
constexpr int TASK_GROUP_MISUSED = 107031;
constexpr int TASK_COUNT = 507018;
constexpr int HANGS = 507014;

struct Task {
    std::string name;
    std::function<int(Stream*)> run;
};

// A span of a graph's tasks that can be replaced.
struct TaskGroup {
    Graph* graph;
    size_t first = 0;
    size_t last = 0;
};

struct Graph {
    std::vector<Task> tasks;
    int id = 0;
    bool invalid = false;
};

struct Event {
    uint32_t flag = 0;
    std::atomic<long> issued{0};
    std::atomic<long> done{0};
    std::chrono::steady_clock::time_point time;
    // The capture that the event was recorded in, where it was.
    Graph* capture = nullptr;
};

struct Stream {
    int id;
    // The capture that the stream takes part in, and whether it is the one that it began on.
    Graph* capture = nullptr;
    bool is_origin = false;
    int error_mode = 0;
    std::thread::id capturing_thread;
    TaskGroup* group = nullptr;
    // The group that is being updated, and which of its tasks comes next.
    TaskGroup* update = nullptr;
    size_t update_at = 0;

    Stream();
    void push(Task task);
    // Waits for what was pushed, and takes the first error of it.
    int drain();
    bool is_idle();

private:
    std::deque<Task> queue_;
    std::mutex mutex_;
    std::condition_variable changed_;
    bool busy_ = false;
    bool started_ = false;
    int error_ = 0;

    void loop();
};

// Guards all that is shared: streams, graphs, events, the last error.
extern std::mutex mutex;
extern std::condition_variable changed;
extern std::vector<Stream*> streams;
extern thread_local int capture_mode;

int next_id();
Stream* stream_of(aclrtStream stream);
// Notes an error for `aclGetRecentErrMsg`, and returns its number.
int fail(int code, const std::string& message);
// Counts a call; `simulated_count` gives the count.
void count(const char* name);
// Runs a task on a stream, or records it, or puts it in the place of one that was recorded.
int submit(aclrtStream stream, const char* name, std::function<int(Stream*)> run);
// Whether a call that waits is unsafe now because of a capture, which it invalidates.
bool breaks_a_capture();
// Waits on a stream's thread. A device would wait for ever: here it ends after a while, with an error.
int wait_until(const std::function<bool()>& holds, const char* what);
double number_of(const char* variable, double fallback);

}  // namespace simulated
