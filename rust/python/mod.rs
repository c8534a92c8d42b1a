//! The extension module `devicegraph._core`: newtypes that convert at the edge and hold no rule of their own.

mod arena;
mod buckets;
mod config;
mod error;
mod explain;
mod fill;
mod optimize;
mod options;
mod phase;
mod plan;
mod pool;
mod rules;
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
    use super::config::{PyConfig, config_schema};
    #[pymodule_export]
    use super::error::PyConfigIssue;
    #[pymodule_export]
    use super::explain::PyExplanation;
    #[pymodule_export]
    use super::fill::{FillKernel, FillNode, FillTable, FillTables, HostRing};
    #[pymodule_export]
    use super::optimize::{PyOptimizedBuckets, optimize_buckets};
    #[pymodule_export]
    use super::options::{PyConfigOption, merge_options, read_argument};
    #[pymodule_export]
    use super::phase::PyPhaseConfig;
    #[pymodule_export]
    use super::rules::{check_rule, resolve};

    #[pymodule_export]
    use super::plan::{CopyGroup, FillPlan, FillPlanner, SlotLayout, as_size, is_slot_dtype};
    #[pymodule_export]
    use super::pool::PoolLedger;

    #[pymodule_init]
    fn init(module: &Bound<'_, PyModule>) -> PyResult<()> {
        module.add("__version__", env!("CARGO_PKG_VERSION"))?;
        module.add("ALLOWED_BACKENDS_PER_PHASE", super::config::allowed_backends(module.py())?)?;
        module.add("CONFIG_OPTIONS", super::options::table(module.py())?)?;
        module.add("LARGE_PAD_BYTES", crate::plan::LARGE_PAD_BYTES)
    }
}
