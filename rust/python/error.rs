//! The one conversion of the core's errors into the exceptions of `devicegraph.errors`.

use std::hash::{DefaultHasher, Hash, Hasher};

use pyo3::prelude::*;
use pyo3::types::{IntoPyDict, PyDict, PyTuple};

use super::value::{quoted, to_python, to_value};
use crate::document::Value;
use crate::error::{ConfigError, DriverError, Issue, place, write_issue};

mod exceptions {
    pyo3::import_exception!(devicegraph.errors, BackendError);
    pyo3::import_exception!(devicegraph.errors, ConfigError);
}

/// One thing wrong with a configuration, or without effect in it.
#[pyclass(name = "ConfigIssue", module = "devicegraph", frozen, eq)]
#[derive(PartialEq)]
pub(super) struct PyConfigIssue {
    #[pyo3(get)]
    path: String,
    /// As plain data, so that an issue that was pickled is equal to the one that was not.
    value: Value,
    #[pyo3(get)]
    allowed: Option<String>,
    #[pyo3(get)]
    code: String,
    #[pyo3(get)]
    message: String,
    #[pyo3(get)]
    hint: Option<String>,
    #[pyo3(get)]
    source: Option<String>,
}

impl From<&Issue> for PyConfigIssue {
    fn from(issue: &Issue) -> Self {
        Self {
            path: issue.path.clone(),
            value: issue.value.clone().plain(),
            allowed: issue.allowed(),
            code: issue.code().to_owned(),
            message: issue.message(),
            hint: issue.hint(),
            source: issue.source.clone(),
        }
    }
}

#[pymethods]
impl PyConfigIssue {
    #[new]
    #[pyo3(signature = (path, value, allowed, code, message, hint, source=None))]
    fn new(
        path: String,
        value: &Bound<'_, PyAny>,
        allowed: Option<String>,
        code: String,
        message: String,
        hint: Option<String>,
        source: Option<String>,
    ) -> PyResult<Self> {
        Ok(Self { path, value: to_value(value)?.plain(), allowed, code, message, hint, source })
    }

    #[getter]
    fn value<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        to_python(py, &self.value)
    }

    fn __getnewargs__<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        let value = self.value(py)?;
        (&self.path, value, &self.allowed, &self.code, &self.message, &self.hint, &self.source).into_pyobject(py)
    }

    fn __hash__(&self) -> u64 {
        let mut hasher = DefaultHasher::new();
        (&self.path, &self.code, &self.message).hash(&mut hasher);
        hasher.finish()
    }

    fn __str__(&self) -> String {
        let mut text = String::new();
        // Writing to a string cannot fail.
        let _ = write_issue(
            &mut text,
            &place(&self.path, self.source.as_deref()),
            &self.message,
            &self.code,
            self.hint.as_deref(),
        );
        text
    }

    fn __repr__(&self, py: Python<'_>) -> PyResult<String> {
        let optional = |text: &Option<String>| text.as_ref().map_or(Ok("None".to_owned()), |text| quoted(py, text));
        Ok(format!(
            "ConfigIssue(path={}, value={}, allowed={}, code={}, message={}, hint={}, source={})",
            quoted(py, &self.path)?,
            self.value(py)?.repr()?.to_string_lossy(),
            optional(&self.allowed)?,
            quoted(py, &self.code)?,
            quoted(py, &self.message)?,
            optional(&self.hint)?,
            optional(&self.source)?,
        ))
    }
}

/// The issues as Python reads them.
pub(super) fn to_tuple<'py>(py: Python<'py>, issues: &[Issue]) -> PyResult<Bound<'py, PyTuple>> {
    let issues = issues.iter().map(|issue| Py::new(py, PyConfigIssue::from(issue)));
    PyTuple::new(py, issues.collect::<PyResult<Vec<_>>>()?)
}

impl From<ConfigError> for PyErr {
    fn from(error: ConfigError) -> Self {
        Python::attach(|py| {
            let raise = || {
                let issues = to_tuple(py, &error.issues)?.into_any();
                let code = "invalid-config".into_pyobject(py)?.into_any();
                let keywords = [("issues", issues), ("code", code)].into_py_dict(py)?;
                let kind = py.get_type::<exceptions::ConfigError>();
                kind.call((error.to_string(),), Some(&keywords))
            };
            // What goes wrong while raising (no memory) is raised instead.
            raise().map_or_else(|other| other, PyErr::from_value)
        })
    }
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
