//! What a bucket list is asked for with, checked.

use std::collections::{BTreeMap, HashMap};

use super::{Buckets, Rules};
use crate::config::{Checker, LARGEST_SIZE};
use crate::document::Value;
use crate::error::{ConfigError, Expected, Problem};

/// What a bucket list is asked for with, as it was given; null where it was not.
#[derive(Clone, Debug, Default)]
pub struct Arguments {
    /// The largest size asked for.
    pub maximum: Value,
    /// An explicit list.
    pub bs: Value,
    /// Whether a live size may be padded to a larger bucket; true unless given.
    pub padding: Value,
    /// Tokens for each request; 1 unless given.
    pub num_tokens_per_bs: Value,
    /// What every size is a multiple of; 1 unless given.
    pub alignment: Value,
    /// What every size times `num_tokens_per_bs` is a multiple of; 1 unless given.
    pub token_alignment: Value,
    /// The largest size that the engine can run.
    pub limit: Value,
    /// How many graphs there may be.
    pub max_graphs: Value,
    /// How many bytes the graphs may take together.
    pub max_bytes: Value,
    /// The bytes of one graph: the same for each size, or an object with a number for each.
    pub bytes_per_size: Value,
    /// The default list to take where there is no explicit one; `default` unless given.
    pub preset: Value,
}

/// The names of the default lists.
pub const PRESETS: [&str; 2] = ["default", "dense"];

pub(super) struct Checked {
    maximum: u32,
    pub(super) bs: Option<Vec<u32>>,
    pub(super) num_tokens_per_bs: u32,
    pub(super) dense: bool,
    pub(super) rules: Rules,
    bytes: Option<BytesPerSize>,
}

/// The bytes of one graph.
pub(crate) enum BytesPerSize {
    /// The same for each.
    Same(u64),
    /// By size, unchecked.
    Each(HashMap<String, Value>),
}

impl Arguments {
    /// `name` is what the caller calls the maximum.
    pub(super) fn check(&self, name: &'static str) -> Result<Checked, ConfigError> {
        let mut checker = Checker::default();
        let maximum = checker.size(name, &self.maximum);
        let bs = checker.sizes("bs", &self.bs);
        let limit = checker.size("limit", &self.limit);
        match (&self.maximum, &self.bs, &self.limit) {
            (Value::Null, Value::Null, _) if name == "bs" => {
                checker.report(name, &self.bs, Problem::WrongType(Expected::Sizes));
            }
            (Value::Null, Value::Null, Value::Null) => {
                checker.report(name, &self.maximum, Problem::NoMaximum { argument: name });
            }
            _ => {}
        }
        if let (Some(maximum), Some(bs)) = (maximum, &bs) {
            checker.agree(name, maximum, bs);
        }
        let padding = checker.flag("padding", &self.padding).unwrap_or(true);
        let num_tokens_per_bs = checker.size("num_tokens_per_bs", &self.num_tokens_per_bs).unwrap_or(1);
        let alignment = u64::from(checker.size("alignment", &self.alignment).unwrap_or(1));
        let token_alignment = u64::from(checker.size("token_alignment", &self.token_alignment).unwrap_or(1));
        // The requests whose tokens are a multiple of `token_alignment`.
        let of_tokens = token_alignment / gcd(token_alignment, num_tokens_per_bs.into());
        let step = alignment / gcd(alignment, of_tokens) * of_tokens;
        let alignment = u32::try_from(step).ok().filter(|step| *step <= LARGEST_SIZE);
        if alignment.is_none() {
            checker.report("alignment", &self.alignment, Problem::StepTooLarge { step });
        }
        let max_graphs = checker.size("max_graphs", &self.max_graphs);
        let max_bytes = checker.count("max_bytes", &self.max_bytes);
        let bytes = BytesPerSize::check(&mut checker, &self.bytes_per_size, ("max_bytes", &self.max_bytes));
        let preset = checker.word("preset", &PRESETS, &self.preset, Problem::UnknownPreset);
        let rules = Rules { padding, alignment: alignment.unwrap_or(1), limit, max_graphs, max_bytes };
        let maximum = maximum.or(limit).unwrap_or_default();
        let dense = preset == Some(PRESETS[1]);
        Ok(checker.finish(Checked { maximum, bs, num_tokens_per_bs, dense, rules, bytes })?)
    }
}

impl BytesPerSize {
    /// `budget` is the argument, by name and value, that needs the bytes to be given.
    pub(crate) fn check(checker: &mut Checker, given: &Value, budget: (&str, &Value)) -> Option<Self> {
        let path = "bytes_per_size";
        match given {
            Value::Null if *budget.1 != Value::Null => {
                checker.report(budget.0, budget.1, Problem::NoBytesPerSize);
                None
            }
            Value::Null => None,
            // Of entries with one name the first counts.
            Value::Object(table) => Some(Self::Each(table.iter().rev().cloned().collect())),
            Value::Int(_) => checker.count(path, given).map(Self::Same),
            other => {
                checker.report(path, other, Problem::WrongType(Expected::BytesPerSize));
                None
            }
        }
    }

    /// The bytes of the graph of a size.
    pub(crate) fn of(&self, checker: &mut Checker, size: u32) -> u64 {
        let (path, name) = (format!("bytes_per_size[{size}]"), size.to_string());
        match self {
            Self::Same(bytes) => return *bytes,
            Self::Each(table) => match table.get(&name) {
                None => checker.report(&path, &Value::Null, Problem::NoBytesOfSize),
                Some(value) => {
                    checker.given(&path, value, Expected::Count);
                    return checker.count(&path, value).unwrap_or_default();
                }
            },
        }
        0
    }
}

impl Checked {
    pub(super) fn buckets(&self, default: impl FnOnce(u32) -> Vec<u32>) -> Result<Buckets, ConfigError> {
        // Nobody named the entries of a default list, so they move to the next multiple where named ones are dropped.
        let alignment = self.rules.alignment;
        let align = |size: u32| match size.next_multiple_of(alignment) {
            up if up > LARGEST_SIZE => up - alignment, // no size at all: the largest multiple that is one
            up => up,
        };
        let asked = self.bs.clone().unwrap_or_else(|| default(self.maximum).into_iter().map(align).collect());
        let buckets = Buckets::new(asked, self.rules);
        let Some(bytes) = &self.bytes else { return Ok(buckets) };
        let mut checker = Checker::default();
        let table: BTreeMap<u32, u64> =
            buckets.sizes.iter().map(|&size| (size, bytes.of(&mut checker, size))).collect();
        Ok(checker.finish(buckets.weighed(table))?)
    }
}

fn gcd(a: u64, b: u64) -> u64 {
    if b == 0 { a } else { gcd(b, a % b) }
}
