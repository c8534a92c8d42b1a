//! What can go wrong between the core and the CUDA driver.

use thiserror::Error;

/// The driver, or one of its functions, is not there, or a call failed.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum DriverError {
    /// No driver, or one without a function that is needed.
    #[error("the CUDA driver cannot be used: {0}")]
    Missing(String),
    /// A call failed.
    #[error("the CUDA driver's `{call}` failed with error {code}")]
    Failed {
        /// The function.
        call: &'static str,
        /// What it returned: a `CUresult`.
        code: i32,
    },
}
