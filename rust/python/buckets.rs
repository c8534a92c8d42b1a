//! `Buckets` and the two functions that make one.

use pyo3::prelude::*;
use pyo3::types::{PyDict, PyIterator, PyTuple};

use super::value::{integer, quoted, to_value};
use crate::buckets::{Arguments, Buckets, Runs};
use crate::document::Value;
use crate::error::{ConfigError, Expected, Issue, Problem};

/// The sizes to capture, and how that list came about.
#[pyclass(name = "Buckets", module = "devicegraph", frozen, eq, hash)]
#[derive(PartialEq, Eq, Hash)]
pub(super) struct PyBuckets(Buckets);

/// A size that was asked for and is not captured.
#[pyclass(name = "DroppedBucket", module = "devicegraph", frozen, eq, hash)]
#[derive(PartialEq, Eq, Hash)]
pub(super) struct PyDroppedBucket {
    #[pyo3(get)]
    size: u32,
    #[pyo3(get)]
    code: &'static str,
    #[pyo3(get)]
    message: String,
    #[pyo3(get)]
    hint: Option<String>,
}

#[pymethods]
impl PyDroppedBucket {
    fn __str__(&self) -> String {
        let hint = self.hint.as_ref().map_or(String::new(), |hint| format!("\n  hint: {hint}"));
        format!("{} [{}]{hint}", self.message, self.code)
    }

    fn __repr__(&self, py: Python<'_>) -> PyResult<String> {
        Ok(format!("<DroppedBucket {}: {}>", self.size, quoted(py, self.code)?))
    }
}

pub(super) fn given(object: Option<Bound<'_, PyAny>>) -> PyResult<Value> {
    object.map_or(Ok(Value::Null), |object| to_value(&object))
}

pub(super) type Given<'py> = Option<Bound<'py, PyAny>>;

/// The bytes of each size as a document; a function of the size is asked about `sizes`. Where there are none for something
/// is wrong, an empty table: what is wrong is reported later, together with what is wrong with the budget.
pub(super) fn bytes_of_sizes(
    bytes_per_size: Given<'_>,
    sizes: impl FnOnce() -> Result<Vec<u32>, ConfigError>,
) -> PyResult<Value> {
    match bytes_per_size {
        Some(function) if function.is_callable() => {
            let bytes = |size: u32| Ok((size.to_string(), to_value(&function.call1((size,))?)?));
            sizes().unwrap_or_default().into_iter().map(bytes).collect::<PyResult<_>>().map(Value::Object)
        }
        other => given(other),
    }
}

/// Makes buckets with the bytes of each size; a function of the size is asked about the sizes that there are without a
/// budget of bytes.
fn weighed(
    bytes_per_size: Given<'_>,
    arguments: Arguments,
    make: impl Fn(&Arguments) -> Result<Buckets, ConfigError>,
) -> PyResult<PyBuckets> {
    let unweighed = || make(&Arguments { max_bytes: Value::Null, ..arguments.clone() });
    let bytes_per_size = bytes_of_sizes(bytes_per_size, || Ok(unweighed()?.sizes().to_vec()))?;
    Ok(PyBuckets(make(&Arguments { bytes_per_size, ..arguments })?))
}

#[pymethods]
impl PyBuckets {
    #[new]
    #[pyo3(
        signature = (bs, *, padding=None, alignment=None, limit=None, max_graphs=None, max_bytes=None,
                     bytes_per_size=None),
        text_signature = "(bs, *, padding=True, alignment=1, limit=None, max_graphs=None, max_bytes=None, \
                          bytes_per_size=None)"
    )]
    fn new(
        bs: &Bound<'_, PyAny>,
        padding: Given<'_>,
        alignment: Given<'_>,
        limit: Given<'_>,
        max_graphs: Given<'_>,
        max_bytes: Given<'_>,
        bytes_per_size: Given<'_>,
    ) -> PyResult<Self> {
        let arguments = Arguments {
            bs: to_value(bs)?,
            padding: given(padding)?,
            alignment: given(alignment)?,
            limit: given(limit)?,
            max_graphs: given(max_graphs)?,
            max_bytes: given(max_bytes)?,
            ..Arguments::default()
        };
        weighed(bytes_per_size, arguments, Buckets::explicit)
    }

    fn fit(&self, raw: &Bound<'_, PyAny>) -> PyResult<Option<u32>> {
        let Some(size) = integer(raw) else {
            let problem = Problem::WrongType(Expected::Integer);
            return Err(ConfigError::from(Issue::new("raw", to_value(raw)?, problem)).into());
        };
        // No bucket holds an integer that is too large, and none is for one that is too small.
        Ok(size.extract().ok().and_then(|size| self.0.fit(size)))
    }

    #[getter]
    fn sizes<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        PyTuple::new(py, self.0.sizes())
    }

    #[getter]
    fn maximum(&self) -> u32 {
        self.0.maximum()
    }

    #[getter]
    fn asked<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        PyTuple::new(py, self.0.asked())
    }

    #[getter]
    fn dropped<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        let dropped = self.0.dropped().map(|(size, reason)| {
            let message = format!("{size} is {reason}");
            Py::new(py, PyDroppedBucket { size, code: reason.code(), message, hint: reason.hint(size) })
        });
        PyTuple::new(py, dropped.collect::<PyResult<Vec<_>>>()?)
    }

    #[getter]
    fn padding(&self) -> bool {
        self.0.rules().padding
    }

    #[getter]
    fn total_bytes(&self) -> Option<u64> {
        self.0.total_bytes()
    }

    fn __len__(&self) -> usize {
        self.0.sizes().len()
    }

    fn __iter__<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyIterator>> {
        self.sizes(py)?.try_iter()
    }

    fn __contains__(&self, size: &Bound<'_, PyAny>) -> bool {
        let size = integer(size).and_then(|size| size.extract::<u32>().ok());
        size.is_some_and(|size| self.0.sizes().binary_search(&size).is_ok())
    }

    fn __str__(&self) -> String {
        self.0.to_string()
    }

    fn __repr__(&self) -> String {
        let exact = if self.0.rules().padding { "" } else { ", without padding" };
        format!("<Buckets {}{exact}>", Runs(self.0.sizes()))
    }

    fn __getnewargs_ex__<'py>(&self, py: Python<'py>) -> PyResult<((Bound<'py, PyTuple>,), Bound<'py, PyDict>)> {
        let rules = self.0.rules();
        let keywords = PyDict::new(py);
        keywords.set_item("padding", rules.padding)?;
        keywords.set_item("alignment", rules.alignment)?;
        keywords.set_item("limit", rules.limit)?;
        keywords.set_item("max_graphs", rules.max_graphs)?;
        keywords.set_item("max_bytes", rules.max_bytes)?;
        let bytes = self.0.bytes();
        keywords.set_item("bytes_per_size", (!bytes.is_empty()).then_some(bytes))?;
        Ok(((self.asked(py)?,), keywords))
    }
}

/// The buckets of decode, in requests.
#[pyfunction]
#[pyo3(
    signature = (max_bs=None, *, bs=None, padding=None, num_tokens_per_bs=None, alignment=None, token_alignment=None,
                 limit=None, max_graphs=None, max_bytes=None, bytes_per_size=None, preset=None),
    text_signature = "(max_bs=None, *, bs=None, padding=True, num_tokens_per_bs=1, alignment=1, token_alignment=1, \
                      limit=None, max_graphs=None, max_bytes=None, bytes_per_size=None, preset='default')"
)]
#[expect(clippy::too_many_arguments, reason = "keyword arguments")]
pub(super) fn decode_buckets(
    max_bs: Given<'_>,
    bs: Given<'_>,
    padding: Given<'_>,
    num_tokens_per_bs: Given<'_>,
    alignment: Given<'_>,
    token_alignment: Given<'_>,
    limit: Given<'_>,
    max_graphs: Given<'_>,
    max_bytes: Given<'_>,
    bytes_per_size: Given<'_>,
    preset: Given<'_>,
) -> PyResult<PyBuckets> {
    let arguments = Arguments {
        maximum: given(max_bs)?,
        bs: given(bs)?,
        padding: given(padding)?,
        num_tokens_per_bs: given(num_tokens_per_bs)?,
        alignment: given(alignment)?,
        token_alignment: given(token_alignment)?,
        limit: given(limit)?,
        max_graphs: given(max_graphs)?,
        max_bytes: given(max_bytes)?,
        preset: given(preset)?,
        bytes_per_size: Value::Null,
    };
    weighed(bytes_per_size, arguments, Buckets::decode)
}

/// The buckets of prefill, in tokens.
#[pyfunction]
#[pyo3(
    signature = (max_tokens=None, *, bs=None, padding=None, alignment=None, limit=None, max_graphs=None, max_bytes=None,
                 bytes_per_size=None, preset=None),
    text_signature = "(max_tokens=None, *, bs=None, padding=True, alignment=1, limit=None, max_graphs=None, \
                      max_bytes=None, bytes_per_size=None, preset='default')"
)]
#[expect(clippy::too_many_arguments, reason = "keyword arguments")]
pub(super) fn prefill_buckets(
    max_tokens: Given<'_>,
    bs: Given<'_>,
    padding: Given<'_>,
    alignment: Given<'_>,
    limit: Given<'_>,
    max_graphs: Given<'_>,
    max_bytes: Given<'_>,
    bytes_per_size: Given<'_>,
    preset: Given<'_>,
) -> PyResult<PyBuckets> {
    let arguments = Arguments {
        maximum: given(max_tokens)?,
        bs: given(bs)?,
        padding: given(padding)?,
        alignment: given(alignment)?,
        limit: given(limit)?,
        max_graphs: given(max_graphs)?,
        max_bytes: given(max_bytes)?,
        preset: given(preset)?,
        ..Arguments::default()
    };
    weighed(bytes_per_size, arguments, Buckets::prefill)
}
