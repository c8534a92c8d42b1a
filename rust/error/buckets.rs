//! Why a size is not in a bucket list.

use std::fmt;

use crate::buckets::{Bytes, Reason};

impl Reason {
    /// The stable word to branch on.
    pub fn code(self) -> &'static str {
        match self {
            Self::OverLimit(_) => "bucket-over-limit",
            Self::NotAligned(_) => "bucket-not-aligned",
            Self::OverBudget(_) | Self::OverBytes(_) => "bucket-over-budget",
        }
    }

    /// What to do about it, if anything.
    pub fn hint(self, size: u32) -> Option<String> {
        match self {
            Self::NotAligned(alignment) if size < alignment => Some(format!("use {alignment}")),
            Self::NotAligned(alignment) => {
                let below = size - size % alignment;
                Some(format!("use {below} or {}", below + alignment))
            }
            Self::OverLimit(_) | Self::OverBudget(_) | Self::OverBytes(_) => None,
        }
    }
}

/// What a size with this reason is, as in "128 is above the limit 64".
impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::OverLimit(limit) => write!(f, "above the limit {limit}"),
            Self::NotAligned(alignment) => write!(f, "not a multiple of the alignment {alignment}"),
            Self::OverBudget(graphs) => write!(f, "beyond the budget of {graphs} graphs"),
            Self::OverBytes(bytes) => write!(f, "beyond the budget of {}", Bytes(*bytes)),
        }
    }
}
