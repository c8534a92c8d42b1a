//! `FillTables`, `FillTable`, `FillNode`, `HostRing`: fills that the core carries out itself.

use std::sync::{Arc, Mutex, PoisonError};

use pyo3::exceptions::PyValueError;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyBool, PyCapsule, PyDict, PyFloat, PyInt, PyList, PyString, PyType};

use super::plan::{FillPlan, FillPlanner, sizes};
use crate::driver::cuda;
use crate::driver::dlpack::{Exchange, Form};
use crate::driver::host;
use crate::dtype::DType;
use crate::error::DriverError;
use crate::step::{Source, Work};
use crate::table::{Buffer, Entry, Given, Origin, Place, Table};

mod exceptions {
    pyo3::import_exception!(devicegraph.errors, BackendError);
}

impl From<DriverError> for PyErr {
    fn from(error: DriverError) -> Self {
        Python::attach(|py| {
            let kwargs = PyDict::new(py);
            let made = kwargs
                .set_item("code", "cuda-driver")
                .and_then(|()| py.get_type::<exceptions::BackendError>().call((error.to_string(),), Some(&kwargs)));
            made.map_or_else(|error| error, PyErr::from_value)
        })
    }
}

/// Pinned host memory in blocks that take turns, so that none is written while the device may still read it.
#[pyclass(frozen, module = "devicegraph._core")]
pub(super) struct HostRing {
    device: Arc<cuda::Device>,
    address: u64,
    block_bytes: usize,
    events: Vec<u64>,
    /// The block that was given last, and which ones have been marked since they were.
    state: Mutex<(usize, Vec<bool>)>,
    /// ADDRESS: the memory, which goes after everything queued has read it: see `drop`.
    _memory: Py<PyAny>,
}

#[pymethods]
impl HostRing {
    #[new]
    #[pyo3(signature = (memory, address, *, block_bytes, blocks, kernel))]
    fn new(memory: Py<PyAny>, address: u64, block_bytes: usize, blocks: usize, kernel: &FillKernel) -> PyResult<Self> {
        let device = kernel.0.clone();
        let events = (0..blocks.max(1)).map(|_| device.event()).collect::<Result<Vec<_>, _>>()?;
        let state = Mutex::new((0, vec![false; events.len()]));
        Ok(Self { device, address, block_bytes, events, state, _memory: memory })
    }
}

impl HostRing {
    /// The next block, once the device has read what it held, and its address.
    fn next(&self, py: Python<'_>) -> Result<(usize, u64), DriverError> {
        let (block, is_marked) = {
            let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
            state.0 = (state.0 + 1) % self.events.len();
            let block = state.0;
            (block, std::mem::take(&mut state.1[block]))
        };
        if is_marked && !self.device.is_done(self.events[block])? {
            py.detach(|| self.device.wait(self.events[block]))?;
        }
        Ok((block, self.address + (block * self.block_bytes) as u64))
    }

    /// Marks a block as read by what is queued on a stream so far.
    fn mark(&self, block: usize, stream: u64) -> Result<(), DriverError> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.1[block] = true;
        self.device.record(self.events[block], stream)
    }
}

impl Drop for HostRing {
    fn drop(&mut self) {
        for (event, is_marked) in
            self.events.iter().zip(&self.state.get_mut().unwrap_or_else(PoisonError::into_inner).1)
        {
            // The memory goes with the ring: what is queued must have read it.
            if *is_marked {
                drop(self.device.wait(*event));
            }
            self.device.destroy(*event);
        }
    }
}

/// A CUDA device with the fill kernel loaded.
#[pyclass(frozen, module = "devicegraph._core")]
pub(super) struct FillKernel(Arc<cuda::Device>);

#[pymethods]
impl FillKernel {
    #[new]
    #[pyo3(signature = (index, /))]
    fn new(index: i32) -> PyResult<Self> {
        Ok(Self(Arc::new(cuda::Device::open(index)?)))
    }

    /// The node of a captured graph that runs the fill kernel, in its executable; None where there is not exactly one.
    #[pyo3(signature = (*, graph, executable))]
    fn fill_node(&self, graph: u64, executable: u64) -> PyResult<Option<FillNode>> {
        let nodes = self.0.fill_nodes(graph)?;
        let [node] = nodes[..] else { return Ok(None) };
        Ok(Some(FillNode { device: self.0.clone(), executable, node, pending: Mutex::default() }))
    }

    /// Queues a table that writes nothing on a stream.
    #[pyo3(signature = (stream, /))]
    fn launch_empty(&self, stream: u64) -> PyResult<()> {
        Ok(self.0.launch(stream, &[], 0)?)
    }
}

/// Makes an executable one of another graph of the same topology.
#[pyfunction]
#[pyo3(signature = (*, executable, graph))]
pub(super) fn update_executable(executable: u64, graph: u64) -> PyResult<bool> {
    Ok(cuda::update_executable(executable, graph)?)
}

/// The fill kernel as a node of a graph's executable.
#[pyclass(frozen, module = "devicegraph._core")]
pub(super) struct FillNode {
    device: Arc<cuda::Device>,
    executable: u64,
    node: u64,
    pending: Mutex<Pending>,
}

/// What the next launch of a node reads.
#[derive(Default)]
struct Pending {
    /// ADDRESS: the sources, until the launch is queued; from then on the order of the stream keeps their memory.
    _sources: Vec<Py<PyAny>>,
    /// The block of a ring that it reads, and what knows the stream.
    ring: Option<(Py<HostRing>, usize, Arc<Shared>)>,
}

#[pymethods]
impl FillNode {
    /// Makes the node write nothing.
    fn clear(&self) -> PyResult<()> {
        self.device.point(self.executable, self.node, &[], 0)?;
        drop(self.replace(Pending::default()));
        Ok(())
    }

    /// Lets go of what the launch that was just queued reads.
    fn launched(&self, py: Python<'_>) -> PyResult<()> {
        match self.replace(Pending::default()).ring {
            Some((ring, block, shared)) => shared.mark(py, ring.get(), block),
            None => Ok(()),
        }
    }
}

impl FillNode {
    fn replace(&self, pending: Pending) -> Pending {
        std::mem::replace(&mut self.pending.lock().unwrap_or_else(PoisonError::into_inner), pending)
    }
}

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

    /// Marks a ring's block as read by what is queued so far.
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

/// What a slot's source has to be.
enum Wanted {
    Nothing,
    /// A tensor of a form that spans so many bytes.
    Tensor(Form, u64),
    /// A number for a slot of that type.
    Number(DType),
}

/// The bits of a plain number as an element of a type that holds it.
fn number_bits(dtype: DType, number: &Bound<'_, PyAny>) -> Option<u64> {
    if number.is_exact_instance_of::<PyFloat>() {
        return dtype.bits_of_real(number.extract().ok()?);
    }
    if number.is_exact_instance_of::<PyBool>() {
        return dtype.bits_of_integer(i128::from(number.extract::<bool>().ok()?));
    }
    number.is_exact_instance_of::<PyInt>().then_some(())?;
    if let Ok(number) = number.extract::<i64>() {
        return dtype.bits_of_integer(number.into());
    }
    match number.extract::<u64>() {
        Ok(number) => dtype.bits_of_integer(number.into()),
        Err(_) => dtype.bits_of_real(number.extract().ok()?),
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
type Described = (String, Vec<usize>, String, Vec<usize>, bool);

#[pymethods]
impl FillTables {
    #[new]
    #[pyo3(signature = (planner, buffers, *, fields, kinds, exchange, kernel, stream_of, ring))]
    #[expect(clippy::too_many_arguments, clippy::needless_pass_by_value, reason = "a record, given by keyword")]
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
        let mut spans: Vec<_> = buffers.iter().map(|(address, bytes, _)| (*address, address + bytes)).collect();
        spans.sort_unstable();
        let device = kernel.map(|(index, kernel)| (index, kernel.0.clone()));
        let shared = Arc::new(Shared { exchange, kinds, device, fields, stream_of, spans });
        let buffers = buffers.iter().map(|(address, _, pad_bits)| Buffer { address: *address, pad_bits: *pad_bits });
        Ok(Self { planner, shared, buffers: buffers.collect(), ring })
    }

    /// Whether sources are read and checked by the core.
    #[getter]
    fn checks(&self) -> bool {
        self.shared.exchange.is_some()
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
                let (dtype, shape, device, strides, is_number) = source?;
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
        Some(Wanted::Tensor(form, (source.span() * dtype.itemsize()) as u64))
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

/// A batch's fields, one for each slot.
type Fields<'py> = Vec<Option<Bound<'py, PyAny>>>;

impl FillTable {
    /// For each source its address, or the bits of a number; none where one is not what the table was made for.
    fn read(&self, sources: &Bound<'_, PyList>) -> PyResult<Option<Vec<u64>>> {
        let Some(wanted) = self.wanted.as_ref().filter(|wanted| wanted.len() == sources.len()) else {
            return Ok(None);
        };
        let mut values = Vec::with_capacity(wanted.len());
        for (source, wanted) in sources.iter().zip(wanted) {
            match self.value(&source, wanted)? {
                Some(value) => values.push(value),
                None => return Ok(None),
            }
        }
        Ok(Some(values))
    }

    /// The fields of a batch that is an object with attributes, or a dictionary. All are there before the first address is
    /// asked for: reading one may run code that frees another.
    fn fields<'py>(&self, batch: &Bound<'py, PyAny>) -> PyResult<Fields<'py>> {
        let dict = batch.cast_exact::<PyDict>().ok();
        let field = |name: &Option<Py<PyString>>| match (name, dict) {
            (None, _) => Ok(None),
            (Some(name), Some(dict)) => dict.get_item(name),
            (Some(name), None) => batch.getattr_opt(name),
        };
        self.shared.fields.iter().map(field).collect()
    }

    /// As `read`, of a batch's fields.
    fn read_fields(&self, fields: &Fields<'_>) -> PyResult<Option<Vec<u64>>> {
        let Some(wanted) = self.wanted.as_ref().filter(|wanted| wanted.len() == fields.len()) else { return Ok(None) };
        let mut values = Vec::with_capacity(wanted.len());
        for (source, wanted) in fields.iter().zip(wanted) {
            let value = match source {
                Some(source) => self.value(source, wanted)?,
                None => matches!(wanted, Wanted::Nothing).then_some(0),
            };
            match value {
                Some(value) => values.push(value),
                None => return Ok(None),
            }
        }
        Ok(Some(values))
    }

    fn value(&self, source: &Bound<'_, PyAny>, wanted: &Wanted) -> PyResult<Option<u64>> {
        match wanted {
            Wanted::Nothing => Ok(source.is_none().then_some(0)),
            Wanted::Number(dtype) => Ok(number_bits(*dtype, source)),
            Wanted::Tensor(form, bytes) => self.address(source.py(), source, form, *bytes),
        }
    }

    fn address(&self, py: Python<'_>, source: &Bound<'_, PyAny>, form: &Form, bytes: u64) -> PyResult<Option<u64>> {
        let kind = source.get_type();
        let Some(exchange) = self.shared.exchange.filter(|_| self.shared.kinds.iter().any(|known| known.is(&kind)))
        else {
            return Ok(None);
        };
        let Some(address) = exchange.address(source, form) else {
            drop(PyErr::take(py));
            return Ok(None);
        };
        // A lazily negated view has the bytes of what it negates.
        let is_itself =
            self.shared.is_apart(address, bytes) && !source.call_method0(intern!(py, "is_neg"))?.is_truthy()?;
        Ok(is_itself.then_some(address))
    }

    /// As `read`, of sources that were checked.
    fn trust(&self, sources: &Bound<'_, PyList>) -> PyResult<Vec<u64>> {
        let py = sources.py();
        let mut values = vec![0; sources.len()];
        let entries = self.table.host.iter().chain(&self.table.device).map(|(origin, entry)| (*origin, entry));
        let staged = self.table.staged.iter().map(|(slot, _, entry)| (Origin::Slot(*slot), entry));
        for (origin, _) in entries.chain(staged) {
            let (Origin::Slot(slot) | Origin::Number(slot)) = origin else { continue };
            let source = sources.get_item(slot)?;
            values[slot] = match origin {
                Origin::Number(_) => number_bits(self.dtypes[slot], &source)
                    .ok_or_else(|| PyValueError::new_err("a number that its slot cannot hold"))?,
                _ => match self.form(slot, &source)? {
                    Some((exchange, form)) => exchange.address(&source, form).ok_or_else(|| {
                        drop(PyErr::take(py));
                        PyValueError::new_err("a source's attributes are not those of its memory")
                    })?,
                    None => source.call_method0(intern!(py, "data_ptr"))?.extract()?,
                },
            };
        }
        Ok(values)
    }

    /// How a tensor's memory is read, and the form that it has to have; none where it cannot be read so.
    fn form(&self, slot: usize, source: &Bound<'_, PyAny>) -> PyResult<Option<(Exchange, &Form)>> {
        // Attributes of a subclass may say anything; what the tables were made for is what is read and no more.
        let wanted = self.wanted.as_ref().and_then(|wanted| wanted.get(slot));
        let (Some(exchange), Some(Wanted::Tensor(form, _)), [tensor, ..]) =
            (self.shared.exchange, wanted, &self.shared.kinds[..])
        else {
            return Ok(None);
        };
        Ok(source.get_type().is_subclass(tensor.bind(source.py()))?.then_some((exchange, form)))
    }

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
