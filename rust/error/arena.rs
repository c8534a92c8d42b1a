//! What the tape's memory refuses.

use thiserror::Error;

/// What the tape's memory refuses.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum ArenaError {
    /// An alignment that no address can have.
    #[error("the alignment must be a power of two, not {alignment}")]
    Alignment {
        /// The alignment asked for, in bytes.
        alignment: u64,
    },
    /// A request that no address space can hold.
    #[error("a block of {bytes} bytes is more than an arena can hold")]
    Size {
        /// The size asked for, in bytes.
        bytes: u64,
    },
    /// A block released twice, or never reserved.
    #[error("no block is live at segment {segment}, offset {offset}")]
    NotLive {
        /// The segment named.
        segment: usize,
        /// The offset named, in bytes.
        offset: u64,
    },
}
