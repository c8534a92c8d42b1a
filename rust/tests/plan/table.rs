//! Tables against the specification: carrying their entries out, in any order, leaves what the padding policies say.

use std::collections::HashMap;

use devicegraph::dtype::DType;
use devicegraph::slot::{Feed, SlotLayout, SourceDevice};
use devicegraph::step::{Planner, Source};
use devicegraph::table::{Buffer, Entry, Given, LAUNCH_ENTRIES, Origin, Place, Table};
use proptest::prelude::*;

use crate::cases::{Case, MAX_BS, MAX_TOKENS, PAD_VALUE, checked, indices, offset, specified, stepped, steps};

/// Where the buffer of a slot is.
fn address(slot: usize) -> u64 {
    (slot as u64 + 1) << 32
}

/// What is written, by element of each slot: with the value, and how often.
#[derive(Default)]
struct Written(HashMap<(usize, usize), (i64, usize)>);

impl Written {
    /// Carries an entry out; `read` gives the value of a source's element.
    fn carry_out(&mut self, entry: &Entry, read: impl Fn(usize) -> i64) {
        let slot = usize::try_from((entry.dst >> 32) - 1).unwrap();
        let first = usize::try_from(entry.dst - address(slot)).unwrap() / usize::from(entry.itemsize);
        let at = |index: [usize; 3], strides: [i32; 3]| {
            index.iter().zip(strides).map(|(index, stride)| index * usize::try_from(stride).unwrap()).sum::<usize>()
        };
        let [n0, n1, n2] = entry.sizes.map(|size| usize::try_from(size).unwrap());
        for index in (0..n0 * n1 * n2).map(|place| [place / n2 / n1, place / n2 % n1, place % n2]) {
            let is_read = index[usize::from(entry.live_dim)] < entry.live as usize;
            let value = if is_read { read(at(index, entry.src_strides)) } else { entry.value.cast_signed() };
            let written = self.0.entry((slot, first + at(index, entry.dst_strides))).or_default();
            *written = (value, written.1 + 1);
        }
    }
}

/// The values of a source by element of its memory, where it lies as `source` says.
fn memory(source: &Source, values: &[i64]) -> HashMap<usize, i64> {
    let places = indices(&source.shape);
    places.iter().map(|index| offset(index, &source.strides)).zip(values.iter().copied()).collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn a_table_leaves_what_the_policies_say((sizes, cases) in steps(), unread: bool, room in 0_usize..400) {
        let planner = Planner::new(cases.iter().map(|case| case.slot.clone()).collect(), MAX_BS, MAX_TOKENS);
        let sources: Vec<_> = cases.iter().map(|case| case.source.clone()).collect();
        let work = planner.work(&checked(sizes), &sources, unread).unwrap();
        let place = Place { device: Some("cuda:0".to_owned()), staged_bytes: room };
        let mut table = Table::default();
        let mut taken = Vec::new();
        for (index, case) in cases.iter().enumerate() {
            let buffer = Buffer { address: address(index), pad_bits: PAD_VALUE.cast_unsigned() };
            let given = case.source.clone().map(Given::Tensor);
            taken.push(table.add(index, &case.slot, buffer, &work[index], given.as_ref(), &place));
        }
        table.finish();

        let mut written = Written::default();
        let block: HashMap<usize, i64> = staged(&table, &cases, room);
        for (origin, entry) in table.host.iter().chain(&table.device) {
            let values = match *origin {
                Origin::Nowhere => HashMap::new(),
                Origin::Slot(slot) => memory(sources[slot].as_ref().unwrap(), &cases[slot].values),
                Origin::Staged(at) => {
                    let (slot, ..) = table.staged.iter().find(|(_, place, _)| *place == at).unwrap();
                    let itemsize = DType::parse(&sources[*slot].as_ref().unwrap().dtype).unwrap().itemsize();
                    block.iter().filter(|(place, _)| **place >= at)
                        .map(|(place, value)| ((place - at) / itemsize, *value)).collect()
                }
                Origin::Number(_) => unreachable!("no number was given"),
            };
            written.carry_out(entry, |element| values[&element]);
        }
        for (index, case) in cases.iter().enumerate() {
            let mut after = case.before.clone();
            for (element, value) in after.iter_mut().enumerate() {
                if let Some((new, times)) = written.0.get(&(index, element)) {
                    prop_assert_eq!(*times, 1, "an element is written once");
                    *value = *new;
                }
            }
            let expected = if taken[index] { specified(case, sizes, unread) } else { case.before.clone() };
            prop_assert_eq!(after, expected, "{:?}", case.slot);
        }
        for (range, blocks) in &table.launches {
            prop_assert!(range.len() <= LAUNCH_ENTRIES);
            let entries = &table.device[range.clone()];
            let firsts: Vec<_> = entries.iter().map(|(_, entry)| entry.first_block).chain([*blocks]).collect();
            prop_assert!(firsts[0] == 0 && firsts.is_sorted_by(|first, next| first < next), "each has a block");
        }
    }

    #[test]
    fn a_slot_whose_source_is_near_is_always_taken((sizes, cases) in steps()) {
        let mut table = Table::default();
        let place = Place { device: Some("cuda:0".to_owned()), staged_bytes: 0 };
        for (index, case) in cases.iter().enumerate() {
            let mut source = case.source.clone();
            if let Some(source) = &mut source {
                source.device = case.slot.device.clone().into();
            }
            let planner = Planner::new(vec![case.slot.clone()], MAX_BS, MAX_TOKENS);
            let work = planner.work(&checked(sizes), &[source.clone()], false).unwrap();
            let buffer = Buffer { address: address(index), pad_bits: 0 };
            let given = source.map(Given::Tensor);
            prop_assert!(table.add(index, &case.slot, buffer, &work[0], given.as_ref(), &place));
        }
    }

    #[test]
    fn a_number_is_written_over_the_live_rows_and_padding_behind_them((sizes, cases) in steps()) {
        for case in cases.iter().filter(|case| case.slot.feed == Feed::Function && case.slot.shape.len() == 1) {
            let Some(source) = &case.source else { continue };
            let planner = Planner::new(vec![case.slot.clone()], MAX_BS, MAX_TOKENS);
            let given = Given::Number(Source { device: case.slot.device.clone().into(), ..source.clone() });
            let work = planner.work(&checked(sizes), &[Some(given.source().clone())], false).unwrap();
            let buffer = Buffer { address: address(0), pad_bits: PAD_VALUE.cast_unsigned() };
            let place = Place { device: Some("cuda:0".to_owned()), staged_bytes: 0 };
            let mut table = Table::default();
            prop_assert!(table.add(0, &case.slot, buffer, &work[0], Some(&given), &place));
            let mut written = Written::default();
            for (origin, entry) in table.host.iter().chain(&table.device) {
                prop_assert!(entry.live == 0, "nothing is read");
                let value = if *origin == Origin::Number(0) { 5 } else { entry.value };
                written.carry_out(&Entry { value, ..*entry }, |_| unreachable!());
            }
            prop_assert!(written.0.values().all(|(_, times)| *times == 1), "an element is written once");
            let number = Case { values: vec![5; case.values.len()], ..case.clone() };
            let after: Vec<_> = case.before.iter().enumerate()
                .map(|(element, value)| written.0.get(&(0, element)).map_or(*value, |(new, _)| *new)).collect();
            prop_assert_eq!(after, specified(&number, sizes, false), "{:?}", case.slot);
        }
    }
}

#[test]
fn a_source_that_the_slots_memory_cannot_be_filled_from_directly_is_not_taken() {
    for (slot_on, source_on) in [("cpu", "cuda:0"), ("cuda:0", "cuda:1")] {
        let layout = crate::slot("ids", "int64", &[24]);
        let layout = SlotLayout { device: slot_on.to_owned(), source_device: SourceDevice::Any, ..layout };
        let given = Source { device: source_on.into(), ..crate::source("int64", &[5]) };
        let planner = Planner::new(vec![layout.clone()], MAX_BS, MAX_TOKENS);
        let work = planner.work(&checked([0, 0, 5, 8]), &[Some(given.clone())], false).unwrap();
        let buffer = Buffer { address: address(0), pad_bits: 0 };
        let place = Place { device: Some("cuda:0".to_owned()), staged_bytes: 400 };
        let mut table = Table::default();
        assert!(!table.add(0, &layout, buffer, &work[0], Some(&Given::Tensor(given)), &place));
        assert_eq!((table.host.len(), table.device.len(), table.staged.len()), (0, 0, 0));
    }
}

#[test]
fn a_source_on_the_host_is_staged_for_a_slot_on_the_device_where_there_is_room() {
    let slots = ["ids", "positions"]
        .map(|name| SlotLayout { source_device: SourceDevice::Cpu, ..crate::slot(name, "int64", &[24]) });
    let source = Source { device: "cpu".into(), strides: stepped(&[5], 2).into(), ..crate::source("int64", &[5]) };
    let planner = Planner::new(slots.to_vec(), MAX_BS, MAX_TOKENS);
    let work = planner.work(&checked([0, 0, 5, 8]), &[Some(source.clone()), Some(source.clone())], false).unwrap();
    for (staged_bytes, expected) in [(39, &[][..]), (40, &[0]), (87, &[0]), (88, &[0, 48])] {
        let place = Place { device: Some("cuda:0".to_owned()), staged_bytes };
        let mut table = Table::default();
        for (index, layout) in slots.iter().enumerate() {
            let buffer = Buffer { address: address(index), pad_bits: 0 };
            let taken = table.add(index, layout, buffer, &work[index], Some(&Given::Tensor(source.clone())), &place);
            assert_eq!(taken, index < expected.len(), "{staged_bytes} bytes");
        }
        let places: Vec<_> = table.staged.iter().map(|(_, at, entry)| (*at, entry.src_strides[2])).collect();
        assert_eq!(places, expected.iter().map(|at| (*at, 2)).collect::<Vec<_>>(), "as the source lies");
        let read: Vec<_> = table.device.iter().map(|(origin, entry)| (*origin, entry.src_strides[2])).collect();
        assert_eq!(read, expected.iter().map(|at| (Origin::Staged(*at), 1)).collect::<Vec<_>>(), "as it was packed");
    }
}

/// The entries of a slot on the device whose source is there, too, where it can be taken.
fn on_device(layout: &SlotLayout, source: &Source) -> Option<Vec<Entry>> {
    let planner = Planner::new(vec![layout.clone()], MAX_BS, MAX_TOKENS);
    let work = planner.work(&checked([0, 0, source.shape[layout.dim], 8]), &[Some(source.clone())], false).unwrap();
    let place = Place { device: Some("cuda:0".to_owned()), staged_bytes: 0 };
    let buffer = Buffer { address: address(0), pad_bits: 0 };
    let mut table = Table::default();
    let given = Given::Tensor(source.clone());
    let taken = table.add(0, layout, buffer, &work[0], Some(&given), &place);
    taken.then(|| table.device.into_iter().map(|(_, entry)| entry).collect())
}

#[test]
fn an_entry_names_the_types_that_it_casts_between_and_moves_one_type_as_integers() {
    for (to, from, codes) in [
        ("int64", "int64", Some((8, 8))),
        ("bool", "bool", Some((1, 1))),
        ("float32", "float32", Some((6, 6))),
        ("float8_e4m3fn", "float8_e4m3fn", Some((1, 1))),
        ("int64", "int32", Some((8, 6))),
        ("float32", "bfloat16", Some((11, 10))),
        ("float64", "float16", Some((12, 9))),
        ("uint8", "bool", Some((1, 0))),
        ("float32", "float8_e4m3fn", None),
    ] {
        let entries = on_device(&crate::slot("a", to, &[24]), &crate::source(from, &[5]));
        assert_eq!(entries.map(|entries| (entries[0].to, entries[0].from)), codes, "{to} from {from}");
    }
}

#[test]
fn neighbouring_dimensions_that_lie_alike_in_slot_and_source_are_one_of_an_entry() {
    let rows = || SlotLayout { dim: 0, ..crate::slot("a", "int64", &[24, 2, 2, 2]) };
    let taken = |source: Source| {
        on_device(&rows(), &source).map(|entries| {
            entries
                .iter()
                .map(|entry| (entry.sizes, entry.src_strides[2], entry.live, entry.live_dim))
                .collect::<Vec<_>>()
        })
    };
    let source = |count: usize, strides: &[usize]| Source {
        strides: strides.into(),
        ..crate::source("int64", &[count, 2, 2, 2])
    };
    assert_eq!(taken(source(5, &[8, 4, 2, 1])), Some(vec![([1, 1, 64], 1, 40, 2)]));
    assert_eq!(taken(source(8, &[8, 4, 2, 1])), Some(vec![([1, 1, 64], 1, 64, 2)]));
    assert_eq!(taken(source(5, &[4, 20, 2, 1])), Some(vec![([8, 2, 4], 1, 5, 0)]));
    assert_eq!(taken(source(5, &[1, 5, 10, 20])), None, "four are more than an entry has");
    assert_eq!(taken(source(0, &[1, 5, 10, 20])), Some(vec![([1, 1, 64], 0, 0, 2)]), "nothing is read of no rows");
}

#[test]
fn a_dimension_of_one_index_is_none_of_an_entrys_wherever_the_next_index_would_lie() {
    let mut layout = SlotLayout { dim: 0, ..crate::slot("a", "int64", &[24, 1, 1, 1]) };
    layout.strides = [1, 7, 9, 5].as_slice().into();
    let source = Source { strides: [1, 3, 2, 4].as_slice().into(), ..crate::source("int64", &[5, 1, 1, 1]) };
    assert_eq!(on_device(&layout, &source).map(|entries| (entries.len(), entries[0].sizes)), Some((1, [1, 1, 8])));
}

#[test]
fn an_entry_has_a_block_for_each_16_kib_that_it_writes_up_to_a_device_full() {
    for (dtype, count, blocks) in [
        ("uint8", 1, 1),
        ("uint8", 1 << 14, 1),
        ("uint8", (1 << 14) + 1, 2),
        ("int64", 1 << 14, 8),
        ("int64", 1 << 23, 2048),
    ] {
        let layout = SlotLayout { capacity: 1 << 23, ..crate::slot("ids", dtype, &[1 << 23]) };
        let planner = Planner::new(vec![layout.clone()], MAX_BS, 1 << 23);
        let work = planner.work(&checked([0, 0, 0, count]), &[None], false).unwrap();
        let place = Place { device: Some("cuda:0".to_owned()), staged_bytes: 0 };
        let mut table = Table::default();
        assert!(table.add(0, &layout, Buffer { address: address(0), pad_bits: 0 }, &work[0], None, &place));
        table.finish();
        assert_eq!(table.launches, [(0..1, blocks)], "{count} of {dtype}");
    }
}

/// What the block of staged sources holds, by byte at which an element starts.
fn staged(table: &Table, cases: &[Case], room: usize) -> HashMap<usize, i64> {
    let mut block = HashMap::new();
    for (slot, at, entry) in &table.staged {
        assert_eq!((entry.dst, at % 16), (0, 0));
        let values = memory(cases[*slot].source.as_ref().unwrap(), &cases[*slot].values);
        let mut written = Written::default();
        written.carry_out(&Entry { dst: address(0), ..*entry }, |element| values[&element]);
        for ((_, element), (value, times)) in written.0 {
            assert!(times == 1 && element < values.len(), "packed without gaps");
            assert!(at + (element + 1) * usize::from(entry.itemsize) <= room, "within the block");
            let before = block.insert(at + element * usize::from(entry.itemsize), value);
            assert_eq!(before, None, "staged sources do not overlap");
        }
    }
    block
}
