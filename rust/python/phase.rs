//! `PhaseConfig`.

use pyo3::prelude::*;
use pyo3::types::{PyString, PyTuple, PyType};

use super::config::reduced;
use super::value::{to_python, to_value};
use crate::config::{PhaseConfig, Setting};
use crate::document::Value;
use crate::layers::Source;

/// How one phase is captured.
#[pyclass(name = "PhaseConfig", module = "devicegraph", frozen, eq, hash)]
#[derive(PartialEq, Eq, Hash)]
pub(super) struct PyPhaseConfig(pub(super) PhaseConfig);

/// Keyword arguments as the object they would be in a document.
pub(super) fn keywords<const N: usize>(given: [(&str, Option<Bound<'_, PyAny>>); N]) -> PyResult<Value> {
    let read = |(name, object): (&str, Option<Bound<'_, PyAny>>)| {
        Ok((name.to_owned(), object.map_or(Ok(Value::Null), |object| to_value(&object))?))
    };
    given.into_iter().map(read).collect::<PyResult<_>>().map(Value::Object)
}

fn setting<'py>(py: Python<'py>, setting: Option<&Setting>) -> PyResult<Bound<'py, PyAny>> {
    Ok(match setting {
        Some(Setting::Word(word)) => PyString::intern(py, word).into_any(),
        Some(Setting::Sizes(sizes)) => PyTuple::new(py, sizes)?.into_any(),
        other => to_python(py, &other.map_or(Value::Null, Value::from))?,
    })
}

#[pymethods]
impl PyPhaseConfig {
    // The compiler's default is not filled in by the signature: what a caller names is explicit, even the default.
    #[new]
    #[pyo3(
        signature = (backend=None, max_bs=None, bs=None, tc_compiler=None),
        text_signature = "(backend=None, max_bs=None, bs=None, tc_compiler='eager')"
    )]
    fn new(
        backend: Option<Bound<'_, PyAny>>,
        max_bs: Option<Bound<'_, PyAny>>,
        bs: Option<Bound<'_, PyAny>>,
        tc_compiler: Option<Bound<'_, PyAny>>,
    ) -> PyResult<Self> {
        let value = keywords([("backend", backend), ("max_bs", max_bs), ("bs", bs), ("tc_compiler", tc_compiler)])?;
        Ok(Self(PhaseConfig::from_value(&value, &Source::Config("PhaseConfig".into()))?))
    }

    #[getter]
    fn backend<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        setting(py, self.0.get("backend"))
    }

    #[getter]
    fn max_bs<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        setting(py, self.0.get("max_bs"))
    }

    #[getter]
    fn bs<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        setting(py, self.0.get("bs"))
    }

    #[getter]
    fn tc_compiler<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        setting(py, self.0.get("tc_compiler"))
    }

    #[getter]
    fn reason(&self) -> Option<String> {
        self.0.reason()
    }

    #[getter]
    fn explicit_keys<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        PyTuple::new(py, self.0.explicit_keys())
    }

    pub(super) fn __repr__(&self, py: Python<'_>) -> PyResult<String> {
        let unset = PhaseConfig::default();
        let given = self.0.values().into_iter().zip(unset.values()).filter(|(held, unset)| held != unset);
        let argument = |((name, value), _): ((&str, Option<&Setting>), _)| {
            let value = to_python(py, &value.map_or(Value::Null, Value::from))?;
            Ok(format!("{name}={}", value.repr()?.to_string_lossy()))
        };
        Ok(format!("PhaseConfig({})", given.map(argument).collect::<PyResult<Vec<_>>>()?.join(", ")))
    }

    fn __reduce__<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        reduced::<Self>(py, &self.0.to_state())
    }

    /// The other half of `__reduce__`.
    #[classmethod]
    fn _restore(_cls: &Bound<'_, PyType>, state: &Bound<'_, PyAny>) -> PyResult<Self> {
        Ok(Self(PhaseConfig::from_state(&to_value(state)?)?))
    }
}
