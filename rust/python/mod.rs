//! The extension module `devicegraph._core`: newtypes that convert at the edge and hold no rule of their own.

mod arena;
mod buckets;
mod config;
mod error;
mod plan;
mod pool;
mod value;

use pyo3::prelude::*;

/// The Rust core of `devicegraph`.
#[pymodule]
mod _core {
    use pyo3::prelude::*;

    #[pymodule_export]
    use super::arena::Arena;
    #[pymodule_export]
    use super::buckets::{PyBuckets, PyDroppedBucket, decode_buckets, prefill_buckets};
    #[pymodule_export]
    use super::config::{PyConfig, PyPhaseConfig};
    #[pymodule_export]
    use super::error::PyConfigIssue;

    #[pymodule_export]
    use super::plan::{CopyGroup, FillPlan, FillPlanner, SlotLayout, is_slot_dtype};
    #[pymodule_export]
    use super::pool::PoolLedger;

    #[pymodule_init]
    fn init(module: &Bound<'_, PyModule>) -> PyResult<()> {
        module.add("__version__", env!("CARGO_PKG_VERSION"))?;
        module.add("ALLOWED_BACKENDS_PER_PHASE", super::config::allowed_backends(module.py())?)?;
        module.add("LARGE_PAD_BYTES", crate::plan::LARGE_PAD_BYTES)
    }
}
