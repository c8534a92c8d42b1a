#include "device.hpp"

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <map>

namespace simulated {

std::mutex mutex;
std::condition_variable changed;
std::vector<Stream*> streams;
thread_local int capture_mode = 0;

namespace {
std::string last_error;
std::map<std::string, long> counts;
std::atomic<double> hang_limit{60};
bool is_held = false;
}  // namespace

double number_of(const char* variable, double fallback) {
    const char* text = getenv(variable);
    return text == nullptr ? fallback : atof(text);
}

int next_id() {
    static std::atomic<int> ids{1};
    return ids++;
}

int fail(int code, const std::string& message) {
    std::lock_guard<std::mutex> lock(mutex);
    last_error = message;
    return code;
}

void count(const char* name) {
    std::lock_guard<std::mutex> lock(mutex);
    counts[name]++;
}

Stream::Stream() : id(next_id()) {
    std::lock_guard<std::mutex> lock(mutex);
    streams.push_back(this);
}

void Stream::loop() {
    for (;;) {
        Task task;
        {
            std::unique_lock<std::mutex> lock(mutex_);
            changed_.wait(lock, [this] { return !queue_.empty(); });
            task = std::move(queue_.front());
            queue_.pop_front();
            busy_ = true;
        }
        int result = task.run(this);
        {
            std::lock_guard<std::mutex> lock(mutex_);
            if (result != 0 && error_ == 0) error_ = result;
            busy_ = false;
        }
        changed_.notify_all();
    }
}

void Stream::push(Task task) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!started_) {
        started_ = true;
        std::thread([this] { loop(); }).detach();
    }
    queue_.push_back(std::move(task));
    changed_.notify_all();
}

int Stream::drain() {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [this] { return queue_.empty() && !busy_; });
    int error = error_;
    error_ = 0;
    return error;
}

bool Stream::is_idle() {
    std::lock_guard<std::mutex> lock(mutex_);
    return queue_.empty() && !busy_;
}

Stream* stream_of(aclrtStream stream) {
    static Stream* const default_stream = new Stream();
    return stream == nullptr ? default_stream : static_cast<Stream*>(stream);
}

int submit(aclrtStream handle, const char* name, std::function<int(Stream*)> run) {
    Stream* stream = stream_of(handle);
    count(name);
    if (stream->update != nullptr) {
        TaskGroup* group = stream->update;
        if (stream->update_at >= group->last) return fail(TASK_COUNT, "task update: more tasks than were captured");
        size_t at = stream->update_at++;
        auto replace = [group, at, task = Task{name, std::move(run)}](Stream*) {
            std::lock_guard<std::mutex> lock(mutex);
            group->graph->tasks[at] = task;
            return 0;
        };
        // Whether a device replaces the task at once or in the order of the stream is not public: both can be had.
        static const bool in_order = getenv("SIMULATED_CANN_ORDERED_UPDATES") != nullptr;
        if (!in_order) return replace(stream);
        stream->push({"task update", replace});
        return 0;
    }
    if (stream->capture != nullptr) {
        std::lock_guard<std::mutex> lock(mutex);
        stream->capture->tasks.push_back({name, std::move(run)});
        return 0;
    }
    stream->push({name, std::move(run)});
    return 0;
}

bool breaks_a_capture() {
    constexpr int GLOBAL = 0, THREAD_LOCAL = 1, RELAXED = 2;
    if (capture_mode == RELAXED) return false;
    std::lock_guard<std::mutex> lock(mutex);
    for (Stream* stream : streams) {
        if (stream->capture == nullptr || !stream->is_origin) continue;
        bool is_own = stream->capturing_thread == std::this_thread::get_id();
        if (stream->error_mode == GLOBAL || (stream->error_mode == THREAD_LOCAL && is_own)) {
            stream->capture->invalid = true;
            return true;
        }
    }
    return false;
}

int wait_until(const std::function<bool()>& holds, const char* what) {
    std::unique_lock<std::mutex> lock(mutex);
    if (changed.wait_for(lock, std::chrono::duration<double>(hang_limit.load()), holds)) return 0;
    counts["hang"]++;
    last_error = std::string("the simulated device hangs: ") + what;
    fprintf(stderr, "%s\n", last_error.c_str());
    return HANGS;
}

}  // namespace simulated

EXPORTED const char* aclGetRecentErrMsg() {
    static thread_local std::string text;
    std::lock_guard<std::mutex> lock(simulated::mutex);
    text = simulated::last_error;
    return text.c_str();
}

// How often something was called or happened, for tests: "execute", "aclrtMalloc", "hang" and so on.
EXPORTED long simulated_count(const char* name) {
    std::lock_guard<std::mutex> lock(simulated::mutex);
    return simulated::counts[name];
}

// `submit` for the operator library.
EXPORTED int simulated_submit(void* stream, const char* name, int (*function)(void*), void* argument) {
    return simulated::submit(stream, name, [=](simulated::Stream*) { return function(argument); });
}

// After how many seconds a wait for what nobody does ends; returns the limit from before.
EXPORTED double simulated_hang_limit(double seconds) {
    return simulated::hang_limit.exchange(seconds);
}

// Keeps a stream busy until `simulated_release`.
EXPORTED void simulated_hold(void* stream) {
    {
        std::lock_guard<std::mutex> lock(simulated::mutex);
        simulated::is_held = true;
    }
    simulated::stream_of(stream)->push({"hold", [](simulated::Stream*) {
                                            std::unique_lock<std::mutex> held(simulated::mutex);
                                            simulated::changed.wait(held, [] { return !simulated::is_held; });
                                            return 0;
                                        }});
}

EXPORTED void simulated_release() {
    {
        std::lock_guard<std::mutex> lock(simulated::mutex);
        simulated::is_held = false;
    }
    simulated::changed.notify_all();
}
