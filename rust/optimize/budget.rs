//! The list that pads the least within a budget of bytes, where graphs of different sizes take different bytes.
//!
//! Lists are built from the smallest size on. Of two beginnings that end in one size, the one that pads no less, takes no
//! fewer bytes and has no fewer graphs can be forgotten. That alone keeps too many. So bytes and graphs are given prices,
//! under which the best completion of every beginning is found in one sweep from the end, and with it a bound: a beginning
//! whose priced total is not below the best list known so far cannot lead to a better one. Prices only decide how much is
//! forgotten early; the result is exact with any.

use super::Candidates;
use super::layers::too_many;
use crate::error::ConfigError;

/// How many beginnings are kept at once: some 128 MiB of them.
const KEPT: usize = 1 << 21;

/// What a list has to keep to.
pub(super) struct Constraint<'b> {
    /// The bytes of each candidate's graph.
    pub(super) bytes: &'b [u64],
    pub(super) budget: u64,
    pub(super) max_graphs: usize,
}

/// What a list, or a part of one, comes to.
#[derive(Clone, Copy, Default)]
struct Total {
    padding: u128,
    bytes: u128,
    graphs: usize,
}

impl Total {
    fn and(self, other: Self) -> Self {
        Self {
            padding: self.padding + other.padding,
            bytes: self.bytes + other.bytes,
            graphs: self.graphs + other.graphs,
        }
    }
}

/// The beginning of a list.
struct Beginning {
    total: Total,
    /// Where it ends, and the beginning without its last size.
    end: usize,
    before: usize,
}

/// For each beginning the best completion under prices: what it costs, what it comes to, and its first size.
struct Completions {
    cost: Vec<f64>,
    total: Vec<Total>,
    next: Vec<usize>,
    prices: [f64; 2],
}

struct Search<'c> {
    candidates: &'c Candidates,
    constraint: &'c Constraint<'c>,
    /// The best list known, and its padding.
    best: (u128, Vec<usize>),
}

/// The positions behind the buckets of the best list, ascending. `unconstrained` is the best list without regard to bytes;
/// the largest candidate alone fits the budget.
///
/// # Errors
/// `too-many-sizes`, where the bounds leave more open than can be kept.
pub(super) fn constrained(
    candidates: &Candidates,
    constraint: &Constraint<'_>,
    unconstrained: Vec<usize>,
) -> Result<Vec<usize>, ConfigError> {
    let bytes = unconstrained.iter().map(|at| u128::from(constraint.bytes[at - 1])).sum::<u128>();
    if bytes <= constraint.budget.into() {
        return Ok(unconstrained);
    }
    let ends = candidates.len();
    let mut search = Search { candidates, constraint, best: (candidates.padding(0, ends), vec![ends]) };
    let completions = search.price();
    search.run(&completions)?;
    Ok(search.best.1)
}

#[expect(clippy::cast_precision_loss, reason = "bounds leave room for it")]
impl Search<'_> {
    /// The prices with the highest bound, nearly; the lists met on the way are candidates for the best one.
    fn price(&mut self) -> Completions {
        let mut prices = [0.0, 0.0];
        // One price at a time, twice: the bound is concave in both.
        for axis in [0, 1, 0, 1] {
            let is_over = |total: Total| match axis {
                0 => total.bytes > self.constraint.budget.into(),
                _ => total.graphs > self.constraint.max_graphs,
            };
            let with = |price: f64| {
                let mut prices = prices;
                prices[axis] = price;
                Completions::new(self.candidates, self.constraint.bytes, prices)
            };
            let (mut low, mut high, mut found) = (0.0, 1.0, with(0.0));
            let mut seen = vec![found.list(0)];
            if is_over(found.total[0]) {
                found = with(high);
                while is_over(found.total[0]) && high < 1e60 {
                    (low, high) = (high, high * 16.0);
                    found = with(high);
                }
                for _ in 0..48 {
                    let middle = f64::midpoint(low, high);
                    let tried = with(middle);
                    if is_over(tried.total[0]) {
                        low = middle;
                    } else {
                        seen.push(tried.list(0));
                        high = middle;
                    }
                }
                prices[axis] = high;
            } else {
                prices[axis] = 0.0;
            }
            seen.push(found.list(0));
            for list in seen {
                self.offer(list);
            }
        }
        let completions = Completions::new(self.candidates, self.constraint.bytes, prices);
        self.offer(completions.list(0));
        completions
    }

    /// Takes a list for the best one if it is, with what still fits besides.
    fn offer(&mut self, mut list: Vec<usize>) {
        let Constraint { bytes, budget, max_graphs } = *self.constraint;
        let mut left = i128::from(budget) - list.iter().map(|at| i128::from(bytes[at - 1])).sum::<i128>();
        if left < 0 || list.len() > max_graphs {
            return;
        }
        while list.len() < max_graphs {
            let saving = |at: usize| {
                let above = list.partition_point(|bucket| *bucket < at);
                let below = if above == 0 { 0 } else { list[above - 1] };
                let (whole, cut) = (
                    self.candidates.padding(below, list[above]),
                    self.candidates.padding(below, at) + self.candidates.padding(at, list[above]),
                );
                whole - cut
            };
            let fits = |at: &usize| i128::from(bytes[at - 1]) <= left && list.binary_search(at).is_err();
            let Some(at) = (1..self.candidates.len()).filter(fits).max_by_key(|at| saving(*at)) else { break };
            left -= i128::from(bytes[at - 1]);
            list.insert(list.partition_point(|bucket| *bucket < at), at);
        }
        self.shift(&mut list, left);
        let befores = std::iter::once(0).chain(list.iter().copied());
        let padding = befores.zip(&list).map(|(from, to)| self.candidates.padding(from, *to)).sum();
        if padding < self.best.0 {
            self.best = (padding, list);
        }
    }

    /// Moves each bucket to where it saves the most between its neighbours, as long as one moves and the bytes allow it.
    fn shift(&self, list: &mut [usize], mut left: i128) {
        let bytes = |at: usize| i128::from(self.constraint.bytes[at - 1]);
        let mut moves = true;
        while std::mem::take(&mut moves) {
            for place in 0..list.len() - 1 {
                let (here, above) = (list[place], list[place + 1]);
                let below = if place == 0 { 0 } else { list[place - 1] };
                let padding = |at: usize| self.candidates.padding(below, at) + self.candidates.padding(at, above);
                let fits = |at: &usize| bytes(*at) <= left + bytes(here);
                let best = (below + 1..above).filter(fits).min_by_key(|at| padding(*at)).unwrap_or(here);
                if padding(best) < padding(here) {
                    left += bytes(here) - bytes(best);
                    list[place] = best;
                    moves = true;
                }
            }
        }
    }

    fn run(&mut self, completions: &Completions) -> Result<(), ConfigError> {
        let ends = self.candidates.len();
        let [price, graph_price] = completions.prices;
        let (budget, max_graphs) = (u128::from(self.constraint.budget), self.constraint.max_graphs);
        let allowance = price * self.constraint.budget as f64 + graph_price * max_graphs as f64;
        let mut beginnings = vec![Beginning { total: Total::default(), end: 0, before: 0 }];
        // The beginnings that end at each position, by what they cost.
        let mut at: Vec<Vec<(f64, usize)>> = vec![vec![(0.0, 0)]];
        for end in 1..=ends {
            let bytes = self.constraint.bytes[end - 1];
            let own = price * bytes as f64 + graph_price + completions.cost[end];
            // Padding is a whole number; what is lost to rounding must not hide a better list.
            let best = float(self.best.0);
            let most = best - 1.0 + allowance + 1e-9 * (best + allowance) - own;
            let mut longer: Vec<(Total, usize)> = Vec::new();
            for from in (0..end).rev() {
                let padding = self.candidates.padding(from, end);
                let most = most - float(padding);
                if most < 0.0 {
                    break; // earlier beginnings leave a longer run, which pads more
                }
                let run = Total { padding, bytes: bytes.into(), graphs: 1 };
                for &(_, before) in at[from].iter().take_while(|(cost, _)| *cost <= most) {
                    let total = beginnings[before].total.and(run);
                    if total.bytes <= budget && total.graphs <= max_graphs {
                        longer.push((total, before));
                    }
                }
            }
            longer.sort_unstable_by_key(|(total, _)| (total.bytes, total.padding, total.graphs));
            // By number of graphs: the least padding of what takes no more bytes.
            let mut least = vec![u128::MAX; max_graphs + 1];
            let mut kept = Vec::new();
            for (total, before) in longer {
                if least[total.graphs] <= total.padding {
                    continue;
                }
                least[total.graphs..].iter_mut().for_each(|least| *least = total.padding.min(*least));
                let cost = float(total.padding) + price * total.bytes as f64 + graph_price * total.graphs as f64;
                kept.push((cost, beginnings.len()));
                beginnings.push(Beginning { total, end, before });
                let whole = total.and(completions.total[end]);
                if whole.bytes <= budget && whole.graphs <= max_graphs && whole.padding < self.best.0 {
                    let mut list = Vec::new();
                    let mut part = beginnings.len() - 1;
                    while part > 0 {
                        list.push(beginnings[part].end);
                        part = beginnings[part].before;
                    }
                    list.reverse();
                    list.extend(completions.list(end));
                    self.best = (whole.padding, list);
                }
            }
            kept.sort_unstable_by(|one, other| one.0.total_cmp(&other.0));
            at.push(kept);
            if beginnings.len() > KEPT {
                return Err(too_many(ends, max_graphs));
            }
        }
        Ok(())
    }
}

/// A number for a bound. Nearly all fit 64 bits, which convert many times faster.
#[expect(clippy::cast_precision_loss, reason = "bounds leave room for it")]
fn float(number: u128) -> f64 {
    u64::try_from(number).map_or_else(|_| number as f64, |number| number as f64)
}

impl Completions {
    #[expect(clippy::cast_precision_loss, reason = "bounds leave room for it")]
    fn new(candidates: &Candidates, bytes: &[u64], prices: [f64; 2]) -> Self {
        let ends = candidates.len();
        let mut all = Self {
            cost: vec![f64::INFINITY; ends + 1],
            total: vec![Total::default(); ends + 1],
            next: vec![ends; ends + 1],
            prices,
        };
        all.cost[ends] = 0.0;
        for from in (0..ends).rev() {
            // A run that begins earlier ends no later, by the quadrangle inequality.
            for to in from + 1..=all.next[from + 1].max(from + 1) {
                let padding = float(candidates.padding(from, to));
                let cost = padding + prices[0] * bytes[to - 1] as f64 + prices[1] + all.cost[to];
                if cost < all.cost[from] {
                    (all.cost[from], all.next[from]) = (cost, to);
                }
            }
            let to = all.next[from];
            let run = Total { padding: candidates.padding(from, to), bytes: bytes[to - 1].into(), graphs: 1 };
            all.total[from] = run.and(all.total[to]);
        }
        all
    }

    /// The positions behind the buckets of the best completion of what ends at a position.
    fn list(&self, from: usize) -> Vec<usize> {
        let steps = std::iter::successors(Some(from), |&at| (at + 1 < self.next.len()).then(|| self.next[at]));
        steps.skip(1).collect()
    }
}
