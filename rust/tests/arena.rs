//! The arena against what any allocator must hold: blocks that live at the same time never share a byte.

use devicegraph::arena::{Arena, Block};
use devicegraph::error::ArenaError;
use proptest::prelude::*;

/// What one step of a trace does: reserve so many bytes, or release the n-th live block.
#[derive(Clone, Debug)]
enum Step {
    Allocate(u64),
    Release(prop::sample::Index),
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let allocate = prop_oneof![0_u64..4096, Just(64), Just(1 << 20)].prop_map(Step::Allocate);
    let release = any::<prop::sample::Index>().prop_map(Step::Release);
    prop::collection::vec(prop_oneof![3 => allocate, 2 => release], 1..200)
}

/// The specification: every byte of every live block belongs to one block, and lies inside its segment.
fn assert_sound(live: &[Block], segments: &[u64]) {
    let mut sorted = live.to_vec();
    sorted.sort();
    for block in &sorted {
        assert!(block.offset + block.bytes <= segments[block.segment], "{block:?} leaves its segment");
    }
    for pair in sorted.windows(2) {
        assert!(
            pair[0].segment < pair[1].segment || pair[0].offset + pair[0].bytes <= pair[1].offset,
            "{pair:?} overlap"
        );
    }
}

proptest! {
    #[test]
    fn live_blocks_never_overlap_and_released_memory_comes_back(steps in steps(), segment in 1_u64..100_000) {
        let mut arena = Arena::new(64, segment).unwrap();
        let mut live: Vec<Block> = Vec::new();
        let (mut peak, mut before) = (0, Vec::new());
        for step in steps {
            match step {
                Step::Allocate(bytes) => {
                    let block = arena.allocate(bytes).unwrap();
                    prop_assert!(block.bytes >= bytes && block.bytes.is_multiple_of(64) && block.offset.is_multiple_of(64));
                    live.push(block);
                }
                Step::Release(index) if !live.is_empty() => arena.release(live.swap_remove(index.index(live.len()))).unwrap(),
                Step::Release(_) => {}
            }
            assert_sound(&live, arena.segments());
            let bytes: u64 = live.iter().map(|block| block.bytes).sum();
            peak = peak.max(bytes);
            prop_assert_eq!((arena.live_bytes(), arena.peak_bytes()), (bytes, peak));
            prop_assert!(arena.segments().starts_with(&before), "a segment moved or shrank");
            before = arena.segments().to_vec();
        }
        for block in live.drain(..) {
            arena.release(block).unwrap();
        }
        // Everything was joined again: each whole segment can be had in one piece, and none is opened for it.
        for bytes in before.clone() {
            arena.allocate(bytes).unwrap();
        }
        prop_assert_eq!(arena.segments(), &before[..]);
    }

    #[test]
    fn a_trace_that_comes_again_is_laid_out_as_before_and_takes_no_new_memory(steps in steps(), segment in 1_u64..100_000) {
        let mut arena = Arena::new(64, segment).unwrap();
        let mut trace = || {
            let (mut live, mut placed): (Vec<Block>, Vec<Block>) = (Vec::new(), Vec::new());
            for step in &steps {
                match step {
                    Step::Allocate(bytes) => {
                        live.push(arena.allocate(*bytes).unwrap());
                        placed.push(live[live.len() - 1]);
                    }
                    Step::Release(index) if !live.is_empty() => arena.release(live.swap_remove(index.index(live.len()))).unwrap(),
                    Step::Release(_) => {}
                }
            }
            for block in live {
                arena.release(block).unwrap();
            }
            (placed, arena.segments().to_vec())
        };
        let first = trace();
        prop_assert_eq!(trace(), first);
    }
}

#[test]
fn a_block_released_twice_is_refused_and_nothing_changes() {
    let mut arena = Arena::new(64, 1024).unwrap();
    let block = arena.allocate(100).unwrap();
    arena.release(block).unwrap();
    assert_eq!(arena.release(block), Err(ArenaError::NotLive { segment: 0, offset: 0 }));
    assert_eq!((arena.live_bytes(), arena.segments()), (0, &[1024][..]));
}

#[test]
fn segments_of_any_length_stay_within_what_an_arena_can_hold() {
    for (alignment, segment) in [(1, u64::MAX), (64, u64::MAX - 1), (1 << 62, 3 << 62), (1 << 40, i64::MAX as u64)] {
        let mut arena = Arena::new(alignment, segment).unwrap();
        let first = arena.allocate(1).unwrap();
        assert_eq!((first.offset, first.bytes), (0, alignment));
        let reserved = arena.reserved_bytes();
        assert!((alignment..=i64::MAX as u64).contains(&reserved), "{reserved} bytes");
        let next = arena.allocate(1 << 62);
        assert!(next.is_ok_and(|block| block.segment == 0) || arena.reserved_bytes() == reserved);
    }
}

#[test]
fn an_arena_grows_up_to_its_limit() {
    let mut arena = Arena::new(64, 1).unwrap();
    arena.allocate(1 << 62).unwrap();
    arena.allocate(1 << 61).unwrap();
    assert_eq!(arena.allocate(1 << 61), Err(ArenaError::Size { bytes: 1 << 61 }));
    assert_eq!(arena.segments(), [1 << 62, 1 << 61]);

    let mut arena = Arena::new(64, 3 << 61).unwrap();
    arena.allocate(3 << 61).unwrap();
    arena.allocate(1).unwrap();
    assert_eq!(arena.reserved_bytes(), i64::MAX as u64, "a segment is no longer than what is left");
}

#[test]
fn the_lowest_place_with_room_is_taken() {
    let mut arena = Arena::new(64, 64 * 16).unwrap();
    let blocks: Vec<Block> = [1, 4, 1, 2, 8].iter().map(|units| arena.allocate(units * 64).unwrap()).collect();
    arena.release(blocks[0]).unwrap();
    arena.release(blocks[1]).unwrap();
    arena.release(blocks[3]).unwrap();
    assert_eq!(arena.allocate(128).unwrap(), Block { segment: 0, offset: 0, bytes: 128 });
    assert_eq!(arena.allocate(256).unwrap(), Block { segment: 1, offset: 0, bytes: 256 });
    assert_eq!(arena.allocate(192).unwrap(), Block { segment: 0, offset: 128, bytes: 192 });
}

#[test]
fn impossible_requests_say_what_is_wrong() {
    let mut arena = Arena::new(64, 1024).unwrap();
    insta::assert_snapshot!(Arena::new(48, 1).unwrap_err(), @"the alignment must be a power of two, not 48");
    insta::assert_snapshot!(arena.allocate(u64::MAX).unwrap_err(), @"a block of 18446744073709551615 bytes is more than an arena can hold");
    insta::assert_snapshot!(arena.allocate(1 << 63).unwrap_err(), @"a block of 9223372036854775808 bytes is more than an arena can hold");
    insta::assert_snapshot!(arena.release(Block { segment: 3, offset: 64, bytes: 64 }).unwrap_err(), @"no block is live at segment 3, offset 64");
    assert!(arena.segments().is_empty());
}
