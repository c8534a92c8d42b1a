//! The memory of recorded tapes: blocks that live as long as the tensors on them, for all buckets together.
//!
//! A tape allocates a block when an operator's output appears and releases it when the last tensor on it is gone, so the
//! lifetimes that lay the arena out are those that the recorded program really has. Later tapes reuse what earlier ones
//! released, which is right because tapes of one arena never replay at the same time: a list of buckets costs what its
//! largest member costs.
//!
//! A block goes to the lowest place that is free, in segments that never move: an address that a tape has recorded stays valid
//! for the arena's life. A request that fits nowhere opens a segment behind the others. Lowest first means that a trace is laid
//! out the same way each time it comes, and needs no memory beyond that of the first time; the tightest span first would not
//! keep that promise. An optimal layout would need the whole trace first, and a second pass over tensors that the model may
//! already hold.

use std::collections::BTreeMap;

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

/// The most bytes of all segments together.
const LIMIT: u64 = i64::MAX.unsigned_abs();

/// A growing set of segments, and the blocks that are free in them.
#[derive(Debug)]
pub struct Arena {
    alignment: u64,
    segment_bytes: u64,
    segments: Vec<u64>,
    /// Bytes of each free span, by place; no two touch.
    free: BTreeMap<(usize, u64), u64>,
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
            live: BTreeMap::new(),
            live_bytes: 0,
            peak_bytes: 0,
        })
    }

    /// Reserves `bytes` at the lowest place with room; an empty request takes one unit, so that blocks have distinct places.
    ///
    /// # Errors
    /// [`ArenaError::Size`] when the request or the arena would pass 2^63 bytes.
    pub fn allocate(&mut self, bytes: u64) -> Result<Block, ArenaError> {
        let rounded = bytes
            .max(1)
            .checked_next_multiple_of(self.alignment)
            .filter(|&rounded| rounded <= LIMIT && self.reserved_bytes() <= LIMIT - rounded)
            .ok_or(ArenaError::Size { bytes })?;
        let found = self.free.iter().find(|&(_, &span)| span >= rounded).map(|(&place, &span)| (place, span));
        let ((segment, offset), span) = found.unwrap_or_else(|| self.open_segment(rounded));
        self.free.remove(&(segment, offset));
        if span > rounded {
            self.free.insert((segment, offset + rounded), span - rounded);
        }
        self.live.insert((segment, offset), rounded);
        self.live_bytes += rounded;
        self.peak_bytes = self.peak_bytes.max(self.live_bytes);
        Ok(Block { segment, offset, bytes: rounded })
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
        if let Some(following) = self.free.remove(&(segment, offset + bytes)) {
            span += following;
        }
        let preceding = self.free.range((segment, 0)..(segment, offset)).next_back().map(|(&(_, at), &len)| (at, len));
        if let Some((at, len)) = preceding.filter(|&(at, len)| at + len == offset) {
            start = at;
            span += len;
        }
        self.free.insert((segment, start), span);
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

    /// A segment for a request that is within the limit; what is left of that bounds the segment, too.
    fn open_segment(&mut self, bytes: u64) -> ((usize, u64), u64) {
        let room = LIMIT - self.reserved_bytes();
        let usual = self.segment_bytes.checked_next_multiple_of(self.alignment).unwrap_or(room);
        let span = bytes.max(usual.min(room));
        self.segments.push(span);
        ((self.segments.len() - 1, 0), span)
    }
}
