//! `PoolLedger`: who shares which input buffer.

use std::sync::{Mutex, MutexGuard, PoisonError};

use pyo3::prelude::*;

use crate::pool::{Ledger, PoolKey, Reliance};
use crate::slot::count;

/// Who shares which input buffer; it holds no memory.
#[pyclass(frozen, module = "devicegraph._core")]
pub(super) struct PoolLedger(Mutex<Ledger>);

impl PoolLedger {
    /// Held for look-ups only, never while Python may run: a finalizer that leaves the ledger cannot deadlock.
    fn lock(&self) -> MutexGuard<'_, Ledger> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[pymethods]
impl PoolLedger {
    #[new]
    fn new() -> Self {
        Self(Mutex::new(Ledger::default()))
    }

    /// Adds a user: (memory, user, whether the memory is new).
    #[pyo3(signature = (name, *, dtype, device, current_index, shape, policy, pad, rewrites, fed, owner))]
    #[expect(clippy::too_many_arguments, reason = "a record, given by keyword")]
    fn join(
        &self,
        name: &str,
        dtype: &str,
        device: &str,
        current_index: usize,
        shape: Vec<usize>,
        policy: &str,
        pad: Vec<u8>,
        rewrites: bool,
        fed: bool,
        owner: String,
    ) -> PyResult<(u64, u64, bool)> {
        let key = PoolKey::new(name, count(&shape), dtype, device, current_index)?;
        let reliance = Reliance { policy: policy.parse()?, pad, shape, rewrites, fed };
        let joined = self.lock().join(key, owner, reliance);
        Ok((joined.entry, joined.user, joined.fresh))
    }

    /// Removes a user; returns its memory where that has no other.
    #[pyo3(signature = (user, /))]
    fn leave(&self, user: u64) -> Option<u64> {
        self.lock().leave(user)
    }

    /// Who uses a memory.
    #[pyo3(signature = (memory, /))]
    fn owners(&self, memory: u64) -> Vec<String> {
        self.lock().owners(memory)
    }

    /// Bytes of all memories.
    #[getter]
    fn total_bytes(&self) -> usize {
        self.lock().bytes()
    }

    /// Bytes that the users would take besides, if each had its own.
    #[getter]
    fn saved_bytes(&self) -> usize {
        self.lock().saved_bytes()
    }

    fn __len__(&self) -> usize {
        self.lock().len()
    }

    fn __str__(&self) -> String {
        self.lock().to_string()
    }

    fn __repr__(&self) -> String {
        let ledger = self.lock();
        format!("PoolLedger({} buffers, {} bytes)", ledger.len(), ledger.bytes())
    }
}
