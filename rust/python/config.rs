//! `PhaseConfig` and `CudaGraphConfig`.

use std::io;
use std::path::PathBuf;

use pyo3::PyTypeInfo;
use pyo3::exceptions::{PyKeyError, PyOSError};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyMappingProxy, PyString, PyTuple, PyType};

use super::error::to_tuple;
use super::value::{to_python, to_value};
use crate::config::{Config, Export, Phase, PhaseConfig, Setting};
use crate::document::Value;
use crate::error::{ConfigError, Issue, Problem};

/// How one phase is captured.
#[pyclass(name = "PhaseConfig", module = "devicegraph", frozen, eq, hash)]
#[derive(PartialEq, Eq, Hash)]
pub(super) struct PyPhaseConfig(pub(super) PhaseConfig);

/// Keyword arguments as the object they would be in a document.
fn keywords<const N: usize>(given: [(&str, Option<Bound<'_, PyAny>>); N]) -> PyResult<Value> {
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
        Ok(Self(PhaseConfig::from_value(&value)?))
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
    fn explicit_keys<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        PyTuple::new(py, self.0.explicit_keys())
    }

    fn __repr__(&self, py: Python<'_>) -> PyResult<String> {
        let unset = PhaseConfig::default();
        let given = self.0.values().into_iter().zip(unset.values()).filter(|(held, unset)| held != unset);
        let argument = |((name, value), _): ((&str, Option<&Setting>), _)| {
            let value = to_python(py, &value.map_or(Value::Null, Value::from))?;
            Ok(format!("{name}={}", value.repr()?.to_string_lossy()))
        };
        Ok(format!("PhaseConfig({})", given.map(argument).collect::<PyResult<Vec<_>>>()?.join(", ")))
    }

    fn __reduce__<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        let document = to_python(py, &self.0.to_value().0)?;
        reduced::<Self>(py, document, self.0.explicit_keys())
    }

    /// The other half of `__reduce__`.
    #[classmethod]
    #[expect(clippy::needless_pass_by_value, reason = "as a function of Python takes it")]
    fn _restore(_cls: &Bound<'_, PyType>, document: &Bound<'_, PyAny>, explicit: Vec<String>) -> PyResult<Self> {
        let config = PhaseConfig::from_value(&to_value(document)?)?;
        Ok(Self(config.retain_explicit(|name| explicit.iter().any(|explicit| explicit == name))))
    }
}

/// The settings of both phases.
#[pyclass(name = "CudaGraphConfig", module = "devicegraph", frozen, eq, hash)]
#[derive(PartialEq, Eq, Hash)]
pub(super) struct PyConfig(Config);

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
        Self::read(&document)
    }

    #[classmethod]
    fn from_dict(_cls: &Bound<'_, PyType>, document: &Bound<'_, PyAny>) -> PyResult<Self> {
        Self::read(document)
    }

    #[classmethod]
    fn from_json(_cls: &Bound<'_, PyType>, text: &str) -> PyResult<Self> {
        Ok(Self(Config::from_json(text)?))
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
        Ok(Self(self.0.with_phase(named, &value)?))
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
        let named = phase.extract().ok().and_then(|name: &str| Phase::named(name));
        match named {
            Some(named) => Ok(PyPhaseConfig(self.0.phase(named))),
            None => Err(PyKeyError::new_err((phase.clone().unbind(),))),
        }
    }

    fn __repr__(&self, py: Python<'_>) -> PyResult<String> {
        Ok(format!(
            "CudaGraphConfig(decode={}, prefill={}, padding={})",
            self.decode().__repr__(py)?,
            self.prefill().__repr__(py)?,
            if self.padding() { "True" } else { "False" },
        ))
    }

    fn __reduce__<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        let document = to_python(py, &self.0.to_value(Export::Full))?;
        reduced::<Self>(py, document, self.0.explicit_keys())
    }

    /// The other half of `__reduce__`.
    #[classmethod]
    #[expect(clippy::needless_pass_by_value, reason = "as a function of Python takes it")]
    fn _restore(_cls: &Bound<'_, PyType>, document: &Bound<'_, PyAny>, explicit: Vec<String>) -> PyResult<Self> {
        let config = Config::from_value(&to_value(document)?)?;
        Ok(Self(config.retain_explicit(|path| explicit.iter().any(|explicit| explicit == path))))
    }
}

impl PyConfig {
    /// A phase given as an object names only what it was itself given by name.
    fn read(document: &Bound<'_, PyAny>) -> PyResult<Self> {
        let config = Config::from_value(&to_value(document)?)?;
        let mut unnamed = Vec::new();
        for phase in Phase::ALL.map(Phase::name) {
            if let Ok(object) = document.get_item(phase)
                && let Ok(object) = object.cast::<PyPhaseConfig>()
            {
                unnamed.extend(object.get().0.to_value().1.into_iter().map(|key| format!("{phase}.{key}")));
            }
        }
        Ok(Self(config.retain_explicit(|path| !unnamed.iter().any(|unnamed| unnamed == path))))
    }
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

/// Pickles by the validator, not around it: what another version wrote is checked like any document.
fn reduced<'py, T: PyTypeInfo>(
    py: Python<'py>,
    document: Bound<'py, PyAny>,
    explicit: Vec<&str>,
) -> PyResult<Bound<'py, PyTuple>> {
    let restore = py.get_type::<T>().getattr("_restore")?;
    (restore, (document, PyTuple::new(py, explicit)?)).into_pyobject(py)
}

/// The table of the validator, for Python.
pub(super) fn allowed_backends(py: Python<'_>) -> PyResult<Bound<'_, PyMappingProxy>> {
    let table = PyDict::new(py);
    for phase in Phase::ALL {
        table.set_item(phase.name(), PyTuple::new(py, phase.backends())?)?;
    }
    Ok(PyMappingProxy::new(py, table.as_mapping()))
}
