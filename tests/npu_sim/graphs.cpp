// Capture, replay and task updates of the simulated device library.
#include <cstdio>

#include "device.hpp"

using namespace simulated;

static int live_graphs = 0;

EXPORTED aclError aclmdlRICaptureThreadExchangeMode(aclmdlRICaptureMode* mode) {
    int before = capture_mode;
    capture_mode = *mode;
    *mode = static_cast<aclmdlRICaptureMode>(before);
    return 0;
}

EXPORTED aclError aclmdlRICaptureBegin(aclrtStream handle, aclmdlRICaptureMode mode) {
    Stream* stream = stream_of(handle);
    if (stream->capture != nullptr) return fail(CAPTURE_MISUSED, "the stream is being captured already");
    if (live_graphs >= number_of("SIMULATED_CANN_GRAPHS", 1e9)) {
        return fail(OUT_OF_STREAMS, "Stream resources are insufficient.");
    }
    auto* graph = new Graph();
    graph->id = next_id();
    stream->is_origin = true;
    stream->error_mode = mode;
    stream->capturing_thread = std::this_thread::get_id();
    stream->capture = graph;
    count("capture");
    return 0;
}

EXPORTED aclError aclmdlRICaptureGetInfo(aclrtStream handle, aclmdlRICaptureStatus* status, aclmdlRI* graph) {
    auto* stream = static_cast<Stream*>(handle);
    Graph* capture = stream == nullptr ? nullptr : stream->capture;
    if (graph != nullptr) *graph = capture;
    *status = capture == nullptr ? ACL_MODEL_RI_CAPTURE_STATUS_NONE
              : capture->invalid ? ACL_MODEL_RI_CAPTURE_STATUS_INVALIDATED
                                 : ACL_MODEL_RI_CAPTURE_STATUS_ACTIVE;
    return 0;
}

EXPORTED aclError aclmdlRICaptureEnd(aclrtStream handle, aclmdlRI* graph) {
    Graph* capture = stream_of(handle)->capture;
    if (capture == nullptr) return fail(CAPTURE_MISUSED, "the stream is not being captured");
    {
        std::lock_guard<std::mutex> lock(mutex);
        for (Stream* stream : streams) {
            if (stream->capture == capture) {
                stream->capture = nullptr;
                stream->is_origin = false;
                stream->group = nullptr;
            }
        }
    }
    *graph = capture;
    if (capture->invalid) return fail(CAPTURE_INVALIDATED, "the capture was invalidated");
    live_graphs++;
    return 0;
}

EXPORTED aclError aclmdlRIGetId(aclmdlRI graph, uint32_t* id) {
    *id = static_cast<uint32_t>(static_cast<Graph*>(graph)->id);
    return 0;
}

EXPORTED aclError aclmdlRIExecuteAsync(aclmdlRI handle, aclrtStream stream) {
    auto* graph = static_cast<Graph*>(handle);
    return submit(stream, "execute", [graph](Stream* on) {
        size_t tasks = graph->tasks.size();
        for (size_t at = 0; at < tasks; at++) {
            Task task;
            {
                std::lock_guard<std::mutex> lock(mutex);
                task = graph->tasks[at];  // as it is now: an update may have replaced it since the launch
            }
            if (int error = task.run(on)) return error;
        }
        return 0;
    });
}

EXPORTED aclError aclmdlRIDestroy(aclmdlRI) {
    // The graph itself stays: a replay may still be queued.
    live_graphs--;
    count("destroy");
    return 0;
}

EXPORTED aclError aclmdlRICaptureTaskGrpBegin(aclrtStream handle) {
    Stream* stream = stream_of(handle);
    if (stream->capture == nullptr) return fail(TASK_GROUP_MISUSED, "a task group outside of a capture");
    if (stream->group != nullptr) return fail(TASK_GROUP_MISUSED, "a task group inside of another one");
    stream->group = new TaskGroup{stream->capture, stream->capture->tasks.size(), 0};
    return 0;
}

EXPORTED aclError aclmdlRICaptureTaskGrpEnd(aclrtStream handle, aclrtTaskGrp* group) {
    Stream* stream = stream_of(handle);
    if (stream->group == nullptr) return fail(TASK_GROUP_MISUSED, "no task group was begun");
    stream->group->last = stream->capture->tasks.size();
    *group = stream->group;
    stream->group = nullptr;
    return 0;
}

EXPORTED aclError aclmdlRICaptureTaskUpdateBegin(aclrtStream handle, aclrtTaskGrp group) {
    Stream* stream = stream_of(handle);
    if (stream->capture != nullptr) return fail(TASK_GROUP_MISUSED, "a task update on a stream that is being captured");
    if (stream->update != nullptr) return fail(TASK_GROUP_MISUSED, "a task update inside of another one");
    stream->update = static_cast<TaskGroup*>(group);
    stream->update_at = stream->update->first;
    count("task update");
    return 0;
}

EXPORTED aclError aclmdlRICaptureTaskUpdateEnd(aclrtStream handle) {
    Stream* stream = stream_of(handle);
    if (stream->update == nullptr) return fail(TASK_GROUP_MISUSED, "no task update was begun");
    bool is_whole = stream->update_at == stream->update->last;
    stream->update = nullptr;
    return is_whole ? 0 : fail(TASK_COUNT, "task update: fewer tasks than were captured");
}

EXPORTED aclError aclmdlRIDebugJsonPrint(aclmdlRI handle, const char* path, uint32_t) {
    FILE* file = fopen(path, "w");
    if (file == nullptr) return 1;
    const char* separator = "";
    fprintf(file, "[");
    for (const Task& task : static_cast<Graph*>(handle)->tasks) {
        fprintf(file, "%s{\"name\": \"%s\"}", separator, task.name.c_str());
        separator = ", ";
    }
    fprintf(file, "]\n");
    fclose(file);
    return 0;
}
