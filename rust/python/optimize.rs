//! `optimize_buckets` and what it returns.

use pyo3::prelude::*;
use pyo3::types::PyTuple;

use super::buckets::{Given, bytes_of_sizes, given};
use super::value::to_value;
use crate::buckets::{Arguments as ListArguments, Buckets, Runs};
use crate::document::Value;
use crate::optimize::{Arguments, Optimized};

/// The list that pads the least for traffic that was seen.
#[pyclass(name = "OptimizedBuckets", module = "devicegraph", frozen, eq)]
#[derive(PartialEq, Eq)]
pub(super) struct PyOptimizedBuckets(Optimized);

#[pymethods]
impl PyOptimizedBuckets {
    #[getter]
    fn sizes<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        PyTuple::new(py, self.0.sizes())
    }

    #[getter]
    fn steps(&self) -> u128 {
        self.0.outcome().replayed
    }

    #[getter]
    fn eager_steps(&self) -> u128 {
        self.0.outcome().eager
    }

    #[getter]
    fn raw_rows(&self) -> u128 {
        self.0.outcome().raw_rows
    }

    #[getter]
    fn padded_rows(&self) -> u128 {
        self.0.outcome().padded_rows
    }

    #[getter]
    fn waste(&self) -> f64 {
        self.0.outcome().waste()
    }

    #[getter]
    fn total_bytes(&self) -> Option<u64> {
        self.0.total_bytes()
    }

    #[getter]
    fn curve<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        PyTuple::new(py, self.0.curve())
    }

    fn padded_rows_with(&self, bs: &Bound<'_, PyAny>) -> PyResult<u128> {
        let other = Buckets::explicit(&ListArguments { bs: to_value(bs)?, ..ListArguments::default() })?;
        Ok(self.0.outcome_of(other.sizes()).padded_rows)
    }

    fn __str__(&self) -> String {
        self.0.to_string()
    }

    fn __repr__(&self) -> String {
        format!("<OptimizedBuckets {}>", Runs(self.0.sizes()))
    }
}

/// The list of sizes that pads the least for the steps of each live size.
#[pyfunction]
#[pyo3(
    signature = (histogram, max_graphs=None, bytes=None, *, bytes_per_size=None, maximum=None, alignment=None, limit=None),
    text_signature = "(histogram, max_graphs=None, bytes=None, *, bytes_per_size=None, maximum=None, alignment=1, \
                      limit=None)"
)]
#[expect(clippy::too_many_arguments, reason = "keyword arguments")]
pub(super) fn optimize_buckets(
    py: Python<'_>,
    histogram: &Bound<'_, PyAny>,
    max_graphs: Given<'_>,
    bytes: Given<'_>,
    bytes_per_size: Given<'_>,
    maximum: Given<'_>,
    alignment: Given<'_>,
    limit: Given<'_>,
) -> PyResult<PyOptimizedBuckets> {
    let arguments = Arguments {
        histogram: to_value(histogram)?,
        max_graphs: given(max_graphs)?,
        bytes: given(bytes)?,
        bytes_per_size: Value::Null,
        maximum: given(maximum)?,
        alignment: given(alignment)?,
        limit: given(limit)?,
    };
    // A function is asked about the sizes that there are without a budget of bytes.
    let sizes = || Arguments { bytes: Value::Null, ..arguments.clone() }.candidates();
    let bytes_per_size = bytes_of_sizes(bytes_per_size, sizes)?;
    // A search under a budget of bytes may take seconds.
    let best = py.detach(|| Optimized::new(&Arguments { bytes_per_size, ..arguments }))?;
    Ok(PyOptimizedBuckets(best))
}
