//! The extension module `devicegraph._core`: newtypes that convert at the edge and hold no rule of their own.

mod arena;
mod plan;
mod pool;

use pyo3::prelude::*;

/// The Rust core of `devicegraph`.
#[pymodule]
mod _core {
    use pyo3::prelude::*;

    #[pymodule_export]
    use super::arena::Arena;
    #[pymodule_export]
    use super::plan::{CopyGroup, FillPlan, FillPlanner, SlotLayout, is_slot_dtype};
    #[pymodule_export]
    use super::pool::PoolLedger;

    #[pymodule_init]
    fn init(module: &Bound<'_, PyModule>) -> PyResult<()> {
        module.add("LARGE_PAD_BYTES", crate::plan::LARGE_PAD_BYTES)?;
        module.add("__version__", env!("CARGO_PKG_VERSION"))
    }
}
