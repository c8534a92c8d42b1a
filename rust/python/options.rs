//! The table of options, and what given ones come to.

use pyo3::prelude::*;
use pyo3::types::{PyDict, PyMapping, PyTuple};

use super::config::PyConfig;
use super::value::{to_python, to_value};
use crate::config::Config;
use crate::document::Value;
use crate::options::{ConfigOption, OPTIONS, Takes};

/// One option of a command line.
#[pyclass(name = "ConfigOption", module = "devicegraph._core", frozen)]
pub(super) struct PyConfigOption(&'static ConfigOption);

#[pymethods]
impl PyConfigOption {
    #[getter]
    fn flag(&self) -> &'static str {
        self.0.flag
    }

    #[getter]
    fn keyword(&self) -> String {
        self.0.keyword()
    }

    #[getter]
    fn keys<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        PyTuple::new(py, self.0.keys)
    }

    #[getter]
    fn takes(&self) -> &'static str {
        match self.0.takes {
            Takes::One => "one",
            Takes::Many => "many",
            Takes::Nothing(_) => "nothing",
            Takes::Config => "config",
        }
    }

    #[getter]
    fn says<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyAny>>> {
        match &self.0.takes {
            Takes::Nothing(setting) => to_python(py, &Value::from(setting)).map(Some),
            _ => Ok(None),
        }
    }

    #[getter]
    fn replacement(&self) -> Option<String> {
        self.0.replacement()
    }

    #[getter]
    fn metavar(&self) -> Option<String> {
        self.0.metavar()
    }

    #[getter]
    fn help(&self) -> String {
        self.0.help()
    }

    fn __repr__(&self) -> String {
        format!("<ConfigOption {}>", self.0.flag)
    }
}

/// Every option, as Python reads them.
pub(super) fn table(py: Python<'_>) -> PyResult<Bound<'_, PyTuple>> {
    let options = OPTIONS.iter().map(|option| Py::new(py, PyConfigOption(option)));
    PyTuple::new(py, options.collect::<PyResult<Vec<_>>>()?)
}

/// What options come to, and what to say about the deprecated ones.
#[pyfunction]
pub(super) fn merge_options<'py>(
    py: Python<'py>,
    options: &Bound<'py, PyDict>,
) -> PyResult<(PyConfig, Bound<'py, PyTuple>)> {
    let (mut given, mut whole) = (Vec::new(), None);
    for (name, value) in options {
        if name.eq(WHOLE)?
            && let Some(config) = read_whole(&value)
        {
            whole = Some(config);
        } else {
            given.push((name.str()?.to_string_lossy().into_owned(), to_value(&value)?));
        }
    }
    let (config, deprecated) = Config::from_options(&given, whole.as_ref())?;
    let told: Vec<String> = deprecated.into_iter().filter_map(ConfigOption::deprecation).collect();
    Ok((PyConfig(config), PyTuple::new(py, told)?))
}

/// The option that holds a whole configuration.
const WHOLE: &str = "cuda_graph_config";

/// A configuration that is an object, or a good mapping of objects that know who named what in them. What is wrong with
/// another one is reported together with the other options.
fn read_whole(value: &Bound<'_, PyAny>) -> Option<Config> {
    match value.cast::<PyConfig>() {
        Ok(config) => Some(config.get().0.clone()),
        Err(_) if value.is_instance_of::<PyMapping>() => Some(PyConfig::read(value, OPTIONS[0].flag).ok()?.0),
        Err(_) => None,
    }
}

/// What stands after an option on a command line.
#[pyfunction]
#[pyo3(signature = (text, /))]
pub(super) fn read_argument<'py>(py: Python<'py>, text: &str) -> PyResult<Bound<'py, PyAny>> {
    to_python(py, &Value::from_argument(text))
}
