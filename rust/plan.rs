//! What a fill has to do, grouped into the fewest calls. They are carried out in this order:
//!
//! 1. `fills`: regions too large, or too scattered, to be worth copying from a constant;
//! 2. `groups`: one grouped copy call each. Bytes do not care what they mean, so all same-type copies of a device, and
//!    all small tails (copies from a constant), are one group, in the widest element type that all of them share; each
//!    pair of types to cast between is one more;
//! 3. `copies`: one call each, for what would slow a whole group down or would not gain from one.
//!
//! No region is written twice, but for a live row whose source is shorter than the row: it may be padded whole by 1 or 2
//! and then copied over by 3.

use crate::dtype::DType;
use crate::slot::{Dims, Region, Runs, SlotLayout};
use crate::step::{LiveRows, Pad, Source, Work};

/// The most contiguous runs that a region is split into for a group. A run costs a view of the source on every step, about
/// half a microsecond; one strided tensor would drop the whole group to a slow path that costs 50 more (H200); and a call
/// of its own costs about 10, so beyond this many runs the call is cheaper.
pub const MAX_RUNS: usize = 8;

/// From this many bytes on, a source is copied by a call of its own. The grouped kernel copies 64 MiB in 80 us where a plain
/// copy takes 34 (H200): it loses 0.7 us for each MiB, and the plain copy costs a launch, 3 to 5 us.
pub const LARGE_COPY_BYTES: usize = 4 << 20;

/// From this many bytes on, padding is written by a fill of its own: below, reading a constant is cheaper than a launch, and
/// constants of this size are all the memory that small tails need.
pub const LARGE_PAD_BYTES: usize = 256 << 10;

/// One call that writes one value.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Fill {
    /// The slot, by position.
    pub slot: usize,
    /// What is written.
    pub region: Region,
    /// With what.
    pub pad: Pad,
}

/// Padding that a group copies from a constant.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Tail {
    /// The slot, by position.
    pub slot: usize,
    /// What is written, in elements of the slot.
    pub runs: Runs,
    /// With what.
    pub pad: Pad,
}

/// Live rows that a group copies from a source whose elements lie in row-major order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Head {
    /// The slot, by position.
    pub slot: usize,
    /// The shape of what is written, which is the source's.
    pub shape: Dims,
    /// What is written, in elements of the slot: the source's elements, in order.
    pub runs: Runs,
}

/// One grouped copy call.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CopyGroup {
    /// Where all of it is.
    pub device: String,
    /// The type that is written: the slots' own where the group casts, else one in which all its bytes can be moved.
    pub to: DType,
    /// The type that is read; the same as `to` where nothing is cast.
    pub from: DType,
    /// Its padding.
    pub tails: Vec<Tail>,
    /// Its live rows.
    pub heads: Vec<Head>,
}

/// Live rows that are copied by a call of their own, from a source of any layout, type or place.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Copy {
    /// The slot, by position.
    pub slot: usize,
    /// What is written.
    pub region: Region,
}

/// What a fill carries out, in order.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct FillPlan {
    /// Fills, first.
    pub fills: Vec<Fill>,
    /// Grouped copies, second.
    pub groups: Vec<CopyGroup>,
    /// Copies of their own, last.
    pub copies: Vec<Copy>,
}

impl FillPlan {
    /// The calls for what a planner found to be done.
    pub fn new(slots: &[SlotLayout], work: &[Work], sources: &[Option<Source>]) -> Self {
        let mut plan = Self::default();
        for (index, (slot, work)) in slots.iter().zip(work).enumerate() {
            if let (Some(live), Some(Some(source))) = (work.live, sources.get(index)) {
                plan.add_live(index, slot, source, live);
            }
            if let Some((rows, pad)) = &work.tail {
                plan.pad(index, slot, slot.region(rows.clone(), None), *pad);
            }
        }
        plan
    }

    /// How many calls it takes.
    pub fn calls(&self) -> usize {
        self.fills.len() + self.groups.len() + self.copies.len()
    }

    /// The group of a device that casts between two types, or, where they are one, the group that moves bytes.
    fn group(&mut self, device: &str, to: DType, from: DType) -> &mut CopyGroup {
        let casts = to != from;
        let found = self.groups.iter().position(|group| {
            group.device == device && if casts { (group.to, group.from) == (to, from) } else { group.to == group.from }
        });
        let index = found.unwrap_or_else(|| {
            let own = if to.is_grouped() { to } else { DType::carrier(to.itemsize()) };
            let (to, from) = if casts { (to, from) } else { (own, own) };
            self.groups.push(CopyGroup { device: device.to_owned(), to, from, tails: Vec::new(), heads: Vec::new() });
            self.groups.len() - 1
        });
        let group = &mut self.groups[index];
        if !casts && group.to != to {
            // Types differ, so their bytes are moved as integers; the narrower of two sizes divides the other.
            let carrier = DType::carrier(group.to.itemsize().min(to.itemsize()));
            (group.to, group.from) = (carrier, carrier);
        }
        group
    }

    fn pad(&mut self, index: usize, slot: &SlotLayout, region: Region, pad: Pad) {
        let numel = region.numel();
        if numel == 0 {
            return;
        }
        if region.run_count() > MAX_RUNS || numel.saturating_mul(slot.dtype.itemsize()) >= LARGE_PAD_BYTES {
            self.fills.push(Fill { slot: index, region, pad });
        } else {
            let runs = region.runs();
            self.group(&slot.device, slot.dtype, slot.dtype).tails.push(Tail { slot: index, runs, pad });
        }
    }

    /// Adds the live rows, and the rest of each where the source is narrower than the slot.
    fn add_live(&mut self, index: usize, slot: &SlotLayout, source: &Source, live: LiveRows) {
        let rows = 0..live.rows;
        let Some(width) = live.width else {
            return self.copy(index, slot, slot.region(rows, None), source, live.from, false);
        };
        let rest = slot.region(rows.clone(), Some(width..slot.width()));
        // Scattered over many rows, the rest of each would take a call of its own. Padding the rows whole before they are
        // copied into is one long run instead, and costs no call; the copy then must come after the group.
        let alone = rest.run_count() > MAX_RUNS;
        let rest = if alone { slot.region(rows.clone(), None) } else { rest };
        self.pad(index, slot, rest, Pad::Value);
        self.copy(index, slot, slot.region(rows, Some(0..width)), source, live.from, alone);
    }

    fn copy(&mut self, index: usize, slot: &SlotLayout, region: Region, source: &Source, from: DType, alone: bool) {
        let numel = region.numel();
        if numel == 0 {
            return;
        }
        let groupable = from == slot.dtype || (from.is_grouped() && slot.dtype.is_grouped());
        if alone
            || !groupable
            || !source.is_contiguous()
            || source.device != slot.device
            || region.run_count() > MAX_RUNS
            || numel.saturating_mul(slot.dtype.itemsize()) >= LARGE_COPY_BYTES
        {
            self.copies.push(Copy { slot: index, region });
        } else {
            let runs = region.runs();
            let head = Head { slot: index, shape: region.shape, runs };
            self.group(&slot.device, slot.dtype, from).heads.push(head);
        }
    }
}
