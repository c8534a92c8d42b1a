// Devices, memory, streams and events of the simulated device library.
#include <sys/mman.h>

#include <chrono>
#include <cstdlib>
#include <cstring>

#include "device.hpp"

using namespace simulated;

static thread_local int current_device = 0;
// A context is known by its device; null means none.
constexpr uintptr_t FIRST_CONTEXT = 0x100;
constexpr size_t DEVICE_BYTES = size_t{8} << 30;

EXPORTED aclError aclInit(const char*) {
    return 0;
}
EXPORTED aclError aclFinalize() {
    return 0;
}
EXPORTED aclError aclsysGetVersionStr(char*, char* version) {
    strcpy(version, "9.1.0");
    return 0;
}
EXPORTED aclError aclsysGetCANNVersion(aclCANNPackageName, aclCANNPackageVersion* version) {
    memset(version, 0, sizeof *version);
    strcpy(version->version, "9.1.0");
    strcpy(version->majorVersion, "9");
    strcpy(version->minorVersion, "1");
    strcpy(version->releaseVersion, "0");
    return 0;
}
EXPORTED const char* aclrtGetSocName() {
    return "Ascend910B1";
}
EXPORTED aclError aclGetDeviceCapability(uint32_t, aclDeviceInfo, int64_t* value) {
    *value = 24;
    return 0;
}
EXPORTED aclError aclrtGetDeviceInfo(uint32_t, aclrtDevAttr, int64_t* value) {
    *value = 24;
    return 0;
}
EXPORTED aclError aclGetCannAttribute(aclCannAttr, int32_t* value) {
    *value = 1;
    return 0;
}
EXPORTED aclError aclrtGetSysParamOpt(aclSysParamOpt, int64_t* value) {
    *value = 0;
    return 0;
}

// Devices.

EXPORTED aclError aclrtGetDeviceCount(uint32_t* devices) {
    *devices = static_cast<uint32_t>(number_of("SIMULATED_CANN_DEVICES", 1));
    return 0;
}
EXPORTED aclError aclrtSetDevice(int32_t device) {
    current_device = device;
    return 0;
}
EXPORTED aclError aclrtGetDevice(int32_t* device) {
    *device = current_device;
    return 0;
}
EXPORTED aclError aclrtGetCurrentContext(aclrtContext* context) {
    *context = reinterpret_cast<void*>(FIRST_CONTEXT + static_cast<uintptr_t>(current_device));
    return 0;
}
EXPORTED aclError aclrtSetCurrentContext(aclrtContext context) {
    current_device = static_cast<int>(reinterpret_cast<uintptr_t>(context) - FIRST_CONTEXT);
    return 0;
}
EXPORTED aclError aclrtGetPrimaryCtxState(int32_t, uint32_t* flags, int32_t* is_active) {
    if (flags != nullptr) *flags = 0;
    if (is_active != nullptr) *is_active = 1;
    return 0;
}
EXPORTED aclError aclrtGetMemInfo(aclrtMemAttr, size_t* free_bytes, size_t* total_bytes) {
    *free_bytes = *total_bytes = DEVICE_BYTES;
    return 0;
}

// Memory.

static aclError allocate(void** pointer, size_t size) {
    return posix_memalign(pointer, 512, size == 0 ? 1 : size) == 0 ? 0 : OUT_OF_MEMORY;
}
EXPORTED aclError aclrtMalloc(void** pointer, size_t size, aclrtMemMallocPolicy) {
    count("aclrtMalloc");
    return allocate(pointer, size);
}
EXPORTED aclError aclrtMallocAlign32(void** pointer, size_t size, aclrtMemMallocPolicy policy) {
    return aclrtMalloc(pointer, size, policy);
}
EXPORTED aclError aclrtFree(void* pointer) {
    count("aclrtFree");
    free(pointer);
    return 0;
}
EXPORTED aclError aclrtMallocHost(void** pointer, size_t size) {
    return allocate(pointer, size);
}
EXPORTED aclError aclrtMallocHostWithCfg(void** pointer, uint64_t size, aclrtMallocConfig*) {
    return allocate(pointer, size);
}
EXPORTED aclError aclrtFreeHost(void* pointer) {
    free(pointer);
    return 0;
}
EXPORTED aclError aclrtReserveMemAddress(void** pointer, size_t size, size_t, void*, uint64_t) {
    void* memory = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) return OUT_OF_MEMORY;
    *pointer = memory;
    return 0;
}
EXPORTED aclError aclrtReleaseMemAddress(void*) {
    return 0;
}
EXPORTED aclError aclrtMallocPhysical(aclrtDrvMemHandle* handle, size_t, const aclrtPhysicalMemProp*, uint64_t) {
    *handle = static_cast<aclrtDrvMemHandle>(malloc(1));
    return 0;
}
EXPORTED aclError aclrtFreePhysical(aclrtDrvMemHandle handle) {
    free(handle);
    return 0;
}
EXPORTED aclError aclrtMapMem(void*, size_t, size_t, aclrtDrvMemHandle, uint64_t) {
    return 0;
}
EXPORTED aclError aclrtUnmapMem(void*) {
    return 0;
}
EXPORTED aclError aclrtPointerGetAttributes(const void*, aclrtPtrAttributes* attributes) {
    memset(attributes, 0, sizeof *attributes);
    return 0;
}
EXPORTED aclError aclrtMemcpy(void* to, size_t, const void* from, size_t size, aclrtMemcpyKind) {
    if (breaks_a_capture()) return fail(REFUSED_IN_CAPTURE, "a synchronous copy while a capture is under way");
    memcpy(to, from, size);
    return 0;
}
EXPORTED aclError aclrtMemcpyAsync(void* to, size_t, const void* from, size_t size, aclrtMemcpyKind,
                                   aclrtStream stream) {
    return submit(stream, "memcpy", [=](Stream*) {
        memmove(to, from, size);
        return 0;
    });
}
EXPORTED aclError aclrtMemcpyAsyncWithCondition(void* to, size_t room, const void* from, size_t size,
                                                aclrtMemcpyKind kind, aclrtStream stream) {
    return aclrtMemcpyAsync(to, room, from, size, kind, stream);
}
EXPORTED aclError aclrtMemset(void* to, size_t, int32_t value, size_t size) {
    memset(to, value, size);
    return 0;
}
EXPORTED aclError aclrtMemsetAsync(void* to, size_t, int32_t value, size_t size, aclrtStream stream) {
    return submit(stream, "memset", [=](Stream*) {
        memset(to, value, size);
        return 0;
    });
}

// Streams.

EXPORTED aclError aclrtCreateStream(aclrtStream* stream) {
    *stream = new Stream();
    return 0;
}
EXPORTED aclError aclrtCreateStreamWithConfig(aclrtStream* stream, uint32_t, uint32_t) {
    return aclrtCreateStream(stream);
}
EXPORTED aclError aclrtDestroyStream(aclrtStream) {
    return 0;
}
EXPORTED aclError aclrtDestroyStreamForce(aclrtStream) {
    return 0;
}
EXPORTED aclError aclrtSynchronizeStream(aclrtStream handle) {
    Stream* stream = stream_of(handle);
    if (stream->capture != nullptr) {
        stream->capture->invalid = true;
        return fail(REFUSED_IN_CAPTURE, "a wait for a stream that is being captured");
    }
    if (breaks_a_capture()) return fail(REFUSED_IN_CAPTURE, "a wait for a stream while a capture is under way");
    return stream->drain();
}
EXPORTED aclError aclrtSynchronizeStreamWithTimeout(aclrtStream stream, int32_t) {
    return aclrtSynchronizeStream(stream);
}
EXPORTED aclError aclrtSynchronizeDevice() {
    if (breaks_a_capture()) return fail(REFUSED_IN_CAPTURE, "a wait for the device while a capture is under way");
    std::vector<Stream*> all;
    {
        std::lock_guard<std::mutex> lock(mutex);
        all = streams;
    }
    int error = 0;
    for (Stream* stream : all) {
        if (int result = stream->drain()) error = result;
    }
    return error;
}
EXPORTED aclError aclrtSynchronizeDeviceWithTimeout(int32_t) {
    return aclrtSynchronizeDevice();
}
EXPORTED aclError aclrtStreamQuery(aclrtStream stream, aclrtStreamStatus* status) {
    *status = stream_of(stream)->is_idle() ? ACL_STREAM_STATUS_COMPLETE : ACL_STREAM_STATUS_NOT_READY;
    return 0;
}
EXPORTED aclError aclrtStreamGetId(aclrtStream stream, int32_t* id) {
    *id = stream_of(stream)->id;
    return 0;
}
EXPORTED aclError aclrtLaunchHostFunc(aclrtStream stream, aclrtHostFunc function, void* argument) {
    return submit(stream, "host function", [=](Stream*) {
        function(argument);
        return 0;
    });
}

// Events.

EXPORTED aclError aclrtCreateEventExWithFlag(aclrtEvent* handle, uint32_t flag) {
    auto* event = new Event();
    event->flag = flag;
    *handle = event;
    return 0;
}
EXPORTED aclError aclrtCreateEventWithFlag(aclrtEvent* handle, uint32_t flag) {
    return aclrtCreateEventExWithFlag(handle, flag);
}
EXPORTED aclError aclrtDestroyEvent(aclrtEvent) {
    return 0;
}
EXPORTED aclError aclrtRecordEvent(aclrtEvent handle, aclrtStream stream) {
    auto* event = static_cast<Event*>(handle);
    if (stream_of(stream)->capture != nullptr && event->flag != ACL_EVENT_EXTERNAL) {
        event->capture = stream_of(stream)->capture;  // orders streams inside the capture, and is no task of it
        return 0;
    }
    event->capture = nullptr;
    long number = ++event->issued;
    return submit(stream, "event record", [event, number](Stream*) {
        {
            std::lock_guard<std::mutex> lock(mutex);
            event->time = std::chrono::steady_clock::now();
            event->done = number;
        }
        changed.notify_all();
        return 0;
    });
}
EXPORTED aclError aclrtStreamWaitEvent(aclrtStream handle, aclrtEvent event_handle) {
    auto* event = static_cast<Event*>(event_handle);
    Stream* stream = stream_of(handle);
    if (event->capture != nullptr) {
        if (stream->capture == nullptr) {
            stream->capture = event->capture;  // who waits for a capture takes part in it
            stream->is_origin = false;
        }
        return 0;
    }
    if (event->flag == ACL_EVENT_EXTERNAL) {
        return submit(handle, "external event wait", [event](Stream*) {
            return wait_until([event] { return event->done > 0; }, "an external event was never recorded");
        });
    }
    if (stream->capture != nullptr && event->issued > 0) {
        stream->capture->invalid = true;
        return fail(FOREIGN_EVENT, "a captured wait for an event from outside of the capture");
    }
    long number = event->issued;
    return submit(handle, "event wait", [event, number](Stream*) {
        return wait_until([event, number] { return event->done >= number; }, "an event was never recorded");
    });
}
EXPORTED aclError aclrtResetEvent(aclrtEvent handle, aclrtStream stream) {
    auto* event = static_cast<Event*>(handle);
    return submit(stream, "event reset", [event](Stream*) {
        std::lock_guard<std::mutex> lock(mutex);
        event->done = 0;
        return 0;
    });
}
EXPORTED aclError aclrtSynchronizeEvent(aclrtEvent handle) {
    auto* event = static_cast<Event*>(handle);
    if (breaks_a_capture()) return fail(REFUSED_IN_CAPTURE, "a wait for an event while a capture is under way");
    long number = event->issued;
    return wait_until([event, number] { return event->done >= number; }, "a wait for an event");
}
EXPORTED aclError aclrtQueryEventStatus(aclrtEvent handle, aclrtEventRecordedStatus* status) {
    auto* event = static_cast<Event*>(handle);
    bool is_done = event->done >= event->issued;
    *status = is_done ? ACL_EVENT_RECORDED_STATUS_COMPLETE : ACL_EVENT_RECORDED_STATUS_NOT_READY;
    return 0;
}
EXPORTED aclError aclrtEventElapsedTime(float* milliseconds, aclrtEvent begin, aclrtEvent end) {
    auto elapsed = static_cast<Event*>(end)->time - static_cast<Event*>(begin)->time;
    *milliseconds = std::chrono::duration<float, std::milli>(elapsed).count();
    return 0;
}

// What torch_npu builds its external events on, where the library has it.

EXPORTED aclError aclrtValueWrite(void* address, uint64_t value, uint32_t, aclrtStream stream) {
    return submit(stream, "value write", [=](Stream*) {
        {
            std::lock_guard<std::mutex> lock(mutex);
            *static_cast<uint64_t*>(address) = value;
        }
        changed.notify_all();
        return 0;
    });
}
EXPORTED aclError aclrtValueWait(void* address, uint64_t value, uint32_t, aclrtStream stream) {
    return submit(stream, "value wait", [=](Stream*) {
        return wait_until([=] { return *static_cast<uint64_t*>(address) == value; },
                          "a graph waits for an update that nobody made");
    });
}
