//! The best list of 1, 2, 3, ... graphs, each from the one before.

use super::Candidates;
use crate::document::Value;
use crate::error::{ConfigError, Issue, Problem};

/// How many cuts are kept to find a list again: 64 MiB of them.
const KEPT: usize = 1 << 24;

/// For each number of graphs the least padding, and where the last run begins.
pub(super) struct Layers {
    /// Padded rows with 1, 2, 3, ... graphs.
    pub(super) padding: Vec<u128>,
    /// By number of graphs and by end: where the last run begins.
    cuts: Vec<Vec<u32>>,
}

impl Layers {
    /// `count` layers, of which the lists of up to `graphs` graphs can be found again.
    ///
    /// # Errors
    /// `too-many-sizes`: more would have to be kept than any machine should spend on it.
    pub(super) fn new(candidates: &Candidates, count: usize, graphs: usize) -> Result<Self, ConfigError> {
        let ends = candidates.len();
        let kept = if graphs == ends { 0 } else { graphs };
        if kept.saturating_mul(ends) > KEPT {
            return Err(too_many(ends, graphs));
        }
        let mut layer: Vec<u128> = (0..=ends).map(|to| if to == 0 { 0 } else { candidates.padding(0, to) }).collect();
        let mut layers = Self { padding: vec![layer[ends]], cuts: vec![vec![0; ends + 1]] };
        for graphs in 2..=count {
            let mut next = Layer { candidates, before: &layer, best: vec![0; ends + 1], cuts: vec![0; ends + 1] };
            next.fill((graphs, ends), (graphs - 1, ends - 1));
            let Layer { best, cuts, .. } = next;
            layer = best;
            layers.padding.push(layer[ends]);
            if graphs <= kept {
                layers.cuts.push(cuts);
            }
        }
        Ok(layers)
    }

    /// The positions behind the buckets of the best list of so many graphs, ascending.
    pub(super) fn cuts(&self, graphs: usize) -> Vec<usize> {
        let ends = self.cuts[0].len() - 1;
        if graphs == ends {
            return (1..=ends).collect();
        }
        let mut chosen = vec![ends];
        for layer in self.cuts[1..graphs].iter().rev() {
            chosen.push(layer[chosen[chosen.len() - 1]] as usize);
        }
        chosen.reverse();
        chosen
    }
}

/// More sizes than so many graphs can be chosen from.
pub(super) fn too_many(sizes: usize, graphs: usize) -> ConfigError {
    Issue::new("histogram", Value::Null, Problem::TooManySizes { sizes, graphs }).into()
}

struct Layer<'c> {
    candidates: &'c Candidates,
    /// The least padding up to each end with one graph less.
    before: &'c [u128],
    best: Vec<u128>,
    cuts: Vec<u32>,
}

impl Layer<'_> {
    /// Finds the last cut for each end of a range, the middle one first: those before it are cut no later, those behind
    /// it no earlier. Ranges hold both of their ends.
    fn fill(&mut self, ends: (usize, usize), cuts: (usize, usize)) {
        let (mut first, last) = ends;
        let (mut earliest, latest) = cuts;
        while first <= last {
            let middle = usize::midpoint(first, last);
            let mut best = (u128::MAX, earliest);
            for cut in earliest..=latest.min(middle - 1) {
                let padding = self.before[cut] + self.candidates.padding(cut, middle);
                if padding < best.0 {
                    best = (padding, cut);
                }
            }
            self.best[middle] = best.0;
            #[expect(clippy::cast_possible_truncation, reason = "there are fewer sizes than a u32 counts")]
            let cut = best.1 as u32;
            self.cuts[middle] = cut;
            self.fill((first, middle - 1), (earliest, best.1));
            (first, earliest) = (middle + 1, best.1);
        }
    }
}
