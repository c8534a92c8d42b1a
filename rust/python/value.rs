//! Python objects as documents, and back.

use std::borrow::Cow;

use pyo3::prelude::*;
use pyo3::types::{
    PyBool, PyByteArray, PyBytes, PyDict, PyFloat, PyInt, PyList, PyMapping, PySequence, PyString, PyTuple,
};

use super::phase::PyPhaseConfig;
use crate::config::LARGEST_SIZE;
use crate::document::Value;
use crate::dtype::DType;
use crate::slot;

/// Sizes or strides. Those of a tuple, as `torch.Size` is, or of a list are taken without asking for an iterator.
pub(super) struct Dims(pub(super) slot::Dims);

impl<'py> FromPyObject<'_, 'py> for Dims {
    type Error = PyErr;

    fn extract(object: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        let mut sizes = slot::Dims::new();
        if let Ok(tuple) = object.cast::<PyTuple>() {
            for size in tuple.iter_borrowed() {
                sizes.push(size.extract()?);
            }
        } else if let Ok(list) = object.cast::<PyList>() {
            for size in list.iter() {
                sizes.push(size.extract()?);
            }
        } else {
            sizes = object.extract::<Vec<_>>()?.into();
        }
        Ok(Self(sizes))
    }
}

/// No configuration nests this deep; an object that contains itself does.
const DEEPEST: usize = 8;

/// No list is longer: there are no more sizes. A range may well be, and a sequence that lies has no end.
const LONGEST: usize = LARGEST_SIZE as usize;

/// Reads what a caller gave; an exception comes only from the caller's own mapping or sequence.
pub(super) fn to_value(object: &Bound<'_, PyAny>) -> PyResult<Value> {
    read(object, DEEPEST)
}

fn read(object: &Bound<'_, PyAny>, depth: usize) -> PyResult<Value> {
    // The order matters: `bool` is a subclass of `int`, and text is a sequence.
    if object.is_none() {
        return Ok(Value::Null);
    }
    if let Ok(flag) = object.cast::<PyBool>() {
        return Ok(Value::Bool(flag.is_true()));
    }
    if let Ok(number) = object.cast::<PyInt>() {
        return Ok(number_of(number));
    }
    if let Ok(number) = object.cast::<PyFloat>() {
        return Ok(Value::Float(number.value()));
    }
    if let Ok(text) = object.cast::<PyString>() {
        return match text.to_str() {
            Ok(text) => Ok(Value::Text(text.to_owned())),
            Err(_) => foreign(object), // lone surrogates
        };
    }
    if let Ok(phase) = object.cast::<PyPhaseConfig>() {
        return Ok(phase.get().0.to_value());
    }
    if depth > 0 {
        if let Ok(mapping) = object.cast::<PyMapping>() {
            let entry = |item: Bound<'_, PyAny>| {
                let (name, value) = item.extract::<(Bound<'_, PyAny>, Bound<'_, PyAny>)>()?;
                Ok((name.str()?.to_string_lossy().into_owned(), read(&value, depth - 1)?))
            };
            return mapping.items()?.iter().map(entry).collect::<PyResult<_>>().map(Value::Object);
        }
        let bytes = object.is_instance_of::<PyBytes>() || object.is_instance_of::<PyByteArray>();
        if let (false, Ok(sequence)) = (bytes, object.cast::<PySequence>()) {
            let items = sequence.try_iter()?.take(LONGEST + 1).map(|item| read(&item?, depth - 1));
            let items: Vec<_> = items.collect::<PyResult<_>>()?;
            if items.len() <= LONGEST {
                return Ok(Value::List(items));
            }
            let kind = object.get_type().name()?.to_string_lossy().into_owned();
            return Ok(Value::Foreign { repr: format!("more than {LONGEST} items"), kind });
        }
    }
    integer(object).map_or_else(|| foreign(object), |number| Ok(number_of(&number)))
}

/// The name of a dtype or a device: the usual ones need no memory of their own.
pub(super) struct Word(pub(super) Cow<'static, str>);

impl<'py> FromPyObject<'_, 'py> for Word {
    type Error = PyErr;

    fn extract(object: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        let text: &str = object.extract()?;
        let known = DType::parse(text).map(DType::name).filter(|name| *name == text);
        let usual = known.or_else(|| ["cpu", "cuda:0"].into_iter().find(|name| *name == text));
        Ok(Self(usual.map_or_else(|| Cow::Owned(text.to_owned()), Cow::Borrowed)))
    }
}

/// The integer that an object is, wherever a size or another whole number is asked for; none for a boolean, which Python
/// has as a kind of integer.
///
/// `__index__` is how an integer of another library says that it is one. A tensor of one integer says so too; reading one
/// that is on a device waits for it.
pub(super) fn integer<'py>(object: &Bound<'py, PyAny>) -> Option<Bound<'py, PyInt>> {
    let no_boolean = |number: &Bound<'_, PyInt>| !number.is_instance_of::<PyBool>();
    if let Ok(number) = object.cast::<PyInt>() {
        return Some(number.clone()).filter(no_boolean);
    }
    // A tensor of one boolean has an index as well.
    if object.getattr("dtype").is_ok_and(|dtype| dtype.to_string().ends_with("bool")) {
        return None;
    }
    object.call_method0("__index__").ok()?.cast_into().ok().filter(no_boolean)
}

fn number_of(number: &Bound<'_, PyInt>) -> Value {
    match (number.extract(), number.extract()) {
        (Ok(number), _) => Value::Int(number),
        (_, Ok(number)) => Value::Float(number),
        _ => Value::Float(f64::INFINITY),
    }
}

fn foreign(object: &Bound<'_, PyAny>) -> PyResult<Value> {
    Ok(Value::Foreign {
        kind: object.get_type().name()?.to_string_lossy().into_owned(),
        repr: object.repr()?.to_string_lossy().into_owned(),
    })
}

/// The plain Python object for a value; a foreign one is its `repr`.
pub(super) fn to_python<'py>(py: Python<'py>, value: &Value) -> PyResult<Bound<'py, PyAny>> {
    Ok(match value {
        Value::Null => py.None().into_bound(py),
        Value::Bool(flag) => PyBool::new(py, *flag).to_owned().into_any(),
        Value::Int(number) => number.into_pyobject(py)?.into_any(),
        Value::Float(number) => PyFloat::new(py, *number).into_any(),
        Value::Text(text) | Value::Date(text) | Value::Foreign { repr: text, .. } => PyString::new(py, text).into_any(),
        Value::List(items) => {
            let items = items.iter().map(|item| to_python(py, item));
            PyList::new(py, items.collect::<PyResult<Vec<_>>>()?)?.into_any()
        }
        Value::Object(entries) => {
            let object = PyDict::new(py);
            for (name, value) in entries {
                object.set_item(name, to_python(py, value)?)?;
            }
            object.into_any()
        }
    })
}

/// A string as Python source.
pub(super) fn quoted(py: Python<'_>, text: &str) -> PyResult<String> {
    Ok(PyString::new(py, text).repr()?.to_string_lossy().into_owned())
}
