//! The CUDA driver, found at run time: launching the fill kernel, pointing a captured one at other memory, changing
//! graphs, and events.
//!
//! Nothing here needs CUDA to be built or loaded: the library is opened on first use, and its absence is an error.

mod graph;

use std::ffi::{c_int, c_uint, c_void};
use std::ptr;
use std::sync::OnceLock;

use libloading::Library;

use crate::error::DriverError;
use crate::table::{Entry, LAUNCH_ENTRIES};

/// The kernel's code, made from `kernels/fill.cu` by `kernels/make_ptx.py`; a C string.
const PTX: &str = concat!(include_str!("../kernels/fill.ptx"), "\0");

const THREADS: c_uint = 256;

/// The entries that the smaller form of the kernel takes; the other takes those of a launch.
const SMALL: usize = 16;

type Handle = *mut c_void;

/// `CUDA_KERNEL_NODE_PARAMS_v2`.
#[repr(C)]
struct KernelNode {
    function: Handle,
    grid: [c_uint; 3],
    block: [c_uint; 3],
    shared_bytes: c_uint,
    parameters: *mut Handle,
    extra: *mut Handle,
    kernel: Handle,
    context: Handle,
}

macro_rules! driver {
    ($($name:ident = $symbol:literal ($($argument:ty),*);)+) => {
        /// The functions that are used, by the driver's names for them.
        struct Driver {
            $($name: unsafe extern "C" fn($($argument),*) -> c_int,)+
            _library: Library,
        }

        impl Driver {
            fn open() -> Result<Self, DriverError> {
                let missing = |error: libloading::Error| DriverError::Missing(error.to_string());
                // SAFETY: the driver's initialisers are those that torch has run already, or harmless.
                let library = unsafe { Library::new("libcuda.so.1") }.map_err(missing)?;
                // SAFETY: the types are those of the driver's header, `cuda.h`, for these versions of the functions.
                unsafe {
                    Ok(Self {
                        $($name: *library.get(concat!($symbol, "\0").as_bytes()).map_err(missing)?,)+
                        _library: library,
                    })
                }
            }
        }
    };
}

driver! {
    get_device = "cuDeviceGet" (*mut c_int, c_int);
    retain_context = "cuDevicePrimaryCtxRetain" (*mut Handle, c_int);
    current_context = "cuCtxGetCurrent" (*mut Handle);
    push_context = "cuCtxPushCurrent_v2" (Handle);
    pop_context = "cuCtxPopCurrent_v2" (*mut Handle);
    load_module = "cuModuleLoadData" (*mut Handle, *const c_void);
    get_function = "cuModuleGetFunction" (*mut Handle, Handle, *const c_void);
    launch = "cuLaunchKernel" (
        Handle, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, Handle, *mut Handle, *mut Handle
    );
    graph_nodes = "cuGraphGetNodes" (Handle, *mut Handle, *mut usize);
    node_type = "cuGraphNodeGetType" (Handle, *mut c_int);
    node_parameters = "cuGraphKernelNodeGetParams_v2" (Handle, *mut KernelNode);
    set_node_parameters = "cuGraphExecKernelNodeSetParams_v2" (Handle, Handle, *const KernelNode);
    update_executable = "cuGraphExecUpdate_v2" (Handle, Handle, *mut graph::UpdateResult);
    memset_parameters = "cuGraphMemsetNodeGetParams" (Handle, *mut graph::MemsetNode);
    node_dependencies = "cuGraphNodeGetDependencies" (Handle, *mut Handle, *mut usize);
    node_dependents = "cuGraphNodeGetDependentNodes" (Handle, *mut Handle, *mut usize);
    add_kernel_node = "cuGraphAddKernelNode_v2" (*mut Handle, Handle, *const Handle, usize, *const KernelNode);
    add_dependencies = "cuGraphAddDependencies" (Handle, *const Handle, *const Handle, usize);
    destroy_node = "cuGraphDestroyNode" (Handle);
    pointer_attribute = "cuPointerGetAttribute" (*mut c_void, c_int, u64);
    create_event = "cuEventCreate" (*mut Handle, c_uint);
    record_event = "cuEventRecord" (Handle, Handle);
    query_event = "cuEventQuery" (Handle);
    wait_event = "cuEventSynchronize" (Handle);
    destroy_event = "cuEventDestroy_v2" (Handle);
}

/// A handle that torch, or a caller, gave as a number.
#[expect(clippy::cast_possible_truncation, reason = "handles are addresses of this machine")]
fn handle(number: u64) -> Handle {
    number as usize as Handle
}

const NOT_READY: c_int = 600;
const WITHOUT_TIMING: c_uint = 2;

fn driver() -> Result<&'static Driver, DriverError> {
    static DRIVER: OnceLock<Result<Driver, DriverError>> = OnceLock::new();
    DRIVER.get_or_init(Driver::open).as_ref().map_err(Clone::clone)
}

fn check(call: &'static str, code: c_int) -> Result<(), DriverError> {
    if code == 0 { Ok(()) } else { Err(DriverError::Failed { call, code }) }
}

/// What the kernel takes, as `struct Table` in `kernels/fill.cu`.
#[repr(C)]
struct Parameters<const N: usize> {
    count: u32,
    blocks: u32,
    entries: [Entry; N],
}

impl<const N: usize> Parameters<N> {
    fn new(entries: &[Entry], blocks: u32) -> Self {
        let mut table = Self { count: 0, blocks, entries: [Entry::default(); N] };
        for (place, entry) in table.entries.iter_mut().zip(entries) {
            *place = *entry;
            table.count += 1;
        }
        table
    }
}

/// A CUDA device as its primary context and the kernels loaded into it. They stay for the life of the process.
pub(crate) struct Device {
    driver: &'static Driver,
    ordinal: c_int,
    context: Handle,
    small: Handle,
    large: Handle,
    set: Handle,
}

// SAFETY: the driver's handles may be used from any thread, and what a `Device` holds never changes.
unsafe impl Send for Device {}
// SAFETY: as above.
unsafe impl Sync for Device {}

impl Device {
    /// The device of that number, as torch counts: its context and the kernel in it.
    ///
    /// # Errors
    /// No driver, one that is too old, or one that cannot load the kernel for this device.
    pub(crate) fn open(index: i32) -> Result<Self, DriverError> {
        let driver = driver()?;
        let (mut ordinal, mut context, mut module) = (0, ptr::null_mut(), ptr::null_mut());
        // SAFETY: each call writes the one value that it is given a place for.
        unsafe {
            check("cuDeviceGet", (driver.get_device)(&raw mut ordinal, index))?;
            check("cuDevicePrimaryCtxRetain", (driver.retain_context)(&raw mut context, ordinal))?;
        }
        let none = ptr::null_mut();
        let mut device = Self { driver, ordinal, context, small: none, large: none, set: none };
        let [small, large, set] = device.inside(|| {
            let mut kernels = [none; 3];
            let names = [c"devicegraph_fill_small", c"devicegraph_fill_large", c"devicegraph_set"];
            // SAFETY: the code and the names are C strings; each call writes one handle.
            unsafe {
                check("cuModuleLoadData", (driver.load_module)(&raw mut module, PTX.as_ptr().cast()))?;
                for (kernel, name) in kernels.iter_mut().zip(names) {
                    check("cuModuleGetFunction", (driver.get_function)(kernel, module, name.as_ptr().cast()))?;
                }
            }
            Ok(kernels)
        })?;
        (device.small, device.large, device.set) = (small, large, set);
        Ok(device)
    }

    /// Calls with the device's context current, whatever is current outside: in a thread that has not used the device
    /// yet, nothing is, and some calls of the driver then fail without saying so.
    fn inside<T>(&self, call: impl FnOnce() -> Result<T, DriverError>) -> Result<T, DriverError> {
        let driver = self.driver;
        let mut current = ptr::null_mut();
        // SAFETY: writes one handle.
        check("cuCtxGetCurrent", unsafe { (driver.current_context)(&raw mut current) })?;
        if current == self.context {
            return call();
        }
        // SAFETY: the context is retained; what is pushed is popped below.
        check("cuCtxPushCurrent", unsafe { (driver.push_context)(self.context) })?;
        let result = call();
        // SAFETY: writes one handle.
        check("cuCtxPopCurrent", unsafe { (driver.pop_context)(&raw mut current) })?;
        result
    }

    /// Hands a kernel, its grid, and its parameters for a table to a call.
    fn with_kernel<T>(&self, entries: &[Entry], blocks: u32, call: impl FnOnce(Handle, u32, *mut Handle) -> T) -> T {
        let grid = blocks.max(1);
        if entries.len() <= SMALL {
            let mut table = Parameters::<SMALL>::new(entries, blocks);
            call(self.small, grid, [(&raw mut table).cast()].as_mut_ptr())
        } else {
            let mut table = Parameters::<LAUNCH_ENTRIES>::new(entries, blocks);
            call(self.large, grid, [(&raw mut table).cast()].as_mut_ptr())
        }
    }

    /// Queues a table of at most [`LAUNCH_ENTRIES`] entries on a stream.
    pub(crate) fn launch(&self, stream: u64, entries: &[Entry], blocks: u32) -> Result<(), DriverError> {
        self.inside(|| {
            self.with_kernel(entries, blocks, |kernel, grid, parameters| {
                let (stream, none) = (handle(stream), ptr::null_mut());
                // SAFETY: the kernel takes one table, which the driver copies before the call returns.
                let code =
                    unsafe { (self.driver.launch)(kernel, grid, 1, 1, THREADS, 1, 1, 0, stream, parameters, none) };
                check("cuLaunchKernel", code)
            })
        })
    }

    fn node(&self, function: Handle, grid: [c_uint; 3], parameters: *mut Handle) -> KernelNode {
        KernelNode {
            function,
            grid,
            block: [THREADS, 1, 1],
            shared_bytes: 0,
            parameters,
            extra: ptr::null_mut(),
            kernel: ptr::null_mut(),
            context: self.context,
        }
    }

    /// Makes a node of an executable carry out another table from its next launch on. Launches in flight keep theirs.
    pub(crate) fn point(&self, executable: u64, node: u64, entries: &[Entry], blocks: u32) -> Result<(), DriverError> {
        self.inside(|| {
            self.with_kernel(entries, blocks, |kernel, grid, parameters| {
                let node_parameters = self.node(kernel, [grid, 1, 1], parameters);
                let (executable, node) = (handle(executable), handle(node));
                // SAFETY: the kernel takes one table, which the driver copies before the call returns.
                let code = unsafe { (self.driver.set_node_parameters)(executable, node, &raw const node_parameters) };
                check("cuGraphExecKernelNodeSetParams", code)
            })
        })
    }

    /// An event to tell when work on a stream is done.
    pub(crate) fn event(&self) -> Result<u64, DriverError> {
        self.inside(|| {
            let mut event = ptr::null_mut();
            // SAFETY: writes one handle.
            check("cuEventCreate", unsafe { (self.driver.create_event)(&raw mut event, WITHOUT_TIMING) })?;
            Ok(event as u64)
        })
    }

    /// Marks the work queued on a stream so far.
    pub(crate) fn record(&self, event: u64, stream: u64) -> Result<(), DriverError> {
        // SAFETY: both handles are live: the event is the caller's, the stream torch's.
        self.inside(|| check("cuEventRecord", unsafe { (self.driver.record_event)(handle(event), handle(stream)) }))
    }

    /// Whether the work that an event marks is done.
    pub(crate) fn is_done(&self, event: u64) -> Result<bool, DriverError> {
        // SAFETY: the event is the caller's.
        self.inside(|| match unsafe { (self.driver.query_event)(handle(event)) } {
            NOT_READY => Ok(false),
            code => check("cuEventQuery", code).map(|()| true),
        })
    }

    /// Waits for the work that an event marks.
    pub(crate) fn wait(&self, event: u64) -> Result<(), DriverError> {
        // SAFETY: the event is the caller's.
        self.inside(|| check("cuEventSynchronize", unsafe { (self.driver.wait_event)(handle(event)) }))
    }

    /// Gives an event back.
    pub(crate) fn destroy(&self, event: u64) {
        // SAFETY: the event is the caller's, who does not use it again. There is nobody to tell of a failure.
        drop(self.inside(|| check("cuEventDestroy", unsafe { (self.driver.destroy_event)(handle(event)) })));
    }
}
