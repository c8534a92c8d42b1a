//! The sources of a step, as a table takes them: read, and checked to be those that it was made for.

use pyo3::exceptions::PyValueError;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyBool, PyDict, PyFloat, PyInt, PyList};

use super::FillTable;
use crate::driver::dlpack::Form;
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
    dtype.bits_of_integer(number.extract::<i64>().ok()?.into())
}

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

    /// As `read`, of a batch's fields; none for a mapping that is no dictionary, too.
    pub(super) fn read_batch<'py>(
        &self,
        batch: &Bound<'py, PyAny>,
        mut keep: impl FnMut(Bound<'py, PyAny>),
    ) -> PyResult<Option<Vec<u64>>> {
        let Some(wanted) = &self.wanted else { return Ok(None) };
        let dict = batch.cast_exact::<PyDict>().ok();
        let mut values = Vec::with_capacity(wanted.len());
        for (name, wanted) in self.shared.fields.iter().zip(wanted) {
            let source = match (name, dict) {
                (None, _) => None,
                (Some(name), Some(dict)) => dict.get_item(name)?,
                (Some(name), None) => batch.getattr_opt(name)?,
            };
            let value = match source {
                Some(source) => {
                    let value = self.value(&source, wanted)?;
                    keep(source);
                    value
                }
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
                _ => source.call_method0(intern!(py, "data_ptr"))?.extract()?,
            };
        }
        Ok(values)
    }
}
