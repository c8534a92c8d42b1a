//! `CudaGraphConfig`.

use std::io;
use std::path::PathBuf;

use pyo3::PyTypeInfo;
use pyo3::exceptions::{PyKeyError, PyOSError};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyIterator, PyMappingProxy, PyTuple, PyType};

use super::error::to_tuple;
use super::explain::PyExplanation;
use super::phase::{PyPhaseConfig, keywords};
use super::value::{to_python, to_value};
use crate::config::{Config, Export, Phase};
use crate::document::Value;
use crate::error::{ConfigError, Issue, Problem};
use crate::layers::Source;

/// The settings of both phases.
// With `mapping` its items have names only; without, Python would look for them by number as well.
#[pyclass(name = "CudaGraphConfig", module = "devicegraph", frozen, eq, hash, mapping)]
#[derive(PartialEq, Eq, Hash)]
pub(super) struct PyConfig(pub(super) Config);

#[pymethods]
impl PyConfig {
    #[new]
    #[pyo3(
        signature = (decode=None, prefill=None, padding=None),
        text_signature = "(decode=None, prefill=None, padding=True)"
    )]
    fn new(
        py: Python<'_>,
        decode: Option<Bound<'_, PyAny>>,
        prefill: Option<Bound<'_, PyAny>>,
        padding: Option<Bound<'_, PyAny>>,
    ) -> PyResult<Self> {
        let document = PyDict::new(py);
        for (name, value) in [("decode", decode), ("prefill", prefill), ("padding", padding)] {
            document.set_item(name, value)?;
        }
        Self::read(&document, "CudaGraphConfig")
    }

    #[classmethod]
    fn from_dict(_cls: &Bound<'_, PyType>, document: &Bound<'_, PyAny>) -> PyResult<Self> {
        Self::read(document, "from_dict")
    }

    #[classmethod]
    fn from_json(_cls: &Bound<'_, PyType>, text: &str) -> PyResult<Self> {
        Ok(Self(Config::from_json(text, &Source::Config("from_json".into()))?))
    }

    #[classmethod]
    #[expect(clippy::needless_pass_by_value, reason = "converted from any path-like object")]
    fn from_file(_cls: &Bound<'_, PyType>, py: Python<'_>, path: PathBuf) -> PyResult<Self> {
        let name = path.to_string_lossy();
        let content = py.detach(|| std::fs::read(&path)).map_err(|error| os_error(&error, &name))?;
        Ok(Self(Config::from_file(&name, &content)?))
    }

    #[pyo3(signature = (*, explicit=false, full=false))]
    fn to_dict<'py>(&self, py: Python<'py>, explicit: bool, full: bool) -> PyResult<Bound<'py, PyAny>> {
        to_python(py, &self.0.to_value(export(explicit, full)))
    }

    #[pyo3(signature = (*, explicit=false, full=false))]
    fn to_json(&self, explicit: bool, full: bool) -> String {
        self.0.to_value(export(explicit, full)).to_string()
    }

    #[pyo3(
        signature = (phase, *, backend=None, max_bs=None, bs=None, tc_compiler=None)
    )]
    fn with_phase(
        &self,
        phase: &str,
        backend: Option<Bound<'_, PyAny>>,
        max_bs: Option<Bound<'_, PyAny>>,
        bs: Option<Bound<'_, PyAny>>,
        tc_compiler: Option<Bound<'_, PyAny>>,
    ) -> PyResult<Self> {
        let named = Phase::named(phase)
            .ok_or_else(|| ConfigError::from(Issue::new(phase, Value::Null, Problem::UnknownPhase)))?;
        let value = keywords([("backend", backend), ("max_bs", max_bs), ("bs", bs), ("tc_compiler", tc_compiler)])?;
        Ok(Self(self.0.with_phase(named, &value, &Source::Config("with_phase".into()))?))
    }

    #[getter]
    fn decode(&self) -> PyPhaseConfig {
        PyPhaseConfig(self.0.phase(Phase::Decode))
    }

    #[getter]
    fn prefill(&self) -> PyPhaseConfig {
        PyPhaseConfig(self.0.phase(Phase::Prefill))
    }

    #[getter]
    fn padding(&self) -> bool {
        self.0.padding()
    }

    #[getter]
    fn explicit_keys<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        PyTuple::new(py, self.0.explicit_keys())
    }

    #[getter]
    fn warnings<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        to_tuple(py, &self.0.warnings())
    }

    fn __getitem__(&self, phase: &Bound<'_, PyAny>) -> PyResult<PyPhaseConfig> {
        match phase_of(phase) {
            Some(named) => Ok(PyPhaseConfig(self.0.phase(named))),
            None => Err(PyKeyError::new_err((phase.clone().unbind(),))),
        }
    }

    #[expect(clippy::unused_self, reason = "as Python calls it")]
    fn __len__(&self) -> usize {
        Phase::ALL.len()
    }

    fn __iter__(slf: &Bound<'_, Self>) -> PyResult<Py<PyIterator>> {
        Ok(PyTuple::new(slf.py(), Phase::ALL.map(Phase::name))?.try_iter()?.unbind())
    }

    #[expect(clippy::unused_self, reason = "as Python calls it")]
    fn __contains__(&self, phase: &Bound<'_, PyAny>) -> bool {
        phase_of(phase).is_some()
    }

    fn __repr__(&self, py: Python<'_>) -> PyResult<String> {
        Ok(format!(
            "CudaGraphConfig(decode={}, prefill={}, padding={})",
            self.decode().__repr__(py)?,
            self.prefill().__repr__(py)?,
            if self.padding() { "True" } else { "False" },
        ))
    }

    fn explain(&self) -> PyExplanation {
        PyExplanation(self.0.explain())
    }

    fn __reduce__<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        reduced::<Self>(py, &self.0.to_state())
    }

    /// The other half of `__reduce__`.
    #[classmethod]
    fn _restore(_cls: &Bound<'_, PyType>, state: &Bound<'_, PyAny>) -> PyResult<Self> {
        Ok(Self(Config::from_state(&to_value(state)?)?))
    }
}

impl PyConfig {
    /// A phase given as an object keeps what it knows of who named what.
    pub(super) fn read(document: &Bound<'_, PyAny>, caller: &'static str) -> PyResult<Self> {
        let mut config = Config::from_value(&to_value(document)?, &Source::Config(caller.into()))?;
        for phase in Phase::ALL {
            if let Ok(object) = document.get_item(phase.name())
                && let Ok(object) = object.cast::<PyPhaseConfig>()
            {
                config = config.with_sources_of(phase, &object.get().0);
            }
        }
        Ok(Self(config))
    }
}

fn phase_of(name: &Bound<'_, PyAny>) -> Option<Phase> {
    name.extract().ok().and_then(Phase::named)
}

fn export(explicit: bool, full: bool) -> Export {
    match (full, explicit) {
        (true, _) => Export::Full,
        (false, true) => Export::Explicit,
        (false, false) => Export::Differences,
    }
}

/// With number and file name Python makes the right subclass, such as `FileNotFoundError`.
fn os_error(error: &io::Error, name: &str) -> PyErr {
    let reason = error.to_string();
    let reason = reason.split(" (os error").next().unwrap_or_default().to_owned();
    PyOSError::new_err((error.raw_os_error(), reason, name.to_owned()))
}

pub(super) fn reduced<'py, T: PyTypeInfo>(py: Python<'py>, state: &Value) -> PyResult<Bound<'py, PyTuple>> {
    let restore = py.get_type::<T>().getattr("_restore")?;
    (restore, (to_python(py, state)?,)).into_pyobject(py)
}

/// The table of the validator, for Python.
pub(super) fn allowed_backends(py: Python<'_>) -> PyResult<Bound<'_, PyMappingProxy>> {
    let table = PyDict::new(py);
    for phase in Phase::ALL {
        table.set_item(phase.name(), PyTuple::new(py, phase.backends())?)?;
    }
    Ok(PyMappingProxy::new(py, table.as_mapping()))
}

/// The JSON Schema of a configuration.
#[pyfunction]
pub(super) fn config_schema(py: Python<'_>) -> PyResult<Bound<'_, PyAny>> {
    to_python(py, &crate::schema::schema())
}
