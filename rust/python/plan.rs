//! `SlotLayout`, `FillPlanner` and what they plan: plain values in, plain values out.

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyDict;

use super::value::{Dims, Word, integer};
use crate::dtype::DType;
use crate::error::SlotFault;
use crate::plan;
use crate::slot::{self, Region, Rows};
use crate::step;

pyo3::import_exception!(devicegraph.errors, SlotError);

impl From<SlotFault> for PyErr {
    fn from(fault: SlotFault) -> Self {
        Python::attach(|py| {
            let built = || -> PyResult<PyErr> {
                let arguments = PyDict::new(py);
                arguments.set_item("code", fault.code)?;
                arguments.set_item("hint", fault.hint.as_deref())?;
                arguments.set_item("slot", fault.slot.as_deref())?;
                arguments.set_item("expected", fault.expected.as_deref())?;
                arguments.set_item("given", fault.given.as_deref())?;
                let error = py.get_type::<SlotError>().call((&*fault.message,), Some(&arguments))?;
                Ok(PyErr::from_value(error))
            };
            built().unwrap_or_else(|error| error)
        })
    }
}

/// Whether a slot can have elements of that dtype.
#[pyfunction]
#[pyo3(signature = (name, /))]
pub(super) fn is_slot_dtype(name: &str) -> bool {
    DType::parse(name).is_some()
}

/// A registered slot, as the planner sees it.
#[pyclass(frozen, module = "devicegraph._core")]
pub(super) struct SlotLayout(slot::SlotLayout);

#[pymethods]
impl SlotLayout {
    #[new]
    #[pyo3(signature = (name, *, axis, policy, dtype, shape, strides, dim, rows, capacity, feed, device, source_device,
        required, allow_narrowing, prefix))]
    #[expect(clippy::too_many_arguments, reason = "a record, given by keyword")]
    fn new(
        name: String,
        axis: &str,
        policy: &str,
        dtype: &str,
        shape: Vec<usize>,
        strides: Vec<usize>,
        dim: usize,
        rows: (usize, usize, usize),
        capacity: usize,
        feed: &str,
        device: String,
        source_device: &str,
        required: bool,
        allow_narrowing: bool,
        prefix: bool,
    ) -> PyResult<Self> {
        if strides.len() != shape.len() {
            return Err(PyValueError::new_err("a shape and strides of other lengths"));
        }
        let (base, step, unit) = rows;
        let layout = slot::SlotLayout {
            axis: axis.parse()?,
            policy: policy.parse()?,
            dtype: DType::parse(dtype).ok_or_else(|| SlotFault::unsupported_dtype(&name, dtype))?,
            shape: shape.into(),
            strides: strides.into(),
            dim,
            rows: Rows { base, step, unit: unit.max(1) },
            capacity,
            feed: feed.parse()?,
            device,
            source_device: source_device.parse()?,
            required,
            allow_narrowing,
            prefix,
            name,
        };
        Ok(Self(layout.checked()?))
    }

    /// The rows of a bucket.
    #[pyo3(signature = (padded_bs, padded_num_tokens, /))]
    fn padded_rows(&self, padded_bs: &Bound<'_, PyAny>, padded_num_tokens: &Bound<'_, PyAny>) -> PyResult<usize> {
        let padded_bs = as_size("padded_bs", padded_bs)?;
        let padded_num_tokens = as_size("padded_num_tokens", padded_num_tokens)?;
        let sizes = step::Sizes::checked(0, padded_bs, 0, padded_num_tokens)?;
        Ok(self.0.padded_rows(sizes.padded(self.0.axis))?)
    }

    /// The live rows at a size.
    #[pyo3(signature = (raw_bs, raw_num_tokens, /))]
    fn live_rows(&self, raw_bs: &Bound<'_, PyAny>, raw_num_tokens: &Bound<'_, PyAny>) -> PyResult<usize> {
        let raw_bs = as_size("raw_bs", raw_bs)?;
        let raw_num_tokens = as_size("raw_num_tokens", raw_num_tokens)?;
        let sizes = step::Sizes::checked(raw_bs, raw_bs, raw_num_tokens, raw_num_tokens)?;
        Ok(self.0.live_rows(sizes.raw(self.0.axis)))
    }

    fn __repr__(&self) -> String {
        format!("SlotLayout({:?}, {:?} {} on {})", self.0.name, self.0.shape, self.0.dtype, self.0.device)
    }
}

/// A size as a plain integer.
#[pyfunction]
#[pyo3(signature = (argument, value, /))]
pub(super) fn as_size(argument: &str, value: &Bound<'_, PyAny>) -> PyResult<i64> {
    integer(value).and_then(|size| size.extract().ok()).ok_or_else(|| {
        // Not everything can be printed: an integer may have too many digits.
        let given = value.repr().map_or_else(|_| value.get_type().to_string(), |repr| repr.to_string());
        SlotFault::not_a_size(argument, &given).into()
    })
}

/// The sizes of a step.
pub(super) fn sizes(
    raw_bs: &Bound<'_, PyAny>,
    padded_bs: &Bound<'_, PyAny>,
    raw_num_tokens: &Bound<'_, PyAny>,
    padded_num_tokens: &Bound<'_, PyAny>,
) -> PyResult<step::Sizes> {
    Ok(step::Sizes::checked(
        as_size("raw_bs", raw_bs)?,
        as_size("padded_bs", padded_bs)?,
        as_size("raw_num_tokens", raw_num_tokens)?,
        as_size("padded_num_tokens", padded_num_tokens)?,
    )?)
}

/// (dtype, shape, device, strides).
type Source = (Word, Dims, Word, Dims);

/// The slots of a registry, ready to be planned for.
#[pyclass(frozen, module = "devicegraph._core")]
pub(super) struct FillPlanner(pub(super) step::Planner);

#[pymethods]
impl FillPlanner {
    #[new]
    #[pyo3(signature = (slots, *, max_bs, max_num_tokens))]
    #[expect(clippy::needless_pass_by_value, reason = "references cannot be taken out of a Python list")]
    fn new(slots: Vec<PyRef<'_, SlotLayout>>, max_bs: usize, max_num_tokens: usize) -> Self {
        let slots = slots.iter().map(|slot| slot.0.clone()).collect();
        Self(step::Planner::new(slots, max_bs, max_num_tokens))
    }

    /// What a fill of these sizes must do with these sources.
    #[pyo3(signature = (sources, *, raw_bs, padded_bs, raw_num_tokens, padded_num_tokens, unread))]
    fn plan(
        &self,
        sources: Vec<Option<Source>>,
        raw_bs: &Bound<'_, PyAny>,
        padded_bs: &Bound<'_, PyAny>,
        raw_num_tokens: &Bound<'_, PyAny>,
        padded_num_tokens: &Bound<'_, PyAny>,
        unread: bool,
    ) -> PyResult<FillPlan> {
        let sizes = sizes(raw_bs, padded_bs, raw_num_tokens, padded_num_tokens)?;
        let sources: Vec<_> = sources
            .into_iter()
            .map(|source| {
                source.map(|(Word(dtype), Dims(shape), Word(device), Dims(strides))| step::Source {
                    dtype,
                    shape,
                    device,
                    strides,
                })
            })
            .collect();
        let work = self.0.work(&sizes, &sources, unread)?;
        Ok(FillPlan(plan::FillPlan::new(self.0.slots(), &work, &sources)))
    }

    /// Refuses a bucket that some slot cannot have.
    #[pyo3(signature = (padded_bs, padded_num_tokens, /))]
    fn check_bucket(&self, padded_bs: &Bound<'_, PyAny>, padded_num_tokens: &Bound<'_, PyAny>) -> PyResult<()> {
        let padded_bs = as_size("padded_bs", padded_bs)?;
        let padded_num_tokens = as_size("padded_num_tokens", padded_num_tokens)?;
        Ok(self.0.check_bucket(&step::Sizes::checked(0, padded_bs, 0, padded_num_tokens)?)?)
    }

    fn __repr__(&self) -> String {
        format!("FillPlanner({})", self.0.slots().iter().map(|slot| slot.name.as_str()).collect::<Vec<_>>().join(", "))
    }
}

/// (slot, offset, shape, strides).
type Block = (usize, usize, Vec<usize>, Vec<usize>);

fn block(slot: usize, region: &Region) -> Block {
    (slot, region.offset, region.shape.to_vec(), region.strides.to_vec())
}

/// What a fill carries out: fills, then groups, then copies.
#[pyclass(frozen, eq, module = "devicegraph._core")]
#[derive(PartialEq)]
pub(super) struct FillPlan(pub(super) plan::FillPlan);

#[pymethods]
impl FillPlan {
    /// Regions written with one value: (slot, offset, shape, strides), and whether it is zero.
    #[getter]
    fn fills(&self) -> Vec<(Block, bool)> {
        self.0.fills.iter().map(|fill| (block(fill.slot, &fill.region), fill.pad == step::Pad::Zero)).collect()
    }

    /// Grouped copies.
    #[getter]
    fn groups(&self) -> Vec<CopyGroup> {
        self.0.groups.iter().cloned().map(CopyGroup).collect()
    }

    /// Regions that a source is copied to by a call of its own.
    #[getter]
    fn copies(&self) -> Vec<Block> {
        self.0.copies.iter().map(|copy| block(copy.slot, &copy.region)).collect()
    }

    /// How many calls it takes.
    #[getter]
    fn calls(&self) -> usize {
        self.0.calls()
    }

    fn __repr__(&self) -> String {
        let plan = &self.0;
        format!("FillPlan({} fills, {} groups, {} copies)", plan.fills.len(), plan.groups.len(), plan.copies.len())
    }
}

/// One grouped copy call.
#[pyclass(frozen, eq, module = "devicegraph._core")]
#[derive(PartialEq)]
pub(super) struct CopyGroup(plan::CopyGroup);

#[pymethods]
impl CopyGroup {
    /// Where all of it is.
    #[getter]
    fn device(&self) -> &str {
        &self.0.device
    }

    /// The dtype that is written.
    #[getter]
    fn writes(&self) -> &str {
        self.0.to.name()
    }

    /// The dtype that is read.
    #[getter]
    fn reads(&self) -> &str {
        self.0.from.name()
    }

    /// Padding: (slot, offsets of its runs, elements of each run, whether it is zero).
    #[getter]
    fn tails(&self) -> Vec<(usize, Vec<usize>, usize, bool)> {
        let tails = self.0.tails.iter();
        tails.map(|tail| (tail.slot, tail.runs.offsets.to_vec(), tail.runs.len, tail.pad == step::Pad::Zero)).collect()
    }

    /// Live rows: (slot, shape, offsets of the runs, elements of each run).
    #[getter]
    fn heads(&self) -> Vec<(usize, Vec<usize>, Vec<usize>, usize)> {
        let heads = self.0.heads.iter();
        heads.map(|head| (head.slot, head.shape.to_vec(), head.runs.offsets.to_vec(), head.runs.len)).collect()
    }

    fn __repr__(&self) -> String {
        let group = &self.0;
        let (heads, tails) = (group.heads.len(), group.tails.len());
        format!("CopyGroup({} to {} on {}: {heads} heads, {tails} tails)", group.from, group.to, group.device)
    }
}
