//! The planner against its specification: carrying out a plan on bytes leaves what the padding policies say.

#![allow(clippy::unwrap_used, reason = "a helper of a test may fail the test")]

mod cases;
mod table;

use cases::{Case, MAX_BS, MAX_TOKENS, PAD_VALUE, checked, indices, offset, specified, stepped, steps};
use devicegraph::dtype::DType;
use devicegraph::error::SlotFault;
use devicegraph::plan::{FillPlan, LARGE_COPY_BYTES, LARGE_PAD_BYTES, MAX_RUNS};
use devicegraph::slot::{Axis, Feed, PaddingPolicy, Region, Rows, SlotLayout, SourceDevice};
use devicegraph::step::{Pad, Planner, Sizes, Source};
use proptest::prelude::*;

/// The bytes of a slot's buffer, with the number of times that each was written.
struct Memory {
    bytes: Vec<u8>,
    writes: Vec<usize>,
    itemsize: usize,
}

impl Memory {
    fn new(values: &[i64], itemsize: usize) -> Self {
        let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()[..itemsize].to_vec()).collect();
        Self { writes: vec![0; bytes.len()], bytes, itemsize }
    }

    fn write(&mut self, element: usize, bytes: &[u8]) {
        let start = element * self.itemsize;
        self.bytes[start..start + bytes.len()].copy_from_slice(bytes);
        self.writes[start..start + bytes.len()].iter_mut().for_each(|writes| *writes += 1);
    }

    fn values(&self) -> Vec<i64> {
        self.bytes.chunks(self.itemsize).map(signed).collect()
    }
}

fn signed(bytes: &[u8]) -> i64 {
    let mut wide = [if bytes[bytes.len() - 1] < 128 { 0 } else { 255 }; 8];
    wide[..bytes.len()].copy_from_slice(bytes);
    i64::from_le_bytes(wide)
}

fn elements(region: &Region) -> impl Iterator<Item = usize> + '_ {
    indices(&region.shape).into_iter().map(|index| region.offset + offset(&index, &region.strides))
}

/// Carries out a plan on bytes. A group moves whole elements of its own type, as a device would.
fn carry_out(plan: &FillPlan, cases: &[Case], memories: &mut [Memory]) {
    let pad = |pad: Pad, bytes: usize| match pad {
        Pad::Zero => 0_i64.to_le_bytes()[..bytes].to_vec(),
        Pad::Value => PAD_VALUE.to_le_bytes()[..bytes].to_vec(),
    };
    for fill in &plan.fills {
        let value = pad(fill.pad, memories[fill.slot].itemsize);
        elements(&fill.region).for_each(|element| memories[fill.slot].write(element, &value));
    }
    for group in &plan.groups {
        for tail in &group.tails {
            assert_eq!(group.to, group.from, "padding is never cast");
            let memory = &mut memories[tail.slot];
            let value = pad(tail.pad, memory.itemsize);
            for start in &tail.runs.offsets {
                assert_eq!(start * memory.itemsize % group.to.itemsize(), 0);
                assert_eq!(tail.runs.len * memory.itemsize % group.to.itemsize(), 0);
                memory.write(*start, &value.repeat(tail.runs.len));
            }
        }
        for head in &group.heads {
            let (memory, source) = (&mut memories[head.slot], cases[head.slot].source.as_ref().unwrap());
            assert_eq!(source.strides[..], stepped(&source.shape, 1), "its elements lie in row-major order");
            assert_eq!(source.device, group.device);
            assert_eq!(head.shape, source.shape);
            let from = if group.to == group.from { memory.itemsize } else { group.from.itemsize() };
            let given = Memory::new(&cases[head.slot].values, from).bytes;
            for (run, bytes) in head.runs.offsets.iter().zip(given.chunks(head.runs.len * from)) {
                assert_eq!(run * memory.itemsize % group.to.itemsize(), 0);
                let itemsize = memory.itemsize;
                let cast: Vec<u8> = if group.to == group.from {
                    assert_eq!(bytes.len() % group.to.itemsize(), 0);
                    bytes.to_vec()
                } else {
                    bytes.chunks(from).flat_map(|item| signed(item).to_le_bytes()[..itemsize].to_vec()).collect()
                };
                memory.write(*run, &cast);
            }
        }
    }
    for copy in &plan.copies {
        let itemsize = memories[copy.slot].itemsize;
        for (element, value) in elements(&copy.region).zip(&cases[copy.slot].values) {
            memories[copy.slot].write(element, &value.to_le_bytes()[..itemsize]);
        }
    }
}

fn plan(sizes: [usize; 4], cases: &[Case], unread: bool) -> Result<FillPlan, SlotFault> {
    let planner = Planner::new(cases.iter().map(|case| case.slot.clone()).collect(), MAX_BS, MAX_TOKENS);
    let sources: Vec<_> = cases.iter().map(|case| case.source.clone()).collect();
    let work = planner.work(&checked(sizes), &sources, unread)?;
    Ok(FillPlan::new(planner.slots(), &work, &sources))
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1000))]

    #[test]
    fn a_plan_leaves_what_the_policies_say((sizes, cases) in steps(), unread: bool) {
        let plan = plan(sizes, &cases, unread).unwrap();
        let mut memories: Vec<_> =
            cases.iter().map(|case| Memory::new(&case.before, case.slot.dtype.itemsize())).collect();
        carry_out(&plan, &cases, &mut memories);
        for (case, memory) in cases.iter().zip(&memories) {
            prop_assert_eq!(memory.values(), specified(case, sizes, unread), "{:?}", case.slot);
        }
        // Only a padded row that is copied into afterwards is written twice, and that copy comes last.
        for (index, memory) in memories.iter().enumerate() {
            let twice = plan.copies.iter().any(|copy| copy.slot == index) && cases[index].slot.prefix;
            let most = if twice { 2 } else { 1 };
            prop_assert!(memory.writes.iter().all(|writes| *writes <= most));
        }
    }

    #[test]
    fn small_contiguous_work_takes_one_call_for_each_device_and_each_pair_of_types(
        (sizes, mut cases) in steps(), narrow: bool,
    ) {
        for case in &mut cases {
            if let Some(source) = &mut case.source {
                if case.slot.prefix {
                    let last = source.shape.len() - 1;
                    source.shape[last] = case.slot.shape[last];
                }
                source.dtype = if narrow { "int16" } else { case.slot.dtype.name() }.into();
                source.device = case.slot.device.clone().into();
                source.strides = stepped(&source.shape, 1).into();
            }
        }
        let plan = plan(sizes, &cases, false).unwrap();
        let scattered = plan.fills.iter().map(|fill| &fill.region).chain(plan.copies.iter().map(|copy| &copy.region));
        for region in scattered {
            prop_assert!(region.run_count() > MAX_RUNS, "{region:?} has no reason to be alone");
        }
        let mut kinds: Vec<_> = plan.groups.iter().map(|group| {
            (group.device.clone(), (group.to != group.from).then(|| (group.to.name(), group.from.name())))
        }).collect();
        let calls = kinds.len();
        kinds.sort();
        kinds.dedup();
        prop_assert_eq!(calls, kinds.len(), "one group for each device, and one for each pair of types");
    }
}

fn slot(name: &str, dtype: &str, shape: &[usize]) -> SlotLayout {
    SlotLayout {
        name: name.to_owned(),
        axis: Axis::Tokens,
        policy: PaddingPolicy::Zero,
        dtype: DType::parse(dtype).unwrap(),
        shape: shape.into(),
        strides: stepped(shape, 1).into(),
        dim: shape.len().saturating_sub(1),
        rows: Rows::EACH,
        capacity: MAX_TOKENS,
        feed: Feed::Field,
        device: "cuda:0".to_owned(),
        source_device: SourceDevice::Own,
        required: false,
        allow_narrowing: false,
        prefix: false,
    }
}

fn source(dtype: &str, shape: &[usize]) -> Source {
    Source {
        dtype: dtype.to_owned().into(),
        shape: shape.into(),
        device: "cuda:0".into(),
        strides: stepped(shape, 1).into(),
    }
}

fn planned(slots: Vec<SlotLayout>, sizes: [usize; 4], sources: &[Source]) -> Result<FillPlan, SlotFault> {
    let sources: Vec<_> = sources.iter().cloned().map(Some).collect();
    let planner = Planner::new(slots, MAX_BS, 1 << 20);
    let work = planner.work(&checked(sizes), &sources, false)?;
    Ok(FillPlan::new(planner.slots(), &work, &sources))
}

#[test]
fn a_decode_step_is_one_call_in_the_widest_type_that_its_slots_share() {
    let slots =
        vec![slot("input_ids", "int64", &[24]), slot("positions", "int64", &[24]), slot("mrope", "int64", &[3, 24])];
    let sources = [source("int64", &[5]), source("int64", &[5]), source("int64", &[3, 5])];
    let plan = planned(slots.clone(), [0, 0, 5, 8], &sources).unwrap();
    assert_eq!((plan.calls(), plan.groups[0].to.name()), (1, "int64"));
    assert_eq!(plan.groups[0].heads[2].runs.offsets[..], [0, 24, 48], "each plane is a run");
    assert_eq!(plan.groups[0].tails[2].runs.offsets[..], [5, 29, 53]);

    let narrower = [slots, vec![slot("cache_loc", "int32", &[24])]].concat();
    let sources = [sources.to_vec(), vec![source("int32", &[5])]].concat();
    let plan = planned(narrower, [0, 0, 5, 8], &sources).unwrap();
    assert_eq!((plan.calls(), plan.groups[0].to.name()), (1, "int32"));
}

#[test]
fn slots_of_one_type_are_moved_as_what_they_are() {
    for dtype in ["float32", "bfloat16", "int64", "bool"] {
        let slots = vec![slot("a", dtype, &[24]), slot("b", dtype, &[24])];
        let plan = planned(slots, [0, 0, 5, 8], &[source(dtype, &[5]), source(dtype, &[5])]).unwrap();
        let types: Vec<_> = plan.groups.iter().map(|group| (group.to.name(), group.from.name())).collect();
        assert_eq!(types, [(dtype, dtype)]);
    }
}

#[test]
fn a_source_spans_the_elements_from_its_first_to_its_last() {
    let spanned = |shape: &[usize], strides: &[usize]| {
        Source { shape: shape.into(), strides: strides.into(), ..source("int64", &[]) }.span()
    };
    assert_eq!(spanned(&[], &[]), 1);
    assert_eq!(spanned(&[5], &[1]), 5);
    assert_eq!(spanned(&[3, 5], &[8, 1]), 21);
    assert_eq!(spanned(&[4, 2], &[0, 3]), 4);
    assert_eq!(spanned(&[4, 0], &[7, 1]), 0);
    assert_eq!(spanned(&[2, 3], &[usize::MAX, 2]), usize::MAX);
}

#[test]
fn a_source_is_contiguous_in_row_major_order_without_gaps_only() {
    let contiguous = |shape: &[usize], strides: &[usize]| {
        Source { shape: shape.into(), strides: strides.into(), ..source("int64", &[]) }.is_contiguous()
    };
    assert!(contiguous(&[], &[]) && contiguous(&[5], &[1]) && contiguous(&[3, 5], &[5, 1]));
    assert!(!contiguous(&[5], &[2]) && !contiguous(&[3, 5], &[8, 1]) && !contiguous(&[3, 5], &[1, 3]));
    assert!(!contiguous(&[5, 1], &[1, 5]), "along a dimension of one index, too");
    assert!(!contiguous(&[5], &[5, 1]) && !contiguous(&[2, 5], &[1]), "one stride for each dimension");
}

#[test]
fn a_full_buffer_is_one_run_whatever_its_planes() {
    let plan = planned(vec![slot("mrope", "int64", &[3, 24])], [0, 0, 24, 24], &[source("int64", &[3, 24])]).unwrap();
    assert_eq!(plan.groups[0].heads[0].runs.offsets[..], [0]);
    assert!(plan.groups[0].tails.is_empty());
}

#[test]
fn each_pair_of_types_to_cast_between_is_one_more_call() {
    let slots: Vec<_> = ["a", "b", "c", "d"].iter().map(|name| slot(name, "int64", &[24])).collect();
    let sources = [source("int64", &[5]), source("int32", &[5]), source("int16", &[5]), source("int32", &[5])];
    let plan = planned(slots, [0, 0, 5, 8], &sources).unwrap();
    let pairs: Vec<_> =
        plan.groups.iter().map(|group| (group.from.name(), group.heads.len(), group.tails.len())).collect();
    assert_eq!(pairs, [("int64", 1, 4), ("int32", 2, 0), ("int16", 1, 0)]);
}

#[test]
fn a_type_that_grouped_copies_may_not_know_is_moved_as_integers_and_cast_alone() {
    let slots = vec![slot("scales", "float8_e4m3fn", &[24]), slot("wide", "float32", &[24])];
    let sources = [source("float8_e4m3fn", &[5]), source("float8_e4m3fn", &[5])];
    let plan = planned(slots, [0, 0, 5, 5], &sources).unwrap();
    assert_eq!((plan.groups.len(), plan.groups[0].to.name()), (1, "uint8"));
    assert_eq!(plan.copies.iter().map(|copy| copy.slot).collect::<Vec<_>>(), [1]);
}

#[test]
fn large_heads_and_tails_leave_the_group() {
    let mut rows = slot("input_embeds", "uint8", &[64, 1 << 18]);
    (rows.dim, rows.capacity) = (0, 64);
    let alone = LARGE_COPY_BYTES / (1 << 18);
    let plan = planned(vec![rows.clone()], [0, 0, alone, 64], &[source("uint8", &[alone, 1 << 18])]).unwrap();
    assert_eq!((plan.fills.len(), plan.groups.len(), plan.copies.len()), (1, 0, 1));
    let plan = planned(vec![rows], [0, 0, alone - 1, alone - 1], &[source("uint8", &[alone - 1, 1 << 18])]).unwrap();
    assert_eq!((plan.fills.len(), plan.groups.len(), plan.copies.len()), (0, 1, 0));
    let mut tail = slot("positions", "uint8", &[LARGE_PAD_BYTES]);
    tail.capacity = LARGE_PAD_BYTES;
    let plan = planned(vec![tail], [0, 0, 1, LARGE_PAD_BYTES], &[source("uint8", &[1])]).unwrap();
    assert_eq!((plan.fills.len(), plan.groups[0].tails.len()), (0, 1), "one byte short of a fill of its own");
}

#[test]
fn what_is_large_is_counted_in_bytes_whatever_the_elements() {
    for (dtype, bytes) in [("uint8", 1), ("int64", 8)] {
        let alone = LARGE_COPY_BYTES / bytes / (1 << 16);
        let mut rows = slot("input_embeds", dtype, &[64, 1 << 16]);
        (rows.dim, rows.capacity) = (0, 64);
        for (count, copies) in [(alone - 1, 0), (alone, 1)] {
            let given = [source(dtype, &[count, 1 << 16])];
            let plan = planned(vec![rows.clone()], [0, 0, count, count], &given).unwrap();
            assert_eq!((plan.copies.len(), plan.groups.len()), (copies, 1 - copies), "{count} rows of {dtype}");
        }
        let most = LARGE_PAD_BYTES / bytes;
        let mut tail = slot("positions", dtype, &[most]);
        tail.capacity = most;
        for (count, fills) in [(most - 1, 0), (most, 1)] {
            let plan = planned(vec![tail.clone()], [0, 0, 0, count], &[]).unwrap();
            assert_eq!((plan.fills.len(), plan.groups.len()), (fills, 1 - fills), "{count} elements of {dtype}");
        }
    }
}

#[test]
fn rows_narrower_than_the_slot_cost_no_call_while_few_and_one_copy_when_many() {
    let pages = SlotLayout { dim: 0, prefix: true, ..slot("pages", "int32", &[24, 6]) };
    for (rows, calls) in [(MAX_RUNS, 1), (MAX_RUNS + 1, 2)] {
        let plan = planned(vec![pages.clone()], [0, 0, rows, 24], &[source("int32", &[rows, 2])]).unwrap();
        assert_eq!((plan.calls(), plan.groups.len(), plan.copies.len()), (calls, 1, calls - 1));
    }
}

#[test]
fn nothing_to_do_is_no_call() {
    let mut kept = slot("kept", "int64", &[24]);
    kept.policy = PaddingPolicy::KeepPad;
    assert_eq!(planned(vec![kept.clone()], [0, 0, 0, 8], &[]).unwrap().calls(), 0);
    assert_eq!(planned(vec![kept], [0, 0, 0, 8], &[source("int64", &[0])]).unwrap().calls(), 0);
    assert_eq!(planned(vec![slot("a", "int64", &[24])], [0, 0, 0, 0], &[]).unwrap().calls(), 0);
}

#[test]
fn a_required_field_may_be_missing_from_an_idle_step_only() {
    let mut needed = slot("input_ids", "int64", &[24]);
    needed.required = true;
    assert_eq!(planned(vec![needed.clone()], [0, 0, 0, 8], &[]).unwrap().calls(), 1);
    insta::assert_snapshot!(
        told(&planned(vec![needed], [0, 0, 1, 8], &[])),
        @"slot `input_ids`: the batch lacks this required field [field-missing]"
    );
}

fn told<T: std::fmt::Debug>(result: &Result<T, SlotFault>) -> String {
    let fault = result.as_ref().unwrap_err();
    let hint = fault.hint.as_ref().map(|hint| format!("; hint: {hint}")).unwrap_or_default();
    format!("{fault} [{}]{hint}", fault.code)
}

fn refused(slot: SlotLayout, source: Source) -> String {
    told(&planned(vec![slot], [2, 4, 5, 8], &[source]))
}

#[test]
fn every_refusal_names_slot_and_both_sides() {
    let plain = || slot("positions", "int64", &[24]);
    let planes = || slot("mrope", "int64", &[3, 24]);
    let whole = || SlotLayout { axis: Axis::None, policy: PaddingPolicy::KeepPad, ..plain() };
    let prefix = || SlotLayout { dim: 0, prefix: true, ..slot("pages", "int32", &[24, 6]) };
    let given = || SlotLayout { feed: Feed::Function, ..plain() };
    let quarter = || SlotLayout { rows: Rows { base: 0, step: 1, unit: 3 }, ..plain() };
    let on_host = Source { device: "cpu".into(), ..source("int64", &[5]) };
    insta::assert_snapshot!(refused(plain(), source("int64", &[3])), @"slot `positions`: the source has 3 rows, the batch 5 [wrong-rows]");
    insta::assert_snapshot!(refused(plain(), source("int64", &[1])), @"slot `positions`: the source has 1 row, the batch 5 [wrong-rows]");
    insta::assert_snapshot!(refused(plain(), source("int64", &[5, 1])), @"slot `positions`: the source has shape [5, 1], expected [5] [wrong-shape]");
    insta::assert_snapshot!(refused(planes(), source("int64", &[5])), @"slot `mrope`: the source has shape [5], expected [3, 5] [wrong-shape]");
    insta::assert_snapshot!(refused(planes(), source("int64", &[1, 5])), @"slot `mrope`: the source has shape [1, 5], expected [3, 5] [wrong-shape]");
    insta::assert_snapshot!(refused(planes(), source("int64", &[3, 4])), @"slot `mrope`: the source has 4 rows, the batch 5 [wrong-rows]");
    insta::assert_snapshot!(refused(whole(), source("int64", &[0])), @"slot `positions`: the source has shape [0], expected [24] [wrong-shape]");
    insta::assert_snapshot!(refused(prefix(), source("int32", &[4, 6])), @"slot `pages`: the source has 4 rows, the batch 5 [wrong-rows]");
    insta::assert_snapshot!(refused(prefix(), source("int32", &[5, 7])), @"slot `pages`: the source is 7 wide, the slot 6 [too-wide]");
    insta::assert_snapshot!(refused(prefix(), source("int32", &[4, 2])), @"slot `pages`: the source has 4 rows, the batch 5 [wrong-rows]");
    insta::assert_snapshot!(refused(given(), source("int64", &[9])), @"slot `positions`: the source has 9 rows, the bucket 8 [too-many-rows]");
    insta::assert_snapshot!(refused(plain(), on_host), @r#"slot `positions`: the source is on `cpu`, expected `cuda:0` [wrong-device]; hint: move the source, or say where it may be with `source_device="cpu"` or `"any"`"#);
    insta::assert_snapshot!(refused(plain(), source("float32", &[5])), @"slot `positions`: a cast from `float32` to `int64` can change values [narrowing-cast]; hint: declare the slot as `float32`, or accept the loss with `allow_narrowing=True`");
    insta::assert_snapshot!(refused(plain(), source("complex64", &[5])), @"slot `positions`: `complex64` is no slot dtype [unsupported-dtype]");
    insta::assert_snapshot!(refused(quarter(), source("int64", &[1])), @"slot `positions`: a bucket of 8 is not a multiple of 3 [bucket-not-divisible]; hint: use 6 or 9");
}

#[test]
fn in_a_full_buffer_too_the_rows_of_a_source_lie_along_the_slots_own_axis() {
    let planes = slot("mrope", "int64", &[3, 24]);
    insta::assert_snapshot!(
        told(&planned(vec![planes], [0, 0, 5, 24], &[source("int64", &[5, 24])])),
        @"slot `mrope`: the source has shape [5, 24], expected [3, 5] [wrong-shape]"
    );
}

#[test]
fn sizes_that_are_no_step_are_refused() {
    insta::assert_snapshot!(told(&Sizes::checked(-1, 4, 0, 0)), @"`raw_bs`: -1 is negative [negative-size]");
    insta::assert_snapshot!(told(&Sizes::checked(0, 0, 5, 4)), @"`raw_num_tokens`: 5 is more than `padded_num_tokens`, which is 4 [raw-above-padded]; hint: pad to a bucket that holds the live size");
    insta::assert_snapshot!(told(&planned(vec![], [0, 13, 0, 0], &[])), @"`padded_bs`: 13 is more than the 12 that the buffers hold [above-capacity]");
}
