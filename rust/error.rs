//! Every sentence that the core says when it refuses something.
//!
//! Codes are stable and are what programs branch on; sentences may be reworded. Each of the modules is the catalogue of one
//! concept.

mod arena;
mod buckets;
mod config;
mod slot;

pub use arena::ArenaError;
pub(crate) use config::listed;
pub use config::{ConfigError, Expected, Issue, Problem};
#[cfg(feature = "python")]
pub(crate) use config::{place, write_issue};
pub use slot::SlotFault;
