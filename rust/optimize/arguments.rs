//! What a list is optimized for, checked.

use std::collections::BTreeMap;

use super::Candidates;
use crate::buckets::BytesPerSize;
use crate::config::{Checker, LARGEST_SIZE};
use crate::document::Value;
use crate::error::{ConfigError, Expected, Problem};

/// What a list is optimized for, as it was given; null where it was not.
#[derive(Clone, Debug, Default)]
pub struct Arguments {
    /// The steps of each live size.
    pub histogram: Value,
    /// How many graphs there may be.
    pub max_graphs: Value,
    /// How many bytes the graphs may take together.
    pub bytes: Value,
    /// The bytes of one graph: the same for each size, or an object with a number for each.
    pub bytes_per_size: Value,
    /// The largest size; without it the limit, and without that the largest one seen.
    pub maximum: Value,
    /// What every size is a multiple of; 1 unless given.
    pub alignment: Value,
    /// The largest size that the engine can run.
    pub limit: Value,
}

pub(super) struct Checked {
    /// Live sizes with at least one step, ascending.
    pub(super) traffic: Vec<(u32, u64)>,
    pub(super) max_graphs: Option<usize>,
    pub(super) budget: Option<u64>,
    bytes: Option<BytesPerSize>,
    maximum: u32,
    alignment: u32,
}

impl Arguments {
    /// The sizes that a list may have, ascending, where the arguments are good: what `bytes_per_size` is asked about.
    ///
    /// # Errors
    /// Everything that is wrong with the arguments.
    pub fn candidates(&self) -> Result<Vec<u32>, ConfigError> {
        Ok(self.check()?.candidates().sizes)
    }

    pub(super) fn check(&self) -> Result<Checked, ConfigError> {
        let mut checker = Checker::default();
        let traffic = traffic(&mut checker, &self.histogram);
        let max_graphs = checker.size("max_graphs", &self.max_graphs).map(|graphs| graphs as usize);
        let budget = checker.count("bytes", &self.bytes);
        let bytes = BytesPerSize::check(&mut checker, &self.bytes_per_size, ("bytes", &self.bytes));
        let maximum = checker.size("maximum", &self.maximum);
        let alignment = checker.size("alignment", &self.alignment).unwrap_or(1);
        let limit = checker.size("limit", &self.limit);
        let full = limit.unwrap_or(LARGEST_SIZE) / alignment * alignment;
        if full == 0 {
            checker.report("limit", &self.limit, Problem::LimitBelowAlignment { alignment });
        }
        let largest = maximum.or(limit).or(traffic.last().map(|(size, _)| *size)).unwrap_or(1);
        let maximum = largest.next_multiple_of(alignment).min(full);
        Ok(checker.finish(Checked { traffic, max_graphs, budget, bytes, maximum, alignment })?)
    }
}

/// The live sizes that have steps, ascending.
fn traffic(checker: &mut Checker, histogram: &Value) -> Vec<(u32, u64)> {
    let path = "histogram";
    let Value::Object(entries) = histogram else {
        checker.report(path, histogram, Problem::WrongType(Expected::Histogram));
        return Vec::new();
    };
    let (mut steps_of, mut is_good) = (BTreeMap::new(), true);
    for (name, value) in entries {
        let path = format!("{path}[{name}]");
        // Keys are text in JSON, and here.
        let size = name.parse().map_or_else(|_| Value::Text(name.clone()), Value::Int);
        checker.given(&path, value, Expected::Count);
        match (checker.size(&path, &size), checker.count(&path, value)) {
            (Some(size), Some(steps)) if steps_of.insert(size, steps).is_some() => {
                checker.report(&path, value, Problem::RepeatedKey);
            }
            (Some(_), Some(_)) => continue,
            _ => {}
        }
        is_good = false;
    }
    steps_of.retain(|_, steps| *steps > 0);
    if steps_of.is_empty() && is_good {
        checker.report(path, histogram, Problem::NoSteps);
    }
    steps_of.into_iter().collect()
}

impl Checked {
    pub(super) fn candidates(&self) -> Candidates {
        let mut candidates = Candidates { sizes: Vec::new(), steps: vec![0], rows: vec![0] };
        let (mut steps_before, mut rows_before) = (0, 0);
        for &(size, steps) in self.traffic.iter().filter(|(size, _)| *size <= self.maximum) {
            let aligned = size.next_multiple_of(self.alignment);
            if candidates.sizes.last() != Some(&aligned) {
                candidates.sizes.push(aligned);
                candidates.steps.push(0);
                candidates.rows.push(0);
            }
            steps_before += u128::from(steps);
            rows_before += u128::from(steps) * u128::from(size);
            let at = candidates.len();
            (candidates.steps[at], candidates.rows[at]) = (steps_before, rows_before);
        }
        if candidates.sizes.last() != Some(&self.maximum) {
            candidates.sizes.push(self.maximum);
            candidates.steps.push(steps_before);
            candidates.rows.push(rows_before);
        }
        candidates
    }

    /// The bytes of each candidate's graph, where something says them.
    pub(super) fn bytes(&self, candidates: &Candidates) -> Result<Vec<u64>, ConfigError> {
        let Some(bytes) = &self.bytes else { return Ok(Vec::new()) };
        let mut checker = Checker::default();
        let bytes: Vec<u64> = candidates.sizes.iter().map(|&size| bytes.of(&mut checker, size)).collect();
        if let (Some(budget), Some(&largest)) = (self.budget, bytes.last())
            && largest > budget
        {
            let problem = Problem::BudgetTooSmall { size: self.maximum, bytes: largest };
            checker.report("bytes", &Value::Int(i64::try_from(budget).unwrap_or(i64::MAX)), problem);
        }
        Ok(checker.finish(bytes)?)
    }
}
