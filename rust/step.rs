//! What one fill has to do to each slot, once everything is checked that can be checked without reading memory.
//!
//! A planner knows the slots. For the live sizes, the bucket and what the batch brought, it says of each slot which rows are
//! copied and which are padded. How that is carried out is another question, with two answers: grouped calls
//! ([`crate::plan`]), or one table for a kernel ([`crate::table`]).

use std::borrow::Cow;
use std::ops::Range;

use smallvec::smallvec;

use crate::dtype::DType;
use crate::error::SlotFault;
use crate::slot::{Axis, Dims, Feed, PaddingPolicy, SlotLayout, SourceDevice};

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
    pub dtype: Cow<'static, str>,
    /// Its shape.
    pub shape: Dims,
    /// Where it is, spelled in full.
    pub device: Cow<'static, str>,
    /// Elements from one index to the next, along each dimension.
    pub strides: Dims,
}

impl Source {
    /// The elements from its first one to the end of its last.
    pub fn span(&self) -> usize {
        if self.shape.contains(&0) {
            return 0;
        }
        let steps = self.shape.iter().zip(&self.strides);
        steps.fold(1, |span, (size, stride)| (size - 1).saturating_mul(*stride).saturating_add(span))
    }

    /// Whether its strides are those of row-major order without gaps, also along dimensions of one index: others cannot be
    /// viewed in another type.
    pub fn is_contiguous(&self) -> bool {
        let mut step = 1_usize;
        self.shape.len() == self.strides.len()
            && self.shape.iter().zip(&self.strides).rev().all(|(size, stride)| {
                let is_next = *stride == step;
                step = step.saturating_mul(*size);
                is_next
            })
    }
}

/// The strides of row-major order without gaps.
pub(crate) fn row_major(shape: &[usize]) -> Dims {
    let mut strides: Dims = smallvec![1; shape.len()];
    for dim in (1..shape.len()).rev() {
        strides[dim - 1] = strides[dim].saturating_mul(shape[dim]);
    }
    strides
}

/// What padding is written with.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pad {
    /// Zeros.
    Zero,
    /// The slot's pad value.
    Value,
}

/// The live rows that a source brings.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LiveRows {
    /// How many; of no meaning where the axis is none.
    pub rows: usize,
    /// The length of the source's last dimension, where the slot's is longer.
    pub width: Option<usize>,
    /// The source's element type.
    pub from: DType,
}

/// What a fill does to one slot.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Work {
    /// What is copied.
    pub live: Option<LiveRows>,
    /// Rows that are padded, and with what.
    pub tail: Option<(Range<usize>, Pad)>,
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
    pub fn slots(&self) -> &[SlotLayout] {
        &self.slots
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

    /// What a fill of these sizes does with these sources, one for each slot.
    ///
    /// `unread` says that there was no batch to read: a slot with a function is then padded whole, where otherwise a
    /// function that gave nothing leaves its slot as it is.
    ///
    /// # Errors
    /// The first slot, in order of registration, that cannot be filled; or a bucket above what the buffers hold.
    pub fn work(&self, sizes: &Sizes, sources: &[Option<Source>], unread: bool) -> Result<Vec<Work>, SlotFault> {
        self.check_bucket(sizes)?;
        let sources = sources.iter().map(Option::as_ref).chain(std::iter::repeat(None));
        self.slots.iter().zip(sources).map(|(slot, source)| work(slot, sizes, source, unread)).collect()
    }
}

fn work(slot: &SlotLayout, sizes: &Sizes, source: Option<&Source>, unread: bool) -> Result<Work, SlotFault> {
    let padded = slot.padded_rows(sizes.padded(slot.axis))?;
    let live = slot.live_rows(sizes.raw(slot.axis));
    let mut work = Work::default();
    let tail_from = match (slot.feed, source) {
        (Feed::Elsewhere, _) => live,
        (Feed::Function, None) if !unread => return Ok(work),
        (_, None) => {
            if slot.required && !sizes.is_idle() {
                return Err(SlotFault::field_missing(&slot.name));
            }
            0
        }
        (_, Some(source)) => {
            let (rows, width) = check_shape(slot, source, live, padded)?;
            check_device(slot, source)?;
            work.live = Some(LiveRows { rows, width, from: check_dtype(slot, source)? });
            rows
        }
    };
    work.tail = match slot.policy {
        PaddingPolicy::Zero => Some((tail_from..padded, Pad::Zero)),
        PaddingPolicy::FillSentinel => Some((tail_from..padded, Pad::Value)),
        PaddingPolicy::KeepPad | PaddingPolicy::ForeachCopy | PaddingPolicy::FillOnce => None,
    };
    Ok(work)
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
    let mut sizes = source.shape.iter().zip(&slot.shape).enumerate();
    let is_whole = same_rank
        && sizes.all(|(dim, (given, whole))| {
            *given == if dim == slot.dim && slot.axis != Axis::None { wanted } else { *whole }
        });
    if is_whole && (rows <= padded || slot.axis == Axis::None) {
        return Ok((rows, None)); // as nearly always, and without a shape to compare with
    }
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
