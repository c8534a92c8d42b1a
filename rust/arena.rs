//! The memory of recorded tapes: blocks that live as long as the tensors on them, for all buckets together.
//!
//! A tape allocates a block when an operator's output appears and releases it when the last tensor on it is gone, so the
//! lifetimes that lay the arena out are those that the recorded program really has. Later tapes reuse what earlier ones
//! released, which is right because tapes of one arena never replay at the same time: a list of buckets costs what its
//! largest member costs.
//!
//! Blocks are placed by best fit, in segments that never move: an address that a tape has recorded stays valid for the
//! arena's life. A request that fits nowhere opens a segment. An optimal layout would need the whole trace first, and a
//! second pass over tensors that the model may already hold; best fit needs neither.

use std::collections::{BTreeMap, BTreeSet};

use crate::error::ArenaError;

/// Where a block lies: bytes from the start of one segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Block {
    /// Index into [`Arena::segments`].
    pub segment: usize,
    /// Bytes from the start of the segment; a multiple of the arena's alignment.
    pub offset: u64,
    /// Bytes reserved: the request, rounded up to the alignment.
    pub bytes: u64,
}

/// A growing set of segments, and the blocks that are free in them.
#[derive(Debug)]
pub struct Arena {
    alignment: u64,
    segment_bytes: u64,
    segments: Vec<u64>,
    /// Free spans by place, to join neighbours.
    free: BTreeMap<(usize, u64), u64>,
    /// The same spans by size, to find the tightest one.
    by_size: BTreeSet<(u64, usize, u64)>,
    live: BTreeMap<(usize, u64), u64>,
    live_bytes: u64,
    peak_bytes: u64,
}

impl Arena {
    /// An empty arena; segments are opened when a request needs one and are at least `segment_bytes` long.
    ///
    /// # Errors
    /// [`ArenaError::Alignment`] unless `alignment` is a power of two.
    pub fn new(alignment: u64, segment_bytes: u64) -> Result<Self, ArenaError> {
        if !alignment.is_power_of_two() {
            return Err(ArenaError::Alignment { alignment });
        }
        Ok(Self {
            alignment,
            segment_bytes,
            segments: Vec::new(),
            free: BTreeMap::new(),
            by_size: BTreeSet::new(),
            live: BTreeMap::new(),
            live_bytes: 0,
            peak_bytes: 0,
        })
    }

    /// Reserves `bytes` in the tightest free span; an empty request takes one unit, so that blocks have distinct places.
    ///
    /// # Errors
    /// [`ArenaError::Size`] when the request or the arena would pass 2^63 bytes.
    pub fn allocate(&mut self, bytes: u64) -> Result<Block, ArenaError> {
        let limit = i64::MAX.unsigned_abs();
        let bytes = bytes
            .max(1)
            .checked_next_multiple_of(self.alignment)
            .filter(|&rounded| self.reserved_bytes() <= limit - rounded.min(limit) && rounded <= limit)
            .ok_or(ArenaError::Size { bytes })?;
        let found = self.by_size.range((bytes, 0, 0)..).next().copied();
        let (span, segment, offset) = found.unwrap_or_else(|| self.open_segment(bytes));
        self.remove_free(segment, offset, span);
        if span > bytes {
            self.insert_free(segment, offset + bytes, span - bytes);
        }
        self.live.insert((segment, offset), bytes);
        self.live_bytes += bytes;
        self.peak_bytes = self.peak_bytes.max(self.live_bytes);
        Ok(Block { segment, offset, bytes })
    }

    /// Gives a block back and joins it with free neighbours.
    ///
    /// # Errors
    /// [`ArenaError::NotLive`] for a block that is not reserved, or no longer; nothing changes then.
    pub fn release(&mut self, block: Block) -> Result<(), ArenaError> {
        let Block { segment, offset, bytes } = block;
        if self.live.get(&(segment, offset)) != Some(&bytes) {
            return Err(ArenaError::NotLive { segment, offset });
        }
        self.live.remove(&(segment, offset));
        self.live_bytes -= bytes;
        let (mut start, mut span) = (offset, bytes);
        if let Some(&following) = self.free.get(&(segment, offset + bytes)) {
            self.remove_free(segment, offset + bytes, following);
            span += following;
        }
        let preceding = self.free.range((segment, 0)..(segment, offset)).next_back().map(|(&(_, at), &len)| (at, len));
        if let Some((at, len)) = preceding.filter(|&(at, len)| at + len == offset) {
            self.remove_free(segment, at, len);
            start = at;
            span += len;
        }
        self.insert_free(segment, start, span);
        Ok(())
    }

    /// The size of each segment in bytes, in the order in which they were opened. Segments neither move nor shrink.
    pub fn segments(&self) -> &[u64] {
        &self.segments
    }

    /// Bytes in all segments.
    pub fn reserved_bytes(&self) -> u64 {
        self.segments.iter().sum()
    }

    /// Bytes in blocks that are reserved now.
    pub fn live_bytes(&self) -> u64 {
        self.live_bytes
    }

    /// The most bytes that were ever reserved at once: no layout could do with less.
    pub fn peak_bytes(&self) -> u64 {
        self.peak_bytes
    }

    fn open_segment(&mut self, bytes: u64) -> (u64, usize, u64) {
        let span = bytes.max(self.segment_bytes.next_multiple_of(self.alignment));
        let segment = self.segments.len();
        self.segments.push(span);
        self.insert_free(segment, 0, span);
        (span, segment, 0)
    }

    fn insert_free(&mut self, segment: usize, offset: u64, span: u64) {
        self.free.insert((segment, offset), span);
        self.by_size.insert((span, segment, offset));
    }

    fn remove_free(&mut self, segment: usize, offset: u64, span: u64) {
        self.free.remove(&(segment, offset));
        self.by_size.remove(&(span, segment, offset));
    }
}
