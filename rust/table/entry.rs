//! The entries of a table: what one slot takes.

use crate::dtype::DType;
use crate::slot::{Axis, Region, SlotLayout};
use crate::step::{Pad, Source, Work, row_major};

/// Dimensions of an entry.
const RANK: usize = 3;

/// The types that entries cast between; everything else is moved as integers of its size.
const CODES: [&str; 13] = [
    "bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64", "float16", "bfloat16", "float32",
    "float64",
];

/// A type that entries cast from and to: its place among those that are known.
pub(crate) fn code(dtype: DType) -> Option<u8> {
    CODES.iter().position(|name| *name == dtype.name()).and_then(|place| u8::try_from(place).ok())
}

/// What writes one region; as `struct Entry` in `kernels/fill.cu`.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Entry {
    /// The address of the first element that is written.
    pub dst: u64,
    /// The address of the first element that is read.
    pub src: u64,
    /// The bits of what is written where nothing is read, in the low bytes.
    pub value: u64,
    /// The region, outermost first.
    pub sizes: [u32; RANK],
    /// Elements from one index to the next in what is written.
    pub dst_strides: [i32; RANK],
    /// Elements from one index to the next in what is read.
    pub src_strides: [i32; RANK],
    /// Where reading ends along `live_dim`.
    pub live: u32,
    /// The first of the kernel's blocks that work on this entry.
    pub first_block: u32,
    /// The dimension along which reading ends.
    pub live_dim: u8,
    /// The type that is written.
    pub to: u8,
    /// The type that is read; the same as `to` where nothing is cast.
    pub from: u8,
    /// Bytes of an element that is written.
    pub itemsize: u8,
}

impl Entry {
    /// How many elements it writes.
    pub fn numel(&self) -> u64 {
        self.sizes.iter().map(|size| u64::from(*size)).product()
    }

    /// How many of the kernel's blocks work on it: 256 threads of eight words of eight bytes each, up to a device full.
    pub(super) fn blocks(&self) -> u32 {
        let words = (self.numel() * u64::from(self.itemsize)).div_ceil(8);
        u32::try_from(words.div_ceil(256 * 8)).unwrap_or(u32::MAX).clamp(1, 2048)
    }
}

/// A buffer that entries write to.
#[derive(Debug, Clone, Copy)]
pub struct Buffer {
    /// The address of its first element.
    pub address: u64,
    /// The bits of the slot's pad value.
    pub pad_bits: u64,
}

/// The entries that do to a slot what has to be done, where entries can; their sources' addresses are left at 0.
///
/// Those whose `live` is not 0 read the source. None for more dimensions, for types that are not known, and for what is
/// counted in more than 31 bits.
pub fn entries(slot: &SlotLayout, buffer: Buffer, work: &Work, source: Option<&Source>) -> Option<Vec<Entry>> {
    let mut found = Vec::new();
    let mut tail = work.tail.clone();
    if let (Some(live), Some(source)) = (work.live, source) {
        let (to, from) = if live.from == slot.dtype {
            let carrier = code(DType::carrier(slot.dtype.itemsize()))?;
            (carrier, carrier)
        } else {
            (code(slot.dtype)?, code(live.from)?)
        };
        let (mut rows, mut pad, mut along) = (0..live.rows, Pad::Value, None);
        if let Some(width) = live.width {
            let rest = slot.region(rows.clone(), Some(width..slot.width()));
            found.extend(entry(slot.dtype, buffer, &rest, None, Pad::Value)?);
        } else if let Some((padded, with)) = tail.take() {
            // The padding follows the live rows: one entry does both.
            rows = 0..padded.end.max(live.rows);
            pad = with;
            along = Some(slot.dim).filter(|_| slot.axis != Axis::None);
        }
        let region = slot.region(rows, live.width.map(|width| 0..width));
        let reading = Reading { to, from, strides: &source.strides, dim: along, live: live.rows };
        found.extend(entry(slot.dtype, buffer, &region, Some(&reading), pad)?);
    }
    if let Some((rows, pad)) = tail {
        found.extend(entry(slot.dtype, buffer, &slot.region(rows, None), None, pad)?);
    }
    Some(found)
}

/// The entry that copies a source, wherever its elements lie, into elements without gaps at `dst`.
#[expect(clippy::option_option, reason = "where there is a form for it, there may still be nothing to write")]
pub(super) fn packing(source: &Source, dtype: DType) -> Option<Option<Entry>> {
    let carrier = code(DType::carrier(dtype.itemsize()))?;
    let region = Region { offset: 0, shape: source.shape.clone(), strides: row_major(&source.shape) };
    let reading = Reading { to: carrier, from: carrier, strides: &source.strides, dim: None, live: 0 };
    entry(dtype, Buffer { address: 0, pad_bits: 0 }, &region, Some(&reading), Pad::Zero)
}

/// How an entry reads.
struct Reading<'a> {
    to: u8,
    from: u8,
    strides: &'a [usize],
    /// The dimension along which only `live` indices are read; all are where it is none.
    dim: Option<usize>,
    live: usize,
}

/// One dimension of an entry in the making.
#[derive(Clone, Copy)]
struct Dim {
    size: usize,
    dst: usize,
    src: usize,
    /// How many indices are read.
    live: usize,
}

/// At most one entry; none where there is nothing to write.
#[expect(clippy::option_option, reason = "where there is a form for it, there may still be nothing to write")]
fn entry(
    dtype: DType,
    buffer: Buffer,
    region: &Region,
    reading: Option<&Reading<'_>>,
    pad: Pad,
) -> Option<Option<Entry>> {
    if region.shape.contains(&0) {
        return Some(None);
    }
    let itemsize = dtype.itemsize();
    let all = region.shape.iter().zip(&region.strides).enumerate();
    let dims: Vec<_> = all
        .map(|(dim, (&size, &dst))| {
            let src = reading.and_then(|reading| reading.strides.get(dim)).copied().unwrap_or(0);
            let live =
                reading.filter(|reading| reading.dim == Some(dim)).map_or(size, |reading| reading.live.min(size));
            Dim { size, dst, src, live }
        })
        .collect();
    let is_read = reading.is_some() && dims.iter().all(|dim| dim.live > 0);
    let dims = joined(&dims, is_read);
    let mut entry = Entry {
        dst: buffer.address + (region.offset * itemsize) as u64,
        value: if pad == Pad::Zero { 0 } else { buffer.pad_bits },
        sizes: [1; RANK],
        live_dim: 2,
        itemsize: u8::try_from(itemsize).ok()?,
        ..Entry::default()
    };
    (entry.to, entry.from) = reading.map_or((0, 0), |reading| (reading.to, reading.from));
    let first = RANK.checked_sub(dims.len())?;
    for (place, dim) in (first..RANK).zip(&dims) {
        entry.sizes[place] = u32::try_from(dim.size).ok()?;
        entry.dst_strides[place] = i32::try_from(dim.dst).ok()?;
        entry.src_strides[place] = i32::try_from(dim.src).ok()?;
        if dim.live < dim.size {
            entry.live_dim = u8::try_from(place).ok()?;
        }
    }
    // The kernel counts in 32 bits, and beyond the end by as many threads as it has.
    i32::try_from(entry.numel()).ok()?;
    if is_read {
        let along = usize::from(entry.live_dim);
        let live = dims.get(along.wrapping_sub(first)).map_or(1, |dim| dim.live);
        entry.live = u32::try_from(live).ok()?;
    }
    Some(Some(entry))
}

/// Joins neighbouring dimensions that are one in what is written and in what is read.
fn joined(dims: &[Dim], is_read: bool) -> Vec<Dim> {
    let mut joined: Vec<Dim> = Vec::new();
    for dim in dims.iter().filter(|dim| dim.size > 1) {
        let mut dim = *dim;
        if !is_read {
            (dim.src, dim.live) = (0, dim.size);
        }
        if let Some(outer) = joined.last_mut() {
            let is_one = outer.dst == dim.size * dim.dst
                && (!is_read || (outer.src == dim.size * dim.src && dim.live == dim.size));
            if is_one {
                *outer = Dim { size: outer.size * dim.size, live: outer.live * dim.size, ..dim };
                continue;
            }
        }
        joined.push(dim);
    }
    joined
}
