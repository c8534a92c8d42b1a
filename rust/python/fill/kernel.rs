//! `FillKernel` and `FillNode`: the fill kernel of a device, and as a node of a graph.

use std::sync::{Arc, Mutex, PoisonError};

use pyo3::prelude::*;

use super::Shared;
use super::ring::HostRing;
use crate::driver::cuda;

/// A CUDA device with the fill kernel loaded.
#[pyclass(frozen, module = "devicegraph._core")]
pub(in crate::python) struct FillKernel(pub(super) Arc<cuda::Device>);

#[pymethods]
impl FillKernel {
    #[new]
    #[pyo3(signature = (index, /))]
    fn new(index: i32) -> PyResult<Self> {
        Ok(Self(Arc::new(cuda::Device::open(index)?)))
    }

    /// The node of a captured graph that runs the fill kernel, in its executable; None where there is not exactly one.
    #[pyo3(signature = (*, graph, executable))]
    fn fill_node(&self, graph: u64, executable: u64) -> PyResult<Option<FillNode>> {
        let nodes = self.0.fill_nodes(graph)?;
        let [node] = nodes[..] else { return Ok(None) };
        Ok(Some(FillNode { device: self.0.clone(), executable, node, pending: Mutex::default() }))
    }

    /// Makes the memsets of a graph kernels; how many there were, and how many are left.
    #[pyo3(signature = (*, graph))]
    fn replace_memsets(&self, graph: u64) -> PyResult<(usize, usize)> {
        Ok(self.0.replace_memsets(graph)?)
    }

    /// Makes an executable one of another graph of the same topology.
    #[pyo3(signature = (*, executable, graph))]
    fn update_executable(&self, executable: u64, graph: u64) -> PyResult<bool> {
        Ok(self.0.update_executable(executable, graph)?)
    }

    /// Queues a table that writes nothing on a stream.
    #[pyo3(signature = (stream, /))]
    fn launch_empty(&self, stream: u64) -> PyResult<()> {
        Ok(self.0.launch(stream, &[], 0)?)
    }
}

/// The fill kernel as a node of a graph's executable.
#[pyclass(frozen, module = "devicegraph._core")]
pub(in crate::python) struct FillNode {
    pub(super) device: Arc<cuda::Device>,
    pub(super) executable: u64,
    pub(super) node: u64,
    pending: Mutex<Pending>,
}

/// What the next launch of a node reads.
#[derive(Default)]
pub(super) struct Pending {
    /// ADDRESS: the sources, until the launch is queued; from then on the order of the stream keeps their memory.
    pub(super) _sources: Vec<Py<PyAny>>,
    /// The block of a ring that it reads, and what knows the stream.
    pub(super) ring: Option<(Py<HostRing>, usize, Arc<Shared>)>,
}

#[pymethods]
impl FillNode {
    /// Makes the node write nothing.
    fn clear(&self) -> PyResult<()> {
        self.device.point(self.executable, self.node, &[], 0)?;
        drop(self.replace(Pending::default()));
        Ok(())
    }

    /// Lets go of what the launch that was just queued reads.
    fn launched(&self, py: Python<'_>) -> PyResult<()> {
        match self.replace(Pending::default()).ring {
            Some((ring, block, shared)) => shared.mark(py, ring.get(), block),
            None => Ok(()),
        }
    }
}

impl FillNode {
    pub(super) fn replace(&self, pending: Pending) -> Pending {
        std::mem::replace(&mut self.pending.lock().unwrap_or_else(PoisonError::into_inner), pending)
    }
}
