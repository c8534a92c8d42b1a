//! What a fill has to do as one table, for a kernel (`kernels/fill.cu`) or a loop on the host to carry out at once.
//!
//! An entry writes one region of at most three dimensions: the elements below `live` along one of them come from the
//! source, whatever its type and strides, and the rest is one value. Most slots are one entry, padding included. No element
//! is written by two entries, so that they can be carried out in any order.

mod entry;

use entry::packing;
pub use entry::{Buffer, Entry, entries};

use crate::slot::{SlotLayout, count};
use crate::step::{Source, Work, row_major};

/// The most entries of one launch: as many as fit into a kernel's parameters.
pub const LAUNCH_ENTRIES: usize = 56;

/// Sources in a block of staged ones start at multiples of this: the widest words that the kernel reads.
pub const STAGED_ALIGNMENT: usize = 16;

/// Where an entry's source is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Origin {
    /// Nowhere: the entry only pads.
    Nowhere,
    /// At the address of a slot's source.
    Slot(usize),
    /// In the block of staged sources, so many bytes from its start.
    Staged(usize),
    /// It is a number, given as a slot's source.
    Number(usize),
}

/// What tables may use.
#[derive(Debug, Clone, Default)]
pub struct Place {
    /// The device whose kernel there is, spelled in full.
    pub device: Option<String>,
    /// The bytes of a block of staged sources.
    pub staged_bytes: usize,
}

/// A source of a step.
#[derive(Debug, Clone)]
pub enum Given {
    /// A tensor.
    Tensor(Source),
    /// A number for each live row, or for the whole slot, described as the tensor that it stands for.
    Number(Source),
}

impl Given {
    /// The tensor that it is or stands for.
    pub fn source(&self) -> &Source {
        match self {
            Self::Tensor(source) | Self::Number(source) => source,
        }
    }
}

/// Everything that one step writes.
#[derive(Debug, Clone, Default)]
pub struct Table {
    /// Entries in host memory.
    pub host: Vec<(Origin, Entry)>,
    /// Sources to be copied into the block of staged ones first: the slot, the place in bytes, and the entry.
    pub staged: Vec<(usize, usize, Entry)>,
    /// Entries in device memory.
    pub device: Vec<(Origin, Entry)>,
    /// For each launch its entries, as a range of those in device memory, and the kernel's blocks.
    pub launches: Vec<(std::ops::Range<usize>, u32)>,
    end_of_staged: usize,
}

impl Table {
    /// Takes over what is to be done to a slot; false where it cannot, and nothing was taken.
    pub fn add(
        &mut self,
        index: usize,
        slot: &SlotLayout,
        buffer: Buffer,
        work: &Work,
        given: Option<&Given>,
        place: &Place,
    ) -> bool {
        let is_on_host = slot.device == "cpu";
        if !is_on_host && place.device.as_ref() != Some(&slot.device) {
            return false;
        }
        let Some(found) = self.find(index, slot, buffer, work, given, place) else { return false };
        if is_on_host {
            self.host.extend(found);
        } else {
            self.device.extend(found);
        }
        true
    }

    fn find(
        &mut self,
        index: usize,
        slot: &SlotLayout,
        buffer: Buffer,
        work: &Work,
        given: Option<&Given>,
        place: &Place,
    ) -> Option<Vec<(Origin, Entry)>> {
        let as_origin = |origin| move |entry: Entry| (if entry.live > 0 { origin } else { Origin::Nowhere }, entry);
        match given {
            Some(Given::Number(source)) => {
                slot.dtype.bits_of_integer(0)?;
                let live = Work { tail: None, ..work.clone() };
                let live = entries(slot, buffer, &live, Some(source))?.into_iter();
                let tail = entries(slot, buffer, work, None)?.into_iter();
                // It is written as padding is: nothing is read.
                let live = live.map(|entry| {
                    let origin = if entry.live > 0 { Origin::Number(index) } else { Origin::Nowhere };
                    (origin, Entry { live: 0, ..entry })
                });
                Some(live.chain(tail.map(|entry| (Origin::Nowhere, entry))).collect())
            }
            Some(Given::Tensor(source)) if source.device == "cpu" && slot.device != "cpu" => {
                let packed = Source { strides: row_major(&source.shape), ..source.clone() };
                let found = entries(slot, buffer, work, Some(&packed))?;
                let dtype = work.live?.from;
                let at = self.end_of_staged;
                let end = at.saturating_add(count(&source.shape).saturating_mul(dtype.itemsize()));
                if end > place.staged_bytes {
                    return None;
                }
                if let Some(entry) = packing(source, dtype)? {
                    self.staged.push((index, at, entry));
                }
                self.end_of_staged = end.next_multiple_of(STAGED_ALIGNMENT);
                Some(found.into_iter().map(as_origin(Origin::Staged(at))).collect())
            }
            Some(Given::Tensor(source)) if source.device != slot.device => None,
            _ => {
                let found = entries(slot, buffer, work, given.map(Given::source))?;
                Some(found.into_iter().map(as_origin(Origin::Slot(index))).collect())
            }
        }
    }

    /// Shares out the kernel's blocks, once all slots are added.
    pub fn finish(&mut self) {
        let count = self.device.len();
        for start in (0..count).step_by(LAUNCH_ENTRIES) {
            let range = start..count.min(start + LAUNCH_ENTRIES);
            let mut blocks = 0;
            for (_, entry) in &mut self.device[range.clone()] {
                entry.first_block = blocks;
                blocks += entry.blocks();
            }
            self.launches.push((range, blocks));
        }
    }
}
