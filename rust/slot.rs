//! What a static input buffer is, as plain values: its layout, its padding, and which of its rows are live.

use std::ops::Range;
use std::str::FromStr;

use smallvec::{SmallVec, smallvec};

use crate::dtype::DType;
use crate::error::SlotFault;

/// What is to be copied, and how much: which live size the rows of a slot follow.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Axis {
    /// One row for each request.
    Bs,
    /// One row for each token.
    Tokens,
    /// No rows: the whole buffer is live on every step.
    None,
}

/// What a fill does with the rows `[raw, padded)`; rows from `padded` on are never touched.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PaddingPolicy {
    /// Left alone; the caller proves that nothing reads them.
    KeepPad,
    /// Written with the slot's pad value.
    FillSentinel,
    /// Written with zeros.
    Zero,
    /// Left as the last replay's rows.
    ForeachCopy,
    /// Written once, when the buffer is made.
    FillOnce,
}

/// Where the live rows of a slot come from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Feed {
    /// The batch's field of that name.
    Field,
    /// A function of the batch, which may give any number of rows, or nothing.
    Function,
    /// The model or a hook: a fill writes the tail only.
    Elsewhere,
}

/// Where the source of a slot may live.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SourceDevice {
    /// On the slot's own device.
    Own,
    /// On the host.
    Cpu,
    /// Anywhere.
    Any,
}

/// The words that cross the border, each with its meaning.
macro_rules! words {
    ($kind:ident, $what:literal, $($word:literal => $value:ident),+) => {
        impl FromStr for $kind {
            type Err = SlotFault;

            fn from_str(word: &str) -> Result<Self, SlotFault> {
                match word {
                    $($word => Ok(Self::$value),)+
                    _ => Err(SlotFault::unknown_word($what, word, &[$($word),+])),
                }
            }
        }
    };
}

impl Axis {
    /// The argument that gives the live size along it.
    pub(crate) fn raw(self) -> &'static str {
        if self == Self::Bs { "raw_bs" } else { "raw_num_tokens" }
    }

    /// The argument that gives the bucket's size along it.
    pub(crate) fn padded(self) -> &'static str {
        if self == Self::Bs { "padded_bs" } else { "padded_num_tokens" }
    }
}

words!(Axis, "axis", "bs" => Bs, "tokens" => Tokens, "none" => None);
words!(PaddingPolicy, "padding policy", "keep_pad" => KeepPad, "fill_sentinel" => FillSentinel, "zero" => Zero,
    "foreach_copy" => ForeachCopy, "fill_once" => FillOnce);
words!(Feed, "feed", "field" => Field, "function" => Function, "elsewhere" => Elsewhere);
words!(SourceDevice, "source device", "own" => Own, "cpu" => Cpu, "any" => Any);

/// How many rows a slot has at a size: `base + step * (size / unit)`.
///
/// One row for each request or token is `0 + 1 * (size / 1)`; the boundaries of `n` sequences are `1 + 1 * (n / 1)`; what
/// one rank of four holds of a scattered batch is `0 + 1 * (size / 4)`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Rows {
    /// Rows at size 0.
    pub base: usize,
    /// Rows gained with each unit.
    pub step: usize,
    /// The sizes that make up one unit.
    pub unit: usize,
}

impl Rows {
    /// One row for each request or token.
    pub const EACH: Self = Self { base: 0, step: 1, unit: 1 };

    /// The rows at `size`, counting whole units only.
    pub fn at(self, size: usize) -> usize {
        self.base.saturating_add(self.step.saturating_mul(size / self.unit))
    }
}

/// The most elements from the first to the last one that bytes of every type can be counted for.
const FARTHEST: usize = isize::MAX as usize / 16;

/// How many elements a shape has; what nobody could count is as many as can be.
pub(crate) fn count(shape: &[usize]) -> usize {
    shape.iter().fold(1, |count, size| count.saturating_mul(*size))
}

/// A number for each dimension, or for each of a few runs: nearly always few enough to need no memory of their own.
pub type Dims = SmallVec<[usize; 4]>;

/// A block of a buffer, in elements: where it starts, and its shape and strides.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Region {
    /// Elements before its first one.
    pub offset: usize,
    /// Its extent along each dimension.
    pub shape: Dims,
    /// The elements from one index to the next along each dimension.
    pub strides: Dims,
}

/// A region as contiguous runs of one length, in row-major order of the region.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Runs {
    /// Where each run starts, in elements.
    pub offsets: Dims,
    /// Elements of each run.
    pub len: usize,
}

impl Region {
    /// How many elements it has.
    pub fn numel(&self) -> usize {
        count(&self.shape)
    }

    /// The dimensions before the longest contiguous block of inner ones, and that block's elements.
    fn block(&self) -> (usize, usize) {
        let (mut outer, mut len) = (self.shape.len(), 1);
        while outer > 0 && (self.shape[outer - 1] == 1 || self.strides[outer - 1] == len) {
            outer -= 1;
            len = len.saturating_mul(self.shape[outer]);
        }
        (outer, len)
    }

    /// How many runs it is.
    pub fn run_count(&self) -> usize {
        count(&self.shape[..self.block().0])
    }

    /// The runs that it is made of.
    pub fn runs(&self) -> Runs {
        let (outer, len) = self.block();
        let mut offsets = smallvec![self.offset];
        for (size, stride) in self.shape[..outer].iter().zip(&self.strides) {
            offsets = offsets.iter().flat_map(|start| (0..*size).map(move |index| start + index * stride)).collect();
        }
        Runs { offsets, len }
    }
}

/// A registered slot.
#[derive(Debug, Clone)]
pub struct SlotLayout {
    /// Its name in messages.
    pub name: String,
    /// The size that its rows follow.
    pub axis: Axis,
    /// What its tail gets.
    pub policy: PaddingPolicy,
    /// Its element type.
    pub dtype: DType,
    /// Its whole shape.
    pub shape: Dims,
    /// Elements from one index to the next, along each dimension.
    pub strides: Dims,
    /// The dimension that has the rows; of no meaning where the axis is none.
    pub dim: usize,
    /// Its rows at each size.
    pub rows: Rows,
    /// The largest size along its axis.
    pub capacity: usize,
    /// Where its live rows come from.
    pub feed: Feed,
    /// Where it lives, spelled in full: `cuda:0`, `cpu`.
    pub device: String,
    /// Where its source may live.
    pub source_device: SourceDevice,
    /// A batch without the field is refused.
    pub required: bool,
    /// A source of a type that holds more values is cast all the same.
    pub allow_narrowing: bool,
    /// A source may be shorter along the last dimension; the rest of each live row gets the pad value.
    pub prefix: bool,
}

impl SlotLayout {
    /// The slot itself, once it is known to be possible.
    ///
    /// # Errors
    /// A shape without elements, elements that share memory, too few rows for the largest size, or a prefix along the
    /// dimension that has the rows.
    pub fn checked(self) -> Result<Self, SlotFault> {
        if self.shape.contains(&0) {
            return Err(SlotFault::empty_shape(&self.name, &self.shape));
        }
        // Each stride must step over all that the smaller strides reach.
        let mut steps: Vec<_> = self.shape.iter().zip(&self.strides).filter(|(size, _)| **size > 1).collect();
        steps.sort_by_key(|(_, stride)| **stride);
        let mut reach = 0;
        for (size, stride) in steps {
            if *stride <= reach {
                return Err(SlotFault::shared_elements(&self.name, &self.shape, &self.strides));
            }
            // Where addresses of this machine would wrap, elements meet as well.
            reach = (size - 1)
                .checked_mul(*stride)
                .and_then(|own| own.checked_add(reach))
                .filter(|reach| *reach <= FARTHEST)
                .ok_or_else(|| SlotFault::shared_elements(&self.name, &self.shape, &self.strides))?;
        }
        if self.axis != Axis::None {
            let needed = self.rows.at(self.capacity);
            if self.shape.get(self.dim).is_none_or(|rows| *rows < needed) {
                return Err(SlotFault::capacity_too_small(&self.name, self.axis, &self.shape, self.dim, needed));
            }
        }
        if self.prefix && (self.shape.is_empty() || (self.axis != Axis::None && self.dim + 1 == self.shape.len())) {
            return Err(SlotFault::no_trailing_axis(&self.name, &self.shape));
        }
        Ok(self)
    }

    /// The live rows at a size; none where the axis is none.
    pub fn live_rows(&self, size: usize) -> usize {
        if self.axis == Axis::None { 0 } else { self.rows.at(size) }
    }

    /// The rows of a bucket of that size, which must be whole.
    ///
    /// # Errors
    /// A size above the capacity, or one that is not a whole number of the slot's units.
    pub fn padded_rows(&self, size: usize) -> Result<usize, SlotFault> {
        if self.axis == Axis::None {
            return Ok(0);
        }
        if size > self.capacity {
            return Err(SlotFault::above_capacity(self.axis.padded(), size, self.capacity));
        }
        if !size.is_multiple_of(self.rows.unit) {
            return Err(SlotFault::bucket_not_divisible(&self.name, size, self.rows.unit));
        }
        Ok(self.rows.at(size))
    }

    /// The length of the last dimension.
    pub(crate) fn width(&self) -> usize {
        self.shape.last().copied().unwrap_or(1)
    }

    /// Some rows and some columns of the last dimension. Rows mean nothing where the axis is none: it is all of them.
    pub(crate) fn region(&self, rows: Range<usize>, columns: Option<Range<usize>>) -> Region {
        let mut region = Region { offset: 0, shape: self.shape.clone(), strides: self.strides.clone() };
        if self.axis != Axis::None {
            region.offset += rows.start * self.strides[self.dim];
            region.shape[self.dim] = rows.len();
        }
        if let (Some(columns), Some(last)) = (columns, self.shape.len().checked_sub(1)) {
            region.offset += columns.start * self.strides[last];
            region.shape[last] = columns.len();
        }
        region
    }
}
