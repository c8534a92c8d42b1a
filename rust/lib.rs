//! The rules and the arithmetic of `devicegraph`: what can be decided without a tensor.
//!
//! But for [`driver`], this crate knows nothing of torch or of any device. It answers questions about plain values, and the Python package
//! carries the answers out on tensors:
//!
//! - [`document`]: what somebody wrote, as one tree for JSON, TOML and Python objects;
//! - [`config`]: which capture backend each phase uses, checked so that every problem is reported at once;
//! - [`layers`], [`options`], [`rules`]: how what several sources say comes together, and what an engine's facts rule out;
//! - [`explain`], [`schema`]: a configuration as an operator reads it, and what there is to write, for an editor;
//! - [`buckets`]: the sizes worth capturing, and which of them a live size is padded to;
//! - [`optimize`]: the sizes that pad the least for traffic that was seen;
//! - [`dtype`], [`slot`] and [`step`]: what filling a set of static input buffers must copy and write;
//! - [`plan`] and [`table`]: the same as the fewest grouped calls, and as one table for a kernel;
//! - [`driver`]: the fence round addresses: the CUDA driver, tensors by DLPack, and tables carried out on the host;
//! - [`pool`]: which input buffers are one memory, and who shares it;
//! - [`arena`]: where the blocks of recorded tapes live, so that all of them together take the least memory.
//!
//! Only `python` names pyo3, behind the feature of that name: `cargo test` needs no interpreter.

pub mod arena;
pub mod buckets;
pub mod config;
pub mod document;
pub mod driver;
pub mod dtype;
pub mod error;
pub mod explain;
pub mod layers;
pub mod optimize;
pub mod options;
pub mod plan;
pub mod pool;
pub mod rules;
pub mod schema;
pub mod slot;
pub mod step;
pub mod table;

#[cfg(feature = "python")]
mod python;
