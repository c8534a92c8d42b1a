//! What one fill must do: which rows are copied and which are padded, grouped into the fewest calls.
//!
//! A planner knows the slots. For the live sizes, the bucket and what the batch brought, it checks everything that can be
//! checked without reading memory, and then says what to carry out, in this order:
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
use crate::error::SlotFault;
use crate::slot::{Axis, Feed, PaddingPolicy, Region, Runs, SlotLayout, SourceDevice};

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

/// The live sizes and the bucket, along both axes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Sizes {
    raw_bs: usize,
    padded_bs: usize,
    raw_num_tokens: usize,
    padded_num_tokens: usize,
}

impl Sizes {
    /// The sizes, once `0 <= raw <= padded` holds along both axes.
    ///
    /// # Errors
    /// A negative size, or more live rows than the bucket has.
    pub fn checked(
        raw_bs: i64,
        padded_bs: i64,
        raw_num_tokens: i64,
        padded_num_tokens: i64,
    ) -> Result<Self, SlotFault> {
        let size = |argument, size| usize::try_from(size).map_err(|_| SlotFault::negative_size(argument, size));
        let sizes = Self {
            raw_bs: size("raw_bs", raw_bs)?,
            padded_bs: size("padded_bs", padded_bs)?,
            raw_num_tokens: size("raw_num_tokens", raw_num_tokens)?,
            padded_num_tokens: size("padded_num_tokens", padded_num_tokens)?,
        };
        for axis in [Axis::Bs, Axis::Tokens] {
            if sizes.raw(axis) > sizes.padded(axis) {
                return Err(SlotFault::raw_above_padded(axis, sizes.raw(axis), sizes.padded(axis)));
            }
        }
        Ok(sizes)
    }

    pub(crate) fn raw(&self, axis: Axis) -> usize {
        if axis == Axis::Bs { self.raw_bs } else { self.raw_num_tokens }
    }

    pub(crate) fn padded(&self, axis: Axis) -> usize {
        if axis == Axis::Bs { self.padded_bs } else { self.padded_num_tokens }
    }

    fn is_idle(&self) -> bool {
        self.raw_bs == 0 && self.raw_num_tokens == 0
    }
}

/// What a batch, or a slot's function, brought for a slot.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Source {
    /// Its element type, by torch's name.
    pub dtype: String,
    /// Its shape.
    pub shape: Vec<usize>,
    /// Where it is, spelled in full.
    pub device: String,
    /// Whether its elements lie in row-major order without gaps.
    pub contiguous: bool,
}

/// What padding is written with.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pad {
    /// Zeros.
    Zero,
    /// The slot's pad value.
    Value,
}

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
    pub shape: Vec<usize>,
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
        if region.run_count() > MAX_RUNS || numel * slot.dtype.itemsize() >= LARGE_PAD_BYTES {
            self.fills.push(Fill { slot: index, region, pad });
        } else {
            let runs = region.runs();
            self.group(&slot.device, slot.dtype, slot.dtype).tails.push(Tail { slot: index, runs, pad });
        }
    }

    fn copy(&mut self, index: usize, slot: &SlotLayout, region: Region, source: &Source, from: DType, alone: bool) {
        let numel = region.numel();
        if numel == 0 {
            return;
        }
        let groupable = from == slot.dtype || (from.is_grouped() && slot.dtype.is_grouped());
        if alone
            || !groupable
            || !source.contiguous
            || source.device != slot.device
            || region.run_count() > MAX_RUNS
            || numel * slot.dtype.itemsize() >= LARGE_COPY_BYTES
        {
            self.copies.push(Copy { slot: index, region });
        } else {
            let runs = region.runs();
            let head = Head { slot: index, shape: region.shape, runs };
            self.group(&slot.device, slot.dtype, from).heads.push(head);
        }
    }
}

/// The slots of a registry, ready to be planned for.
#[derive(Debug, Clone)]
pub struct Planner {
    slots: Vec<SlotLayout>,
    max_bs: usize,
    max_num_tokens: usize,
}

impl Planner {
    /// A planner for these slots, whose buffers hold that many requests and tokens.
    pub fn new(slots: Vec<SlotLayout>, max_bs: usize, max_num_tokens: usize) -> Self {
        Self { slots, max_bs, max_num_tokens }
    }

    /// The slots, in order of registration.
    pub fn slots(&self) -> impl Iterator<Item = &SlotLayout> {
        self.slots.iter()
    }

    /// Whether every slot has whole rows in a bucket.
    ///
    /// # Errors
    /// A bucket above what the buffers hold, or one of no whole number of some slot's rows.
    pub fn check_bucket(&self, sizes: &Sizes) -> Result<(), SlotFault> {
        for (axis, capacity) in [(Axis::Bs, self.max_bs), (Axis::Tokens, self.max_num_tokens)] {
            if sizes.padded(axis) > capacity {
                return Err(SlotFault::above_capacity(axis.padded(), sizes.padded(axis), capacity));
            }
        }
        self.slots.iter().try_for_each(|slot| slot.padded_rows(sizes.padded(slot.axis)).map(|_| ()))
    }

    /// What a fill of these sizes must do with these sources, one for each slot.
    ///
    /// `unread` says that there was no batch to read: a slot with a function is then padded whole, where otherwise a
    /// function that gave nothing leaves its slot as it is.
    ///
    /// # Errors
    /// The first slot, in order of registration, that cannot be filled; or a bucket above what the buffers hold.
    pub fn plan(&self, sizes: &Sizes, sources: &[Option<Source>], unread: bool) -> Result<FillPlan, SlotFault> {
        self.check_bucket(sizes)?;
        let mut plan = FillPlan::default();
        for (index, slot) in self.slots.iter().enumerate() {
            let source = sources.get(index).and_then(Option::as_ref);
            add_slot(&mut plan, index, slot, sizes, source, unread)?;
        }
        Ok(plan)
    }
}

fn add_slot(
    plan: &mut FillPlan,
    index: usize,
    slot: &SlotLayout,
    sizes: &Sizes,
    source: Option<&Source>,
    unread: bool,
) -> Result<(), SlotFault> {
    let padded = slot.padded_rows(sizes.padded(slot.axis))?;
    let live = slot.live_rows(sizes.raw(slot.axis));
    let tail_from = match (slot.feed, source) {
        (Feed::Elsewhere, _) => live,
        (Feed::Function, None) if !unread => return Ok(()),
        (_, None) => {
            if slot.required && !sizes.is_idle() {
                return Err(SlotFault::field_missing(&slot.name));
            }
            0
        }
        (_, Some(source)) => {
            let (rows, width) = check_shape(slot, source, live, padded)?;
            check_device(slot, source)?;
            let from = check_dtype(slot, source)?;
            add_head(plan, index, slot, source, from, rows, width);
            rows
        }
    };
    let pad = match slot.policy {
        PaddingPolicy::Zero => Pad::Zero,
        PaddingPolicy::FillSentinel => Pad::Value,
        PaddingPolicy::KeepPad | PaddingPolicy::ForeachCopy | PaddingPolicy::FillOnce => {
            return Ok(());
        }
    };
    plan.pad(index, slot, slot.region(tail_from..padded, None), pad);
    Ok(())
}

/// Adds the live rows, and the rest of each where the source is narrower than the slot.
fn add_head(
    plan: &mut FillPlan,
    index: usize,
    slot: &SlotLayout,
    source: &Source,
    from: DType,
    rows: usize,
    width: Option<usize>,
) {
    let Some(width) = width else {
        return plan.copy(index, slot, slot.region(0..rows, None), source, from, false);
    };
    let rest = slot.region(0..rows, Some(width..slot.width()));
    // Scattered over many rows, the rest of each would take a call of its own. Padding the rows whole before they are
    // copied into is one long run instead, and costs no call; the copy then must come after the group.
    let alone = rest.run_count() > MAX_RUNS;
    let rest = if alone { slot.region(0..rows, None) } else { rest };
    plan.pad(index, slot, rest, Pad::Value);
    plan.copy(index, slot, slot.region(0..rows, Some(0..width)), source, from, alone);
}

/// The rows that a source has and, where it is narrower than the slot, its width.
fn check_shape(
    slot: &SlotLayout,
    source: &Source,
    live: usize,
    padded: usize,
) -> Result<(usize, Option<usize>), SlotFault> {
    let same_rank = source.shape.len() == slot.shape.len();
    let rows = match slot.axis {
        Axis::Bs | Axis::Tokens if same_rank => source.shape[slot.dim],
        _ => 0,
    };
    let wanted = if slot.feed == Feed::Function { rows } else { live };
    let mut expected = slot.region(0..wanted, None).shape;
    let mut narrower = None;
    if let (true, true, Some(width)) = (slot.prefix, same_rank, source.shape.last().copied()) {
        if width > slot.width() {
            return Err(SlotFault::too_wide(&slot.name, slot.width(), width));
        }
        if width < slot.width() {
            narrower = Some(width);
            expected[slot.shape.len() - 1] = width;
        }
    }
    if source.shape != expected {
        let mut other_rows = expected.clone();
        if same_rank && slot.axis != Axis::None {
            other_rows[slot.dim] = rows;
        }
        return Err(if source.shape == other_rows {
            SlotFault::wrong_rows(&slot.name, live, rows)
        } else {
            SlotFault::wrong_shape(&slot.name, &expected, &source.shape)
        });
    }
    if rows > padded && slot.axis != Axis::None {
        return Err(SlotFault::too_many_rows(&slot.name, padded, rows));
    }
    Ok((rows, narrower))
}

fn check_device(slot: &SlotLayout, source: &Source) -> Result<(), SlotFault> {
    let expected = match slot.source_device {
        SourceDevice::Any => return Ok(()),
        SourceDevice::Cpu => "cpu",
        SourceDevice::Own => &slot.device,
    };
    if source.device == expected { Ok(()) } else { Err(SlotFault::wrong_device(&slot.name, expected, &source.device)) }
}

fn check_dtype(slot: &SlotLayout, source: &Source) -> Result<DType, SlotFault> {
    let from = DType::parse(&source.dtype).ok_or_else(|| SlotFault::unsupported_dtype(&slot.name, &source.dtype))?;
    if slot.allow_narrowing || slot.dtype.holds(from) {
        Ok(from)
    } else {
        Err(SlotFault::narrowing_cast(&slot.name, slot.dtype, from))
    }
}
