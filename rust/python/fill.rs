//! `FillTables` and `FillTable`: fills that the core carries out itself.

mod kernel;
mod ring;
mod sources;

use std::sync::Arc;

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::{PyCapsule, PyList, PyString, PyType};

use self::kernel::Pending;
pub(super) use self::kernel::{FillKernel, FillNode};
pub(super) use self::ring::HostRing;
use self::sources::{Fields, Wanted};
use super::plan::{FillPlan, FillPlanner, sizes};
use super::value::{Dims, Word};
use crate::driver::cuda;
use crate::driver::dlpack::{Exchange, Form};
use crate::driver::host;
use crate::dtype::DType;
use crate::error::DriverError;
use crate::step::{Source, Work};
use crate::table::{Buffer, Entry, Given, Origin, Place, Table};

/// What all tables of a set of slots have in common.
struct Shared {
    exchange: Option<Exchange>,
    /// The classes whose objects are read by their own memory, that of all tensors first.
    kinds: Vec<Py<PyType>>,
    device: Option<(i32, Arc<cuda::Device>)>,
    /// The field of a batch that each slot's source is, for slots that have such a one.
    fields: Vec<Option<Py<PyString>>>,
    /// Gives the current stream of a device, where the exchange table does not.
    stream_of: Option<Py<PyAny>>,
    /// Where the buffers start, and where they end, in order of address.
    spans: Vec<(u64, u64)>,
}

impl Shared {
    /// This thread's current stream on the device.
    fn stream(&self, py: Python<'_>, index: i32) -> PyResult<u64> {
        if let Some(stream) = self.exchange.and_then(|exchange| exchange.stream(py, index)) {
            return Ok(stream);
        }
        drop(PyErr::take(py));
        match &self.stream_of {
            Some(stream_of) => stream_of.bind(py).call1((index,))?.extract(),
            None => Err(PyValueError::new_err("there is no way to ask for the current stream")),
        }
    }

    /// Marks a block of a ring as read by what is queued so far.
    fn mark(&self, py: Python<'_>, ring: &HostRing, block: usize) -> PyResult<()> {
        if let Some((index, _)) = &self.device {
            ring.mark(block, self.stream(py, *index)?)?;
        }
        Ok(())
    }

    /// Whether memory touches no buffer.
    fn is_apart(&self, start: u64, bytes: u64) -> bool {
        let after = self.spans.partition_point(|(buffer, _)| *buffer <= start);
        let before_ok =
            after.checked_sub(1).and_then(|index| self.spans.get(index)).is_none_or(|(_, end)| start >= *end);
        bytes == 0 || (before_ok && self.spans.get(after).is_none_or(|(buffer, _)| start + bytes <= *buffer))
    }
}

/// The tables of a set of slots.
#[pyclass(frozen, module = "devicegraph._core")]
pub(super) struct FillTables {
    planner: Py<FillPlanner>,
    shared: Arc<Shared>,
    buffers: Vec<Buffer>,
    ring: Option<Py<HostRing>>,
}

/// (dtype, shape, device, strides, whether it is a number).
type Described = (Word, Dims, Word, Dims, bool);

#[pymethods]
impl FillTables {
    #[new]
    #[pyo3(signature = (planner, buffers, *, fields, kinds, exchange, kernel, stream_of, ring))]
    #[expect(clippy::too_many_arguments, reason = "a record, given by keyword")]
    fn new(
        planner: Py<FillPlanner>,
        buffers: Vec<(u64, u64, u64)>,
        fields: Vec<Option<Py<PyString>>>,
        kinds: Vec<Py<PyType>>,
        exchange: Option<&Bound<'_, PyCapsule>>,
        kernel: Option<(i32, PyRef<'_, FillKernel>)>,
        stream_of: Option<Py<PyAny>>,
        ring: Option<Py<HostRing>>,
    ) -> PyResult<Self> {
        let exchange = exchange.map(Exchange::new).transpose()?.flatten();
        let mut spans: Vec<_> =
            buffers.iter().map(|(address, bytes, _)| (*address, address.saturating_add(*bytes))).collect();
        spans.sort_unstable();
        let device = kernel.map(|(index, kernel)| (index, kernel.0.clone()));
        let shared = Arc::new(Shared { exchange, kinds, device, fields, stream_of, spans });
        let buffers = buffers.into_iter().map(|(address, _, pad_bits)| Buffer { address, pad_bits });
        Ok(Self { planner, shared, buffers: buffers.collect(), ring })
    }

    /// The table of a step, and what it leaves to be carried out by calls.
    #[pyo3(signature = (sources, *, raw_bs, padded_bs, raw_num_tokens, padded_num_tokens, unread))]
    #[expect(clippy::too_many_arguments, reason = "a record, given by keyword")]
    fn compile(
        &self,
        py: Python<'_>,
        sources: Vec<Option<Described>>,
        raw_bs: &Bound<'_, PyAny>,
        padded_bs: &Bound<'_, PyAny>,
        raw_num_tokens: &Bound<'_, PyAny>,
        padded_num_tokens: &Bound<'_, PyAny>,
        unread: bool,
    ) -> PyResult<(FillTable, FillPlan)> {
        let sizes = sizes(raw_bs, padded_bs, raw_num_tokens, padded_num_tokens)?;
        let planner = &self.planner.get().0;
        let given: Vec<_> = sources
            .into_iter()
            .map(|source| {
                let (Word(dtype), Dims(shape), Word(device), Dims(strides), is_number) = source?;
                let source = Source { dtype, shape, device, strides };
                Some(if is_number { Given::Number(source) } else { Given::Tensor(source) })
            })
            .collect();
        let sources: Vec<_> = given.iter().map(|given| given.as_ref().map(|given| given.source().clone())).collect();
        let mut work = planner.work(&sizes, &sources, unread)?;
        let place = Place {
            device: self.shared.device.as_ref().map(|(index, _)| format!("cuda:{index}")),
            staged_bytes: self.ring.as_ref().map_or(0, |ring| ring.get().block_bytes),
        };
        let mut table = Table::default();
        let slots = planner.slots().iter().zip(&self.buffers).zip(&given);
        for (index, ((slot, buffer), given)) in slots.enumerate() {
            if table.add(index, slot, *buffer, &work[index], given.as_ref(), &place) {
                work[index] = Work::default();
            }
        }
        table.finish();
        let dtypes: Vec<_> = planner.slots().iter().map(|slot| slot.dtype).collect();
        let wanted = given.iter().zip(&dtypes).map(|(given, dtype)| self.wanted(given.as_ref(), *dtype)).collect();
        let ring = self.ring.as_ref().filter(|_| !table.staged.is_empty()).map(|ring| ring.clone_ref(py));
        let rest = crate::plan::FillPlan::new(planner.slots(), &work, &sources);
        Ok((FillTable { shared: self.shared.clone(), wanted, dtypes, table, ring }, FillPlan(rest)))
    }
}

impl FillTables {
    /// What a source has to be; none where the core cannot tell.
    fn wanted(&self, given: Option<&Given>, dtype: DType) -> Option<Wanted> {
        let source = match given {
            None => return Some(Wanted::Nothing),
            Some(Given::Number(_)) => return Some(Wanted::Number(dtype)),
            Some(Given::Tensor(source)) => source,
        };
        self.shared.exchange?;
        let cuda = match source.device.strip_prefix("cuda:") {
            Some(index) => Some(index.parse().ok()?),
            None if source.device == "cpu" => None,
            None => return None,
        };
        let dtype = DType::parse(&source.dtype)?;
        let form = Form::new(dtype.name(), &source.shape, &source.strides, cuda)?;
        Some(Wanted::Tensor(form, source.span().saturating_mul(dtype.itemsize()) as u64))
    }
}

/// What a step writes, as one table.
#[pyclass(frozen, module = "devicegraph._core")]
pub(super) struct FillTable {
    shared: Arc<Shared>,
    /// What each source has to be; none where the core cannot tell.
    wanted: Option<Vec<Wanted>>,
    /// The slots' own types.
    dtypes: Vec<DType>,
    table: Table,
    ring: Option<Py<HostRing>>,
}

#[pymethods]
impl FillTable {
    /// Whether the core can tell if sources are those that the table was made for.
    #[getter]
    fn checks(&self) -> bool {
        self.wanted.is_some()
    }

    /// Whether sources are those that the table was made for.
    #[pyo3(signature = (sources, /))]
    fn matches(&self, sources: &Bound<'_, PyList>) -> PyResult<bool> {
        Ok(self.read(sources)?.is_some())
    }

    /// The fields of a batch, and whether they are sources that the table was made for.
    #[pyo3(signature = (batch, /))]
    fn read_batch<'py>(&self, batch: &Bound<'py, PyAny>) -> PyResult<(Fields<'py>, bool)> {
        let fields = self.fields(batch)?;
        let is_alike = self.read_fields(&fields)?.is_some();
        Ok((fields, is_alike))
    }

    /// How many launches it takes.
    #[getter]
    fn launches(&self) -> usize {
        self.table.launches.len()
    }

    /// Checks sources, and carries the table out if they are those that it was made for.
    #[pyo3(signature = (sources, /))]
    fn attempt(&self, sources: &Bound<'_, PyList>) -> PyResult<bool> {
        match self.read(sources)? {
            Some(values) => self.launch(sources.py(), &values).map(|()| true),
            None => Ok(false),
        }
    }

    /// As `attempt`, with the fields of a batch, where they are all that there is to read; the fields where it is not done.
    #[pyo3(signature = (batch, /))]
    fn attempt_batch<'py>(&self, batch: &Bound<'py, PyAny>) -> PyResult<Option<Fields<'py>>> {
        // ADDRESS: what the batch made to be read only lives as long as it is held.
        let fields = self.fields(batch)?;
        let Some(values) = self.read_fields(&fields)? else { return Ok(Some(fields)) };
        self.launch(batch.py(), &values)?;
        Ok(None)
    }

    /// As `attempt`, but what is to be written in device memory is left to a node of a graph.
    #[pyo3(signature = (sources, node, /))]
    fn attempt_in(&self, sources: &Bound<'_, PyList>, node: &FillNode) -> PyResult<bool> {
        match self.read(sources)? {
            Some(values) => self.point(sources.py(), &values, node, vec![sources.clone().into_any().unbind()]),
            None => Ok(false),
        }
    }

    /// As `attempt_batch`, but what is to be written in device memory is left to a node of a graph.
    #[pyo3(signature = (batch, node, /))]
    fn attempt_batch_in<'py>(&self, batch: &Bound<'py, PyAny>, node: &FillNode) -> PyResult<Option<Fields<'py>>> {
        let fields = self.fields(batch)?;
        let Some(values) = self.read_fields(&fields)? else { return Ok(Some(fields)) };
        let held = fields.into_iter().flatten().map(Bound::unbind).collect();
        self.point(batch.py(), &values, node, held)?;
        Ok(None)
    }

    /// Carries the table out with sources that were checked.
    #[pyo3(signature = (sources, /))]
    fn carry_out(&self, sources: &Bound<'_, PyList>) -> PyResult<()> {
        self.launch(sources.py(), &self.trust(sources)?)
    }

    /// As `carry_out`, but what is to be written in device memory is left to a node of a graph.
    #[pyo3(signature = (sources, node, /))]
    fn carry_out_in(&self, sources: &Bound<'_, PyList>, node: &FillNode) -> PyResult<()> {
        let held = vec![sources.clone().into_any().unbind()];
        self.point(sources.py(), &self.trust(sources)?, node, held).map(drop)
    }
}

impl FillTable {
    /// Carries out what is in host memory; the ring's block and its address, if there is one.
    fn write_host(&self, py: Python<'_>, values: &[u64]) -> Result<(usize, u64), DriverError> {
        let (number, block) = self.ring.as_ref().map_or(Ok((0, 0)), |ring| ring.get().next(py))?;
        for (slot, at, entry) in &self.table.staged {
            host::carry_out_checked(&Entry { dst: block + *at as u64, src: values[*slot], ..*entry });
        }
        for reading in &self.table.host {
            host::carry_out_checked(&placed(reading, values, block));
        }
        Ok((number, block))
    }

    fn launch(&self, py: Python<'_>, values: &[u64]) -> PyResult<()> {
        let (number, block) = self.write_host(py, values)?;
        if let Some((index, device)) = self.shared.device.as_ref().filter(|_| !self.table.device.is_empty()) {
            let stream = self.shared.stream(py, *index)?;
            let entries: Vec<_> = self.table.device.iter().map(|reading| placed(reading, values, block)).collect();
            for (range, blocks) in &self.table.launches {
                device.launch(stream, &entries[range.clone()], *blocks)?;
            }
            if let Some(ring) = &self.ring {
                ring.get().mark(number, stream)?;
            }
        }
        Ok(())
    }

    /// Points a node at what is to be written in device memory; true, as nothing is wrong.
    fn point(&self, py: Python<'_>, values: &[u64], node: &FillNode, sources: Vec<Py<PyAny>>) -> PyResult<bool> {
        let (number, block) = self.write_host(py, values)?;
        let entries: Vec<_> = self.table.device.iter().map(|reading| placed(reading, values, block)).collect();
        let blocks = self.table.launches.first().map_or(0, |(_, blocks)| *blocks);
        node.device.point(node.executable, node.node, &entries, blocks)?;
        let ring = self.ring.as_ref().map(|ring| (ring.clone_ref(py), number, self.shared.clone()));
        // What the node held before goes here, after the lock is given back: letting go may run Python.
        drop(node.replace(Pending { _sources: sources, ring }));
        Ok(true)
    }
}

/// An entry with the address of its source, or with its number.
fn placed((origin, entry): &(Origin, Entry), values: &[u64], block: u64) -> Entry {
    match *origin {
        Origin::Nowhere => *entry,
        Origin::Slot(slot) => Entry { src: values[slot], ..*entry },
        Origin::Staged(at) => Entry { src: block + at as u64, ..*entry },
        Origin::Number(slot) => Entry { value: values[slot], ..*entry },
    }
}
