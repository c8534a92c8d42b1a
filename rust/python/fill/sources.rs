//! The sources of a step, as a table takes them: read, and checked to be those that it was made for.

use pyo3::exceptions::PyValueError;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyBool, PyDict, PyFloat, PyInt, PyList, PyString};

use super::FillTable;
use crate::driver::dlpack::{Exchange, Form};
use crate::dtype::DType;
use crate::table::Origin;

/// What a slot's source has to be.
pub(super) enum Wanted {
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

/// A batch's fields, one for each slot.
pub(super) type Fields<'py> = Vec<Option<Bound<'py, PyAny>>>;

impl FillTable {
    /// For each source its address, or the bits of a number; none where one is not what the table was made for.
    pub(super) fn read(&self, sources: &Bound<'_, PyList>) -> PyResult<Option<Vec<u64>>> {
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
    pub(super) fn fields<'py>(&self, batch: &Bound<'py, PyAny>) -> PyResult<Fields<'py>> {
        let dict = batch.cast_exact::<PyDict>().ok();
        let field = |name: &Option<Py<PyString>>| match (name, dict) {
            (None, _) => Ok(None),
            (Some(name), Some(dict)) => dict.get_item(name),
            (Some(name), None) => batch.getattr_opt(name),
        };
        self.shared.fields.iter().map(field).collect()
    }

    /// As `read`, of a batch's fields.
    pub(super) fn read_fields(&self, fields: &Fields<'_>) -> PyResult<Option<Vec<u64>>> {
        let Some(wanted) = self.wanted.as_ref().filter(|wanted| wanted.len() == fields.len()) else {
            return Ok(None);
        };
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
    pub(super) fn trust(&self, sources: &Bound<'_, PyList>) -> PyResult<Vec<u64>> {
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
}
