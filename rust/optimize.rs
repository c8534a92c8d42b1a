//! Which buckets pad the least for traffic that was seen.
//!
//! Every live size is padded to the smallest bucket that holds it, so the buckets cut the sizes seen, in order, into
//! runs, and the padding of a run does not depend on the other cuts. A bucket that lies between two of the sizes seen
//! can move down to the lower one for nothing, so only those sizes (rounded up to the alignment) and the maximum are
//! candidates. The best list of so many graphs is then a shortest path with so many edges. The padding of runs obeys
//! the quadrangle inequality, so the best last cut moves one way as the end moves, and divide and conquer finds a layer
//! of n cuts in n log n. A budget of bytes makes the path a constrained one: see `budget`.

mod arguments;
mod budget;
mod layers;

use std::fmt;

pub use arguments::Arguments;
use budget::{Constraint, constrained};
use layers::Layers;

use crate::buckets::{Bytes, Runs};
use crate::error::ConfigError;

/// Up to how many graphs the curve goes, at least, where there are that many sizes.
const CURVE: usize = 64;

/// The sizes to choose from, ascending, with the traffic up to each of them. Position 0 is before the first.
struct Candidates {
    sizes: Vec<u32>,
    /// Steps whose size is no larger than that of the candidate before this position.
    steps: Vec<u128>,
    /// Live rows in them.
    rows: Vec<u128>,
}

impl Candidates {
    fn len(&self) -> usize {
        self.sizes.len()
    }

    /// The rows that are padding where the candidate before `to` is a bucket, and the next smaller one that before `from`.
    fn padding(&self, from: usize, to: usize) -> u128 {
        u128::from(self.sizes[to - 1]) * (self.steps[to] - self.steps[from]) - (self.rows[to] - self.rows[from])
    }
}

/// The list that pads the least, and what it comes to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Optimized {
    sizes: Vec<u32>,
    /// Live sizes, ascending, each with its steps.
    traffic: Vec<(u32, u64)>,
    curve: Vec<u128>,
    total_bytes: Option<u64>,
}

impl Optimized {
    /// Finds the list.
    ///
    /// # Errors
    /// Everything that is wrong with the arguments.
    pub fn new(arguments: &Arguments) -> Result<Self, ConfigError> {
        let checked = arguments.check()?;
        let candidates = checked.candidates();
        let count = candidates.len();
        let max_graphs = checked.max_graphs.unwrap_or(count).min(count);
        let bytes = checked.bytes(&candidates)?;
        let same = bytes.windows(2).all(|pair| pair[0] == pair[1]);
        let graphs = match (checked.budget, bytes.first()) {
            // As many graphs as fit; one does, as the maximum alone was found to.
            (Some(budget), Some(&each)) if same && each > 0 => {
                max_graphs.min(usize::try_from(budget / each).unwrap_or(usize::MAX))
            }
            _ => max_graphs,
        };
        let layers = Layers::new(&candidates, graphs.max(CURVE).min(count), graphs)?;
        let chosen = match checked.budget {
            Some(budget) if !same => {
                constrained(&candidates, &Constraint { bytes: &bytes, budget, max_graphs }, layers.cuts(graphs))?
            }
            _ => layers.cuts(graphs),
        };
        let sum = |total: u64, at: &usize| total.saturating_add(bytes[*at - 1]);
        Ok(Self {
            total_bytes: (!bytes.is_empty()).then(|| chosen.iter().fold(0, sum)),
            sizes: chosen.iter().map(|at| candidates.sizes[at - 1]).collect(),
            curve: layers.padding,
            traffic: checked.traffic,
        })
    }

    /// The sizes to capture, ascending.
    pub fn sizes(&self) -> &[u32] {
        &self.sizes
    }

    /// The padded rows of the best list of 1, 2, 3, ... graphs, without regard to bytes.
    pub fn curve(&self) -> &[u128] {
        &self.curve
    }

    /// What the graphs take together, where that of each was given.
    pub fn total_bytes(&self) -> Option<u64> {
        self.total_bytes
    }

    /// What the traffic comes to with this list.
    pub fn outcome(&self) -> Outcome {
        self.outcome_of(&self.sizes)
    }

    /// What the same traffic comes to with another list, which is ascending.
    pub fn outcome_of(&self, sizes: &[u32]) -> Outcome {
        let mut outcome = Outcome::default();
        for &(size, steps) in &self.traffic {
            let steps = u128::from(steps);
            match sizes.get(sizes.partition_point(|bucket| *bucket < size)) {
                Some(bucket) => {
                    outcome.replayed += steps;
                    outcome.raw_rows += steps * u128::from(size);
                    outcome.padded_rows += steps * u128::from(bucket - size);
                }
                None => outcome.eager += steps,
            }
        }
        outcome
    }
}

/// What traffic comes to with a list of buckets.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Outcome {
    /// Steps that have a bucket.
    pub replayed: u128,
    /// Steps above the largest bucket.
    pub eager: u128,
    /// Live rows in replayed steps.
    pub raw_rows: u128,
    /// Rows that are computed for nothing in them.
    pub padded_rows: u128,
}

impl Outcome {
    /// The share of computed rows that is padding.
    pub fn waste(&self) -> f64 {
        share(self.padded_rows, self.raw_rows)
    }
}

/// The share of padding where so many rows are padding and so many are live.
pub fn share(padded: u128, raw: u128) -> f64 {
    #[expect(clippy::cast_precision_loss, reason = "a share")]
    if padded == 0 { 0.0 } else { padded as f64 / (padded + raw) as f64 }
}

/// The list and what it comes to, line by line.
impl fmt::Display for Optimized {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Outcome { replayed, eager, raw_rows, padded_rows } = self.outcome();
        writeln!(f, "sizes    {}", Runs(&self.sizes))?;
        match eager {
            0 => writeln!(f, "steps    {replayed}")?,
            _ => writeln!(f, "steps    {replayed}, and {eager} above the largest size: eager")?,
        }
        if let Some(total) = self.total_bytes {
            writeln!(f, "bytes    {}", Bytes(total))?;
        }
        let (computed, waste) = (raw_rows + padded_rows, 100.0 * share(padded_rows, raw_rows));
        write!(f, "padding  {padded_rows} of {computed} rows ({waste:.1}%) with {} graphs", self.sizes.len())
    }
}
