//! `Explanation`.

use pyo3::prelude::*;

use super::value::to_python;
use crate::explain::Explanation;

/// What a configuration holds and where that came from.
#[pyclass(name = "Explanation", module = "devicegraph", frozen)]
pub(super) struct PyExplanation(pub(super) Explanation);

#[pymethods]
impl PyExplanation {
    fn to_dict<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        to_python(py, &self.0.to_value())
    }

    fn to_json(&self) -> String {
        self.0.to_value().to_string()
    }

    fn __str__(&self) -> String {
        self.0.to_string()
    }

    fn __repr__(&self) -> String {
        format!("<Explanation\n{}>", self.0)
    }
}
