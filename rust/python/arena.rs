//! `Arena`: the tape's memory layout.

use std::sync::{Mutex, MutexGuard, PoisonError};

use pyo3::exceptions::{PyMemoryError, PyValueError};
use pyo3::prelude::*;

use crate::arena;
use crate::error::ArenaError;

/// Places of blocks in segments that never move; it hands out offsets and holds no memory.
#[pyclass(frozen, module = "devicegraph._core")]
pub(super) struct Arena(Mutex<arena::Arena>);

impl Arena {
    /// The lock is held for arithmetic only, never while Python may run: a finalizer that releases a block cannot deadlock.
    fn lock(&self) -> MutexGuard<'_, arena::Arena> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl From<ArenaError> for PyErr {
    fn from(error: ArenaError) -> Self {
        match error {
            ArenaError::Size { .. } => PyMemoryError::new_err(error.to_string()),
            ArenaError::Alignment { .. } | ArenaError::NotLive { .. } => PyValueError::new_err(error.to_string()),
        }
    }
}

#[pymethods]
impl Arena {
    #[new]
    #[pyo3(signature = (*, alignment, segment_bytes))]
    fn new(alignment: u64, segment_bytes: u64) -> PyResult<Self> {
        Ok(Self(Mutex::new(arena::Arena::new(alignment, segment_bytes)?)))
    }

    /// Reserves a block: (segment, offset, bytes).
    #[pyo3(signature = (bytes, /))]
    fn allocate(&self, bytes: u64) -> PyResult<(usize, u64, u64)> {
        let block = self.lock().allocate(bytes)?;
        Ok((block.segment, block.offset, block.bytes))
    }

    /// Gives a block back.
    #[pyo3(signature = (segment, offset, bytes, /))]
    fn release(&self, segment: usize, offset: u64, bytes: u64) -> PyResult<()> {
        Ok(self.lock().release(arena::Block { segment, offset, bytes })?)
    }

    /// Bytes of each segment.
    #[getter]
    fn segments(&self) -> Vec<u64> {
        self.lock().segments().to_vec()
    }

    /// Bytes in all segments.
    #[getter]
    fn reserved_bytes(&self) -> u64 {
        self.lock().reserved_bytes()
    }

    /// Bytes reserved by blocks now.
    #[getter]
    fn live_bytes(&self) -> u64 {
        self.lock().live_bytes()
    }

    /// The most bytes that blocks reserved at once.
    #[getter]
    fn peak_bytes(&self) -> u64 {
        self.lock().peak_bytes()
    }

    fn __repr__(&self) -> String {
        let arena = self.lock();
        format!(
            "Arena(segments={}, reserved_bytes={}, live_bytes={}, peak_bytes={})",
            arena.segments().len(),
            arena.reserved_bytes(),
            arena.live_bytes(),
            arena.peak_bytes()
        )
    }
}
