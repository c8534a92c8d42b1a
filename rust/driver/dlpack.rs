//! Reading torch tensors without Python attributes: the DLPack exchange table that torch publishes on its tensor class.
//!
//! The layout is that of DLPack 1.x (`dlpack.h`); a table of another major version is not used.

use std::ffi::{c_int, c_void};
use std::ptr;

use pyo3::prelude::*;
use pyo3::types::PyCapsule;

/// Where a tensor's memory is.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Device {
    kind: i32,
    index: i32,
}

/// Host memory, pinned host memory, and a CUDA device's.
const CPU: i32 = 1;
const CUDA: i32 = 2;
const CUDA_HOST: i32 = 3;

/// DLPack's codes of kinds of elements, with the bits, for the types that slots have.
const KINDS: [(&str, u8, u8); 18] = [
    ("bool", 6, 8),
    ("uint8", 1, 8),
    ("int8", 0, 8),
    ("int16", 0, 16),
    ("int32", 0, 32),
    ("int64", 0, 64),
    ("uint16", 1, 16),
    ("uint32", 1, 32),
    ("uint64", 1, 64),
    ("float16", 2, 16),
    ("bfloat16", 4, 16),
    ("float32", 2, 32),
    ("float64", 2, 64),
    ("float8_e4m3fn", 10, 8),
    ("float8_e5m2", 12, 8),
    ("float8_e4m3fnuz", 11, 8),
    ("float8_e5m2fnuz", 13, 8),
    ("float8_e8m0fnu", 14, 8),
];

#[repr(C)]
struct Tensor {
    data: *mut c_void,
    device: Device,
    ndim: i32,
    kind: u8,
    bits: u8,
    lanes: u16,
    shape: *const i64,
    strides: *const i64,
    byte_offset: u64,
}

/// The head of the exchange table: what comes after it is not used.
#[repr(C)]
struct Api {
    major: u32,
    minor: u32,
    previous: *const c_void,
    allocate: *const c_void,
    from_object: *const c_void,
    to_object: *const c_void,
    read: Option<unsafe extern "C" fn(*mut c_void, *mut Tensor) -> c_int>,
    stream: Option<unsafe extern "C" fn(i32, i32, *mut *mut c_void) -> c_int>,
}

/// The exchange table of a tensor class. It lives as long as the process does.
#[derive(Clone, Copy)]
pub(crate) struct Exchange {
    read: unsafe extern "C" fn(*mut c_void, *mut Tensor) -> c_int,
    stream: unsafe extern "C" fn(i32, i32, *mut *mut c_void) -> c_int,
}

/// What a source has to be, all but its address.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Form {
    kind: u8,
    bits: u8,
    /// The CUDA device, or none for the host.
    cuda: Option<i32>,
    shape: Vec<i64>,
    strides: Vec<i64>,
}

impl Form {
    /// The form of a tensor, as torch describes it; none where DLPack has no word for something in it.
    pub(crate) fn new(dtype: &str, shape: &[usize], strides: &[usize], cuda: Option<i32>) -> Option<Self> {
        let (_, kind, bits) = KINDS.iter().find(|(name, ..)| *name == dtype)?;
        let as_i64 = |sizes: &[usize]| sizes.iter().map(|size| i64::try_from(*size).ok()).collect::<Option<Vec<_>>>();
        Some(Self { kind: *kind, bits: *bits, cuda, shape: as_i64(shape)?, strides: as_i64(strides)? })
    }
}

impl Exchange {
    /// The table in a capsule; none for another version, or where a function is missing.
    ///
    /// # Errors
    /// A capsule of another name.
    pub(crate) fn new(capsule: &Bound<'_, PyCapsule>) -> PyResult<Option<Self>> {
        let pointer = capsule.pointer_checked(Some(c"dlpack_exchange_api"))?;
        // SAFETY: a capsule of that name has such a table, which is never freed. What follows the head is read for the
        // version that has it only.
        let api = unsafe { pointer.cast::<Api>().as_ref() };
        if api.major != 1 {
            return Ok(None);
        }
        let Some((read, stream)) = api.read.zip(api.stream) else { return Ok(None) };
        Ok(Some(Self { read, stream }))
    }

    /// The address of a tensor's first element, if the tensor is of that form; none otherwise, also where it has no memory.
    /// A Python error may be set then, which the caller clears. The object has to be of the class that the table is of.
    pub(crate) fn address(self, object: &Bound<'_, PyAny>, form: &Form) -> Option<u64> {
        let mut tensor = Tensor {
            data: ptr::null_mut(),
            device: Device { kind: 0, index: 0 },
            ndim: 0,
            kind: 0,
            bits: 0,
            lanes: 0,
            shape: ptr::null(),
            strides: ptr::null(),
            byte_offset: 0,
        };
        // SAFETY: the object is held, and so is the interpreter; the function fills in what it is given.
        if unsafe { (self.read)(object.as_ptr().cast(), &raw mut tensor) } != 0 {
            return None;
        }
        let on = match tensor.device {
            Device { kind: CPU | CUDA_HOST, .. } => None,
            Device { kind: CUDA, index } => Some(index),
            Device { .. } => return None,
        };
        let is_alike = (tensor.kind, tensor.bits, tensor.lanes) == (form.kind, form.bits, 1)
            && on == form.cuda
            && usize::try_from(tensor.ndim) == Ok(form.shape.len());
        if !is_alike {
            return None;
        }
        for (dim, (size, stride)) in form.shape.iter().zip(&form.strides).enumerate() {
            // SAFETY: both arrays have `ndim` numbers, and are the tensor's own while it is held.
            let (given, step) = unsafe { (*tensor.shape.add(dim), *tensor.strides.add(dim)) };
            // Also along a dimension of one index: calls that view a source as other integers go by the stride.
            if given != *size || step != *stride {
                return None;
            }
        }
        let is_there = !tensor.data.is_null() || form.shape.contains(&0);
        is_there.then_some(tensor.data as u64 + tensor.byte_offset)
    }

    /// The current stream of this thread on a CUDA device.
    pub(crate) fn stream(self, _: Python<'_>, cuda: i32) -> Option<u64> {
        let mut stream = ptr::null_mut();
        // SAFETY: the interpreter is held; the function writes one pointer.
        (unsafe { (self.stream)(CUDA, cuda, &raw mut stream) } == 0).then_some(stream as u64)
    }
}
