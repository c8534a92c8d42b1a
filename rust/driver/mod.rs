//! The fence: everything that touches memory or a library by its address.
//!
//! The rest of the crate reasons about plain values. Here, addresses are read and written that torch handed out, on the
//! word of the callers, who hold the tensors and have checked shapes, types and places against them.

#![expect(unsafe_code, reason = "addresses of tensors and functions of libraries found at run time")]

#[cfg(feature = "python")]
pub(crate) mod cuda;
#[cfg(feature = "python")]
pub(crate) mod dlpack;
pub mod host;
