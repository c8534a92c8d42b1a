//! Carrying out a table's entries in host memory: what `kernels/fill.cu` says, as a loop.

use std::ptr;

use half::{bf16, f16};

use crate::table::Entry;

/// A value on its way between two types.
enum Value {
    Integer(i128),
    Real(f64),
}

impl Value {
    #[expect(clippy::cast_precision_loss, clippy::cast_possible_truncation, reason = "that is what the cast means")]
    fn as_f32(&self) -> f32 {
        // Directly from the integer: by way of a double it would be rounded twice.
        match self {
            Self::Integer(value) => *value as f32,
            Self::Real(value) => *value as f32,
        }
    }

    #[expect(clippy::cast_precision_loss, reason = "that is what the cast means")]
    fn as_f64(&self) -> f64 {
        match self {
            Self::Integer(value) => *value as f64,
            Self::Real(value) => *value,
        }
    }

    #[expect(clippy::cast_possible_truncation, reason = "that is what the cast means")]
    fn as_integer(&self, is_signed: bool) -> i128 {
        match self {
            Self::Integer(value) => *value,
            Self::Real(value) if is_signed => i128::from(*value as i64),
            Self::Real(value) => *value as i128,
        }
    }

    fn is_true(&self) -> bool {
        match self {
            Self::Integer(value) => *value != 0,
            Self::Real(value) => *value != 0.0,
        }
    }
}

/// Reads one element of the type with that code.
///
/// SAFETY: there is such an element at that address; it need not be aligned.
unsafe fn load(address: *const u8, code: u8) -> Value {
    macro_rules! read {
        ($kind:ty) => {
            unsafe { address.cast::<$kind>().read_unaligned() }
        };
    }
    match code {
        0 => Value::Integer(i128::from(read!(u8) != 0)),
        1 => Value::Integer(read!(u8).into()),
        2 => Value::Integer(read!(i8).into()),
        3 => Value::Integer(read!(u16).into()),
        4 => Value::Integer(read!(i16).into()),
        5 => Value::Integer(read!(u32).into()),
        6 => Value::Integer(read!(i32).into()),
        7 => Value::Integer(read!(u64).into()),
        8 => Value::Integer(read!(i64).into()),
        9 => Value::Real(read!(f16).to_f64()),
        10 => Value::Real(read!(bf16).to_f64()),
        11 => Value::Real(read!(f32).into()),
        _ => Value::Real(read!(f64)),
    }
}

/// Writes one element of the type with that code.
///
/// SAFETY: there is room for one at that address; it need not be aligned.
#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "integers wrap, as torch's casts do")]
unsafe fn store(address: *mut u8, code: u8, value: &Value) {
    macro_rules! write {
        ($kind:ty, $value:expr) => {
            unsafe { address.cast::<$kind>().write_unaligned($value) }
        };
    }
    match code {
        0 => write!(u8, u8::from(value.is_true())),
        1 | 2 => write!(u8, value.as_integer(true) as u8),
        3 | 4 => write!(u16, value.as_integer(true) as u16),
        5 | 6 => write!(u32, value.as_integer(true) as u32),
        7 => write!(u64, value.as_integer(false) as u64),
        8 => write!(u64, value.as_integer(true) as u64),
        9 => write!(f16, f16::from_f32(value.as_f32())),
        10 => write!(bf16, bf16::from_f32(value.as_f32())),
        11 => write!(f32, value.as_f32()),
        _ => write!(f64, value.as_f64()),
    }
}

/// Bytes of an element of the type with that code.
fn size_of(code: u8) -> usize {
    match code {
        0..=2 => 1,
        3 | 4 | 9 | 10 => 2,
        5 | 6 | 11 => 4,
        _ => 8,
    }
}

/// Carries out one entry of a table that was made for these buffers and sources, which their tensors keep alive.
#[cfg(feature = "python")]
pub(crate) fn carry_out_checked(entry: &Entry) {
    // SAFETY: tables are made for what was checked against them, and callers hold the tensors.
    unsafe { carry_out(entry) }
}

/// Carries out one entry. Source and destination may be the same memory, element by element, and must not overlap else.
///
/// # Safety
/// The regions that the entry writes and reads are host memory that is there and that nobody else uses meanwhile.
#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_possible_wrap,
    reason = "addresses and sizes are of memory of this machine"
)]
pub unsafe fn carry_out(entry: &Entry) {
    let itemsize = usize::from(entry.itemsize);
    let (dst, src) = (entry.dst as usize as *mut u8, entry.src as usize as *const u8);
    let pattern = entry.value.to_le_bytes();
    let [n0, n1, n2] = entry.sizes.map(|size| size as usize);
    let live = entry.live as usize;
    let from_size = size_of(entry.from);
    for i0 in 0..n0 {
        for i1 in 0..n1 {
            // Dimensions are at most 2^31, and the whole region is in memory: the sums cannot overflow.
            let at = |strides: &[i32; 3]| i0 as isize * strides[0] as isize + i1 as isize * strides[1] as isize;
            let row_live = match entry.live_dim {
                0 => {
                    if i0 < live {
                        n2
                    } else {
                        0
                    }
                }
                1 => {
                    if i1 < live {
                        n2
                    } else {
                        0
                    }
                }
                _ => live,
            };
            // SAFETY: the offsets stay within the regions, by the promise above.
            unsafe {
                let dst = dst.offset(at(&entry.dst_strides) * itemsize as isize);
                let src = src.wrapping_offset(at(&entry.src_strides) * from_size as isize);
                let dst_step = entry.dst_strides[2] as isize * itemsize as isize;
                let src_step = entry.src_strides[2] as isize * from_size as isize;
                if entry.to != entry.from {
                    for index in 0..row_live as isize {
                        store(dst.offset(index * dst_step), entry.to, &load(src.offset(index * src_step), entry.from));
                    }
                } else if (dst_step, src_step) == (itemsize as isize, itemsize as isize) {
                    ptr::copy(src, dst, row_live * itemsize);
                } else {
                    for index in 0..row_live as isize {
                        ptr::copy(src.offset(index * src_step), dst.offset(index * dst_step), itemsize);
                    }
                }
                // Behind the last row of a region with gaps this is outside of it, and nothing is written then.
                let rest = dst.wrapping_offset(row_live as isize * dst_step);
                if dst_step == itemsize as isize && pattern[..itemsize].iter().all(|byte| *byte == pattern[0]) {
                    ptr::write_bytes(rest, pattern[0], (n2 - row_live) * itemsize);
                } else {
                    for index in 0..(n2 - row_live) as isize {
                        ptr::copy_nonoverlapping(pattern.as_ptr(), rest.offset(index * dst_step), itemsize);
                    }
                }
            }
        }
    }
}
