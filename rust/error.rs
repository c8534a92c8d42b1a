//! Every sentence that the core says when it refuses something.
//!
//! Codes are stable and are what programs branch on; sentences may be reworded. Each of the modules is the catalogue of one
//! concept.

mod arena;
mod buckets;
mod config;
mod driver;
mod problem;
mod slot;

pub use arena::ArenaError;
pub(crate) use config::listed;
pub use config::{ConfigError, Issue};
#[cfg(feature = "python")]
pub(crate) use config::{place, write_issue};
pub use driver::DriverError;
pub use problem::{Expected, Problem};
pub use slot::SlotFault;
