//! `HostRing`: host memory that launches read.

use std::sync::{Arc, Mutex, PoisonError};

use pyo3::prelude::*;

use super::kernel::FillKernel;
use crate::driver::cuda;
use crate::error::DriverError;

/// Pinned host memory in blocks that take turns, so that none is written while the device may still read it.
#[pyclass(frozen, module = "devicegraph._core")]
pub(in crate::python) struct HostRing {
    device: Arc<cuda::Device>,
    address: u64,
    pub(super) block_bytes: usize,
    events: Vec<u64>,
    /// The block that was given last, and which ones have been marked since they were.
    state: Mutex<(usize, Vec<bool>)>,
    /// ADDRESS: the memory, which goes after everything queued has read it: see `drop`.
    _memory: Py<PyAny>,
}

#[pymethods]
impl HostRing {
    #[new]
    #[pyo3(signature = (memory, address, *, block_bytes, blocks, kernel))]
    fn new(memory: Py<PyAny>, address: u64, block_bytes: usize, blocks: usize, kernel: &FillKernel) -> PyResult<Self> {
        let device = kernel.0.clone();
        let events = (0..blocks.max(1)).map(|_| device.event()).collect::<Result<Vec<_>, _>>()?;
        let state = Mutex::new((0, vec![false; events.len()]));
        Ok(Self { device, address, block_bytes, events, state, _memory: memory })
    }
}

impl HostRing {
    /// The next block, once the device has read what it held, and its address.
    pub(super) fn next(&self, py: Python<'_>) -> Result<(usize, u64), DriverError> {
        let (block, is_marked) = {
            let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
            state.0 = (state.0 + 1) % self.events.len();
            let block = state.0;
            (block, std::mem::take(&mut state.1[block]))
        };
        if is_marked && !self.device.is_done(self.events[block])? {
            py.detach(|| self.device.wait(self.events[block]))?;
        }
        Ok((block, self.address + (block * self.block_bytes) as u64))
    }

    /// Marks a block as read by what is queued on a stream so far.
    pub(super) fn mark(&self, block: usize, stream: u64) -> Result<(), DriverError> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.1[block] = true;
        self.device.record(self.events[block], stream)
    }
}

impl Drop for HostRing {
    fn drop(&mut self) {
        for (event, is_marked) in
            self.events.iter().zip(&self.state.get_mut().unwrap_or_else(PoisonError::into_inner).1)
        {
            // The memory goes with the ring: what is queued must have read it.
            if *is_marked {
                drop(self.device.wait(*event));
            }
            self.device.destroy(*event);
        }
    }
}
