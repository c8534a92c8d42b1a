//! Looking into graphs that were captured, and changing them before they are made executable.

use std::ffi::{c_int, c_uint, c_void};
use std::ptr;

use super::{Device, Handle, THREADS, check, handle};
use crate::error::DriverError;

const KERNEL_NODE: c_int = 0;
const MEMSET_NODE: c_int = 2;
const ALLOCATION_NODE: c_int = 10;
const FREE_NODE: c_int = 11;

/// `CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL`.
const DEVICE_ORDINAL: c_int = 9;

/// Bytes that a thread writes at once, where the memory is aligned to them.
const WORD: usize = 16;

/// The blocks that write a memset: enough to keep any GPU's memory busy.
const MOST_BLOCKS: usize = 1024;

/// Larger memsets stay: the driver's own is the faster one there, and what it costs the host is nothing beside it.
const MOST_BYTES: usize = 16 << 20;

/// `CUgraphExecUpdateResultInfo`.
#[repr(C)]
pub(super) struct UpdateResult {
    result: c_int,
    node: Handle,
    from_node: Handle,
}

/// `CUDA_MEMSET_NODE_PARAMS`: rows of elements that all become `value`.
#[repr(C)]
#[derive(Default)]
pub(super) struct MemsetNode {
    dst: u64,
    pitch: usize,
    value: c_uint,
    element_size: c_uint,
    width: usize,
    height: usize,
}

impl MemsetNode {
    fn row_bytes(&self) -> usize {
        self.width * self.element_size as usize
    }

    fn bytes(&self) -> usize {
        self.row_bytes() * self.height
    }

    /// The element, repeated over eight bytes; None for an element of a size that the driver does not have.
    fn repeated(&self) -> Option<u64> {
        let value = u64::from(self.value);
        match self.element_size {
            1 => Some((value & 0xff) * 0x0101_0101_0101_0101),
            2 => Some((value & 0xffff) * 0x0001_0001_0001_0001),
            4 => Some(value | value << 32),
            _ => None,
        }
    }
}

/// What lists the nodes beside a node.
type Neighbours = unsafe extern "C" fn(Handle, *mut Handle, *mut usize) -> c_int;

impl Device {
    /// The nodes of a graph that run the fill kernel.
    pub(crate) fn fill_nodes(&self, graph: u64) -> Result<Vec<u64>, DriverError> {
        self.inside(|| {
            let mut found = Vec::new();
            for node in of_kind(&self.nodes(handle(graph))?, KERNEL_NODE) {
                let mut kernel = self.node(ptr::null_mut(), [0; 3], ptr::null_mut());
                // SAFETY: the struct is that of this version of the call.
                check("cuGraphKernelNodeGetParams", unsafe { (self.driver.node_parameters)(node, &raw mut kernel) })?;
                if kernel.function == self.small || kernel.function == self.large {
                    found.push(node as u64);
                }
            }
            Ok(found)
        })
    }

    /// The nodes of a graph, with their kinds.
    fn nodes(&self, graph: Handle) -> Result<Vec<(c_int, Handle)>, DriverError> {
        // SAFETY: the graph is the caller's.
        let nodes = unsafe { listed("cuGraphGetNodes", self.driver.graph_nodes, graph) }?.into_iter();
        let kind_of = |node| {
            let mut kind = -1;
            // SAFETY: writes one integer.
            check("cuGraphNodeGetType", unsafe { (self.driver.node_type)(node, &raw mut kind) })?;
            Ok((kind, node))
        };
        nodes.map(kind_of).collect()
    }

    /// Makes the memsets of a graph kernels that write the same, in the same place among the other nodes. One that the
    /// kernel cannot stand for stays, and all of a graph that allocates memory: the driver takes no node out of such a
    /// graph. How many there were, and how many of them are left.
    pub(crate) fn replace_memsets(&self, graph: u64) -> Result<(usize, usize), DriverError> {
        self.inside(|| {
            let graph = handle(graph);
            let nodes = self.nodes(graph)?;
            let memsets: Vec<_> = of_kind(&nodes, MEMSET_NODE).collect();
            if nodes.iter().any(|(kind, _)| [ALLOCATION_NODE, FREE_NODE].contains(kind)) {
                return Ok((memsets.len(), memsets.len()));
            }
            let mut left = 0;
            for &node in &memsets {
                left += usize::from(!self.replace_memset(graph, node)?);
            }
            Ok((memsets.len(), left))
        })
    }

    fn replace_memset(&self, graph: Handle, node: Handle) -> Result<bool, DriverError> {
        let driver = self.driver;
        let mut memset = MemsetNode::default();
        // SAFETY: the struct is that of the call.
        check("cuGraphMemsetNodeGetParams", unsafe { (driver.memset_parameters)(node, &raw mut memset) })?;
        let mut ordinal: c_int = -1;
        // SAFETY: this attribute is one integer. What memory the driver does not know, it says so.
        let is_known =
            unsafe { (driver.pointer_attribute)((&raw mut ordinal).cast(), DEVICE_ORDINAL, memset.dst) } == 0;
        // Another device's memory is out of reach for a kernel here.
        let fits = is_known && ordinal == self.ordinal && memset.bytes() <= MOST_BYTES;
        let Some(mut value) = memset.repeated().filter(|_| fits) else { return Ok(false) };
        // SAFETY: the node is one of the graph's. Edges of other kinds than a full wait make both calls fail.
        let (before, after) = unsafe {
            (
                listed("cuGraphNodeGetDependencies", driver.node_dependencies, node),
                listed("cuGraphNodeGetDependentNodes", driver.node_dependents, node),
            )
        };
        let (Ok(before), Ok(after)) = (before, after) else { return Ok(false) };
        let mut width = memset.row_bytes();
        let blocks = width.div_ceil(WORD * THREADS as usize).clamp(1, MOST_BLOCKS);
        let rows = memset.height.clamp(1, MOST_BLOCKS / blocks);
        let mut parameters: [*mut c_void; 5] = [
            (&raw mut memset.dst).cast(),
            (&raw mut memset.pitch).cast(),
            (&raw mut value).cast(),
            (&raw mut width).cast(),
            (&raw mut memset.height).cast(),
        ];
        #[expect(clippy::cast_possible_truncation, reason = "at most MOST_BLOCKS")]
        let kernel_node = self.node(self.set, [blocks as c_uint, rows as c_uint, 1], parameters.as_mut_ptr());
        let mut kernel = ptr::null_mut();
        // SAFETY: the kernel takes five words, which the driver copies before the call returns.
        let code = unsafe {
            (driver.add_kernel_node)(&raw mut kernel, graph, before.as_ptr(), before.len(), &raw const kernel_node)
        };
        if code != 0 {
            return Ok(false); // the graph is as it was
        }
        let from = vec![kernel; after.len()];
        // SAFETY: both lists have as many nodes, all of this graph, which has no executable yet. With a node go its edges.
        let is_replaced = unsafe {
            (driver.add_dependencies)(graph, from.as_ptr(), after.as_ptr(), after.len()) == 0
                && (driver.destroy_node)(node) == 0
        };
        if !is_replaced {
            // SAFETY: as above.
            check("cuGraphDestroyNode", unsafe { (driver.destroy_node)(kernel) })?;
        }
        Ok(is_replaced)
    }

    /// Makes an executable one of another graph of the same topology; false where the driver finds that it cannot be.
    pub(crate) fn update_executable(&self, executable: u64, graph: u64) -> Result<bool, DriverError> {
        const CANNOT: c_int = 910;
        let mut result = UpdateResult { result: 0, node: ptr::null_mut(), from_node: ptr::null_mut() };
        let (executable, graph) = (handle(executable), handle(graph));
        self.inside(|| {
            // SAFETY: the struct is that of this version of the call.
            match unsafe { (self.driver.update_executable)(executable, graph, &raw mut result) } {
                CANNOT => Ok(false),
                code => check("cuGraphExecUpdate", code).map(|()| true),
            }
        })
    }
}

fn of_kind(nodes: &[(c_int, Handle)], wanted: c_int) -> impl Iterator<Item = Handle> {
    nodes.iter().filter(move |(kind, _)| *kind == wanted).map(|(_, node)| *node)
}

/// All handles of a list of the driver's.
///
/// # Safety
/// `call` takes `of`.
unsafe fn listed(name: &'static str, call: Neighbours, of: Handle) -> Result<Vec<Handle>, DriverError> {
    let mut count = 0;
    // SAFETY: without a place for handles only their number is written.
    check(name, unsafe { call(of, ptr::null_mut(), &raw mut count) })?;
    let mut handles = vec![ptr::null_mut(); count];
    if count > 0 {
        // SAFETY: at most `count` handles are written.
        check(name, unsafe { call(of, handles.as_mut_ptr(), &raw mut count) })?;
    }
    Ok(handles)
}
