//! Which sizes are captured, and which of them a live size is padded to.
//!
//! A list is either asked for by name, or one of two default lists up to a maximum. Limits of the engine and of the
//! hardware then take entries away, and the result remembers which and why.

mod arguments;
mod lists;

use std::collections::BTreeMap;
use std::fmt;
use std::hash::{Hash, Hasher};

pub(crate) use arguments::BytesPerSize;
pub use arguments::{Arguments, PRESETS};
use lists::{DECODE, DENSE_DECODE, DENSE_PREFILL, PREFILL, SPECULATIVE, thin, up_to, within};

use crate::error::ConfigError;

/// What decides which of the sizes asked for are kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rules {
    /// Whether a live size may be padded to a larger bucket.
    pub padding: bool,
    /// What every size is a multiple of.
    pub alignment: u32,
    /// The largest size that the engine can run.
    pub limit: Option<u32>,
    /// How many graphs there may be.
    pub max_graphs: Option<u32>,
    /// How many bytes the graphs may take together.
    pub max_bytes: Option<u64>,
}

/// Why a size that was asked for is not in the list.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Reason {
    /// It is not a multiple of this.
    NotAligned(u32),
    /// It is above this limit.
    OverLimit(u32),
    /// It was not among the this many that were kept.
    OverBudget(u32),
    /// It was not among those that take no more than this many bytes together.
    OverBytes(u64),
}

/// The sizes to capture, ascending, with what was asked for and why some of it is missing.
#[derive(Clone, Debug)]
pub struct Buckets {
    asked: Vec<u32>,
    sizes: Vec<u32>,
    rules: Rules,
    /// What the graphs of these sizes take, where somebody said it: of all sizes that nothing else took away.
    bytes: BTreeMap<u32, u64>,
    /// For each live size its bucket, or 0.
    bucket_of: Vec<u32>,
}

impl Buckets {
    /// The list that is left of `asked` under `rules`.
    ///
    /// A list that the limit cuts gains the largest size within the limit, so that a full batch has a bucket; without
    /// padding it does not, as nobody asked for that exact size.
    fn new(mut asked: Vec<u32>, rules: Rules) -> Self {
        asked.sort_unstable();
        asked.dedup();
        let limit = rules.limit.unwrap_or(u32::MAX);
        let fits = |size: &u32| *size <= limit && size.is_multiple_of(rules.alignment);
        let mut sizes: Vec<u32> = asked.iter().copied().filter(fits).collect();
        let full = limit - limit % rules.alignment;
        let cut = asked.last().is_some_and(|&largest| largest > limit);
        if cut && rules.padding && full > 0 && sizes.last() != Some(&full) {
            sizes.push(full);
        }
        if let Some(graphs) = rules.max_graphs {
            sizes = thin(sizes, graphs as usize);
        }
        let bucket_of = table(&sizes, rules.padding);
        Self { asked, sizes, rules, bytes: BTreeMap::new(), bucket_of }
    }

    /// The same with the bytes of each size known, within the budget of bytes if there is one.
    fn weighed(mut self, bytes: BTreeMap<u32, u64>) -> Self {
        if let Some(budget) = self.rules.max_bytes {
            self.sizes = within(self.sizes, budget, |size| bytes.get(&size).copied().unwrap_or_default());
            self.bucket_of = table(&self.sizes, self.rules.padding);
        }
        Self { bytes, ..self }
    }

    /// The default list for decode up to a maximum, or an explicit list; sizes are requests.
    ///
    /// # Errors
    /// Everything that is wrong with the arguments.
    pub fn decode(arguments: &Arguments) -> Result<Self, ConfigError> {
        let checked = arguments.check("max_bs")?;
        checked.buckets(|maximum| match (checked.rules.padding, checked.dense, checked.num_tokens_per_bs) {
            (false, _, _) => (1..=maximum).collect(),
            (true, true, _) => up_to(maximum, &DENSE_DECODE),
            (true, false, 1) => up_to(maximum, &DECODE),
            (true, false, _) => up_to(maximum, &SPECULATIVE),
        })
    }

    /// The default list for prefill up to a maximum, or an explicit list; sizes are tokens.
    ///
    /// Without padding the list stays what it is and only those exact sizes have a bucket: one graph for every number
    /// of tokens would be thousands.
    ///
    /// # Errors
    /// Everything that is wrong with the arguments.
    pub fn prefill(arguments: &Arguments) -> Result<Self, ConfigError> {
        let checked = arguments.check("max_tokens")?;
        checked.buckets(|maximum| if checked.dense { up_to(maximum, &DENSE_PREFILL) } else { up_to(maximum, &PREFILL) })
    }

    /// An explicit list.
    ///
    /// # Errors
    /// Everything that is wrong with the arguments.
    pub fn explicit(arguments: &Arguments) -> Result<Self, ConfigError> {
        arguments.check("bs")?.buckets(|_| Vec::new())
    }

    /// The bucket of a live size: the smallest that holds it, or without padding the one that equals it.
    pub fn fit(&self, raw: i64) -> Option<u32> {
        let bucket = *self.bucket_of.get(usize::try_from(raw).ok()?)?;
        (bucket > 0).then_some(bucket)
    }

    /// The sizes to capture, ascending.
    pub fn sizes(&self) -> &[u32] {
        &self.sizes
    }

    /// The largest of them, or 0 where there is none.
    pub fn maximum(&self) -> u32 {
        self.sizes.last().copied().unwrap_or(0)
    }

    /// What the graph of each size takes, in bytes, where that was given: for all sizes but those that something else
    /// than the budget of bytes took away.
    pub fn bytes(&self) -> &BTreeMap<u32, u64> {
        &self.bytes
    }

    /// What all graphs take together, where that of each was given.
    pub fn total_bytes(&self) -> Option<u64> {
        let of = |size: &u32| self.bytes.get(size).copied();
        self.sizes.iter().map(of).try_fold(0_u64, |total, bytes| Some(total.saturating_add(bytes?)))
    }

    /// The sizes asked for, ascending; for a default list, all of it up to the maximum asked for.
    pub fn asked(&self) -> &[u32] {
        &self.asked
    }

    /// What the sizes had to keep to.
    pub fn rules(&self) -> Rules {
        self.rules
    }

    /// The sizes asked for that are not captured, ascending, each with the reason.
    pub fn dropped(&self) -> impl Iterator<Item = (u32, Reason)> {
        let missing = self.asked.iter().copied().filter(|size| self.sizes.binary_search(size).is_err());
        missing.map(|size| (size, self.reason(size)))
    }

    fn reason(&self, size: u32) -> Reason {
        match self.rules {
            Rules { limit: Some(limit), .. } if size > limit => Reason::OverLimit(limit),
            Rules { alignment, .. } if !size.is_multiple_of(alignment) => Reason::NotAligned(alignment),
            Rules { max_bytes: Some(bytes), .. } if self.bytes.contains_key(&size) => Reason::OverBytes(bytes),
            Rules { max_graphs, .. } => Reason::OverBudget(max_graphs.unwrap_or_default()),
        }
    }
}

/// Equal where every live size has the same bucket, however the lists came about.
impl PartialEq for Buckets {
    fn eq(&self, other: &Self) -> bool {
        (&self.sizes, self.rules.padding) == (&other.sizes, other.rules.padding)
    }
}

impl Eq for Buckets {}

impl Hash for Buckets {
    fn hash<H: Hasher>(&self, state: &mut H) {
        (&self.sizes, self.rules.padding).hash(state);
    }
}

/// What was asked, kept and dropped, and why, line by line.
impl fmt::Display for Buckets {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "asked    {}", Runs(&self.asked))?;
        writeln!(f, "kept     {}", Runs(&self.sizes))?;
        if let Some(added) = self.sizes.last().filter(|size| self.asked.binary_search(size).is_err()) {
            writeln!(f, "added    {added}, the largest size within the limit")?;
        }
        let mut dropped: Vec<(u32, Reason)> = self.dropped().collect();
        dropped.sort_by_key(|(size, reason)| (*reason, *size));
        for group in dropped.chunk_by(|(_, one), (_, other)| one == other) {
            let sizes: Vec<u32> = group.iter().map(|(size, _)| *size).collect();
            writeln!(f, "dropped  {}: {}", Runs(&sizes), group[0].1)?;
        }
        if let Some(total) = self.total_bytes().filter(|_| !self.bytes.is_empty()) {
            write!(f, "bytes    {}", Bytes(total))?;
            match self.rules.max_bytes {
                Some(budget) => writeln!(f, " of {}", Bytes(budget))?,
                None => writeln!(f)?,
            }
        }
        let between = if self.rules.padding {
            "on: a size in between takes the next larger bucket"
        } else {
            "off: a size in between runs eager"
        };
        write!(f, "padding  {between}")
    }
}

/// Sizes in few words: a run of four or more with one step is `16..256 by 8`.
pub(crate) struct Runs<'s>(pub(crate) &'s [u32]);

impl fmt::Display for Runs<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (mut rest, mut separator) = (self.0, "");
        if rest.is_empty() {
            return f.write_str("none");
        }
        while let [first, tail @ ..] = rest {
            let step = tail.first().map_or(0, |second| second - first);
            let run = 1 + rest.windows(2).take_while(|pair| pair[1] - pair[0] == step).count();
            let taken = if run < 4 { 1 } else { run };
            match (taken, step) {
                (1, _) => write!(f, "{separator}{first}")?,
                (_, 1) => write!(f, "{separator}{first}..{}", rest[taken - 1])?,
                _ => write!(f, "{separator}{first}..{} by {step}", rest[taken - 1])?,
            }
            separator = ", ";
            rest = &rest[taken..];
        }
        Ok(())
    }
}

/// Bytes in the unit that keeps the number short.
pub(crate) struct Bytes(pub(crate) u64);

impl fmt::Display for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        #[expect(clippy::cast_precision_loss, reason = "shown to one decimal place")]
        let (mut value, mut unit) = (self.0 as f64, 0);
        while value >= 1024.0 && unit < 4 {
            value /= 1024.0;
            unit += 1;
        }
        match unit {
            0 => write!(f, "{} bytes", self.0),
            _ => write!(f, "{value:.1} {}", ["", "KiB", "MiB", "GiB", "TiB"][unit]),
        }
    }
}

fn table(sizes: &[u32], padding: bool) -> Vec<u32> {
    let mut bucket_of = vec![0];
    for &size in sizes {
        let between = if padding { size } else { 0 };
        bucket_of.resize(size as usize, between);
        bucket_of.push(size);
    }
    bucket_of
}
