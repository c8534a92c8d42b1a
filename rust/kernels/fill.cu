// The fill of a set of static input buffers as one kernel: copies, casts and padding, whatever their number and types.
//
// Each entry of the table writes one region of at most three dimensions: elements below `live` along `live_dim` come from
// the source, the others are `value`. Entries are laid out by rust/table.rs, which carries out the same table on the host:
// the two say the same, and tests/naive_fill.py says it once more. `make_ptx.py` beside this file makes fill.ptx from it.

typedef unsigned char u8;
typedef signed char i8;
typedef unsigned short u16;
typedef short i16;
typedef unsigned int u32;
typedef int i32;
typedef unsigned long long u64;
typedef long long i64;

// As `repr(C)` struct `Entry` in rust/table.rs.
struct Entry {
    u8* dst;
    const u8* src;
    u64 value;           // the bits of an element of the destination, in the low bytes
    u32 sizes[3];
    i32 dst_strides[3];  // in elements, as all strides
    i32 src_strides[3];
    u32 live;
    u32 first_block;     // of the grid; the entry's blocks end where those of the next begin
    u8 live_dim;
    u8 to;
    u8 from;             // the same as `to` where nothing is cast
    u8 itemsize;         // of the destination
};

// As `Code` in rust/table.rs.
enum Code { BOOL, U8, I8, U16, I16, U32, I32, U64, I64, F16, BF16, F32, F64 };

#define THREADS 256

__device__ __forceinline__ float half_to_float(u16 bits) {
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
    return value;
}

__device__ __forceinline__ u16 float_to_half(float value) {
    u16 bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    return bits;
}

__device__ __forceinline__ u16 float_to_bfloat(float value) {
    u32 bits = __float_as_uint(value);
    if (value != value) return 0x7fc0;
    return (u16)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

// A value on its way between two types: every integer fits in 64 bits, every float in a double.
struct Value {
    u64 bits;
    double real;
    bool is_real;
    bool is_signed;
};

__device__ Value load(const u8* src, i64 index, u8 from) {
    Value v = {0, 0.0, false, true};
    switch (from) {
        case BOOL: v.bits = ((const u8*)src)[index] != 0; break;
        case U8: v.bits = ((const u8*)src)[index]; break;
        case I8: v.bits = (u64)(i64)((const i8*)src)[index]; break;
        case U16: v.bits = ((const u16*)src)[index]; break;
        case I16: v.bits = (u64)(i64)((const i16*)src)[index]; break;
        case U32: v.bits = ((const u32*)src)[index]; break;
        case I32: v.bits = (u64)(i64)((const i32*)src)[index]; break;
        case U64: v.bits = ((const u64*)src)[index]; v.is_signed = false; break;
        case I64: v.bits = (u64)((const i64*)src)[index]; break;
        case F16: v.real = half_to_float(((const u16*)src)[index]); v.is_real = true; break;
        case BF16: v.real = __uint_as_float((u32)((const u16*)src)[index] << 16); v.is_real = true; break;
        case F32: v.real = ((const float*)src)[index]; v.is_real = true; break;
        default: v.real = ((const double*)src)[index]; v.is_real = true; break;
    }
    return v;
}

__device__ __forceinline__ float as_float(const Value& v) {
    // Directly from the integer: by way of a double it would be rounded twice.
    if (v.is_real) return (float)v.real;
    return v.is_signed ? (float)(i64)v.bits : (float)v.bits;
}

__device__ __forceinline__ u64 as_integer(const Value& v, bool is_signed) {
    if (!v.is_real) return v.bits;
    return is_signed ? (u64)(i64)v.real : (u64)v.real;
}

__device__ void store(u8* dst, i64 index, u8 to, const Value& v) {
    switch (to) {
        case BOOL: ((u8*)dst)[index] = v.is_real ? v.real != 0.0 : v.bits != 0; break;
        case U8: ((u8*)dst)[index] = (u8)as_integer(v, true); break;
        case I8: ((u8*)dst)[index] = (u8)as_integer(v, true); break;
        case U16: case I16: ((u16*)dst)[index] = (u16)as_integer(v, true); break;
        case U32: case I32: ((u32*)dst)[index] = (u32)as_integer(v, true); break;
        case U64: ((u64*)dst)[index] = as_integer(v, false); break;
        case I64: ((u64*)dst)[index] = as_integer(v, true); break;
        case F16: ((u16*)dst)[index] = float_to_half(as_float(v)); break;
        case BF16: ((u16*)dst)[index] = float_to_bfloat(as_float(v)); break;
        case F32: ((float*)dst)[index] = as_float(v); break;
        default:
            ((double*)dst)[index] = v.is_real ? v.real : v.is_signed ? (double)(i64)v.bits : (double)v.bits;
    }
}

__device__ __forceinline__ void move(u8* dst, i64 to, const u8* src, i64 from, u8 itemsize) {
    switch (itemsize) {
        case 1: dst[to] = src[from]; break;
        case 2: ((u16*)dst)[to] = ((const u16*)src)[from]; break;
        case 4: ((u32*)dst)[to] = ((const u32*)src)[from]; break;
        default: ((u64*)dst)[to] = ((const u64*)src)[from];
    }
}

// `count` bytes of one run, by as wide words as the two addresses allow.
__device__ __forceinline__ void copy_run(u8* dst, const u8* src, u64 count, u64 thread, u64 threads) {
    u32 alignment = (u32)((u64)dst | (u64)src | count) & 15;
    if (alignment == 0) {
        for (u64 i = thread; i < count / 16; i += threads) ((uint4*)dst)[i] = ((const uint4*)src)[i];
    } else if ((alignment & 7) == 0) {
        for (u64 i = thread; i < count / 8; i += threads) ((u64*)dst)[i] = ((const u64*)src)[i];
    } else if ((alignment & 3) == 0) {
        for (u64 i = thread; i < count / 4; i += threads) ((u32*)dst)[i] = ((const u32*)src)[i];
    } else {
        for (u64 i = thread; i < count; i += threads) dst[i] = src[i];
    }
}

// `count` bytes of one run, all elements alike; `value` repeats the element over its eight bytes.
__device__ __forceinline__ void pad_run(u8* dst, u64 value, u64 count, u64 thread, u64 threads) {
    u32 alignment = (u32)((u64)dst | count) & 15;
    if (alignment == 0) {
        uint4 wide = {(u32)value, (u32)(value >> 32), (u32)value, (u32)(value >> 32)};
        for (u64 i = thread; i < count / 16; i += threads) ((uint4*)dst)[i] = wide;
    } else if ((alignment & 7) == 0) {
        for (u64 i = thread; i < count / 8; i += threads) ((u64*)dst)[i] = value;
    } else if ((alignment & 3) == 0) {
        for (u64 i = thread; i < count / 4; i += threads) ((u32*)dst)[i] = (u32)(value >> (i % 2 * 32));
    } else {
        for (u64 i = thread; i < count; i += threads) dst[i] = (u8)(value >> (i % 8 * 8));
    }
}

__device__ __forceinline__ u64 repeated(u64 value, u8 itemsize) {
    if (itemsize == 1) return (value & 0xff) * 0x0101010101010101ull;
    if (itemsize == 2) return (value & 0xffff) * 0x0001000100010001ull;
    if (itemsize == 4) return (value & 0xffffffff) * 0x0000000100000001ull;
    return value;
}

// Casts, and regions that are no run. Apart, so that the common path is short: what a launch takes is mostly the time to
// fetch instructions for the first time.
__device__ __noinline__ void write_elements(const Entry* table, u32 thread, u32 threads) {
    const Entry e = *table;
    u32 n1 = e.sizes[1], n2 = e.sizes[2], count = e.sizes[0] * n1 * n2;
    for (u32 i = thread; i < count; i += threads) {
        u32 at2 = i % n2, at1 = i / n2 % n1, at0 = i / n2 / n1;
        u32 along = e.live_dim == 2 ? at2 : e.live_dim == 1 ? at1 : at0;
        i64 to = (i64)at0 * e.dst_strides[0] + (i64)at1 * e.dst_strides[1] + (i64)at2 * e.dst_strides[2];
        if (along >= e.live) {
            move(e.dst, to, (const u8*)&e.value, 0, e.itemsize);
            continue;
        }
        i64 from = (i64)at0 * e.src_strides[0] + (i64)at1 * e.src_strides[1] + (i64)at2 * e.src_strides[2];
        if (e.to == e.from) {
            move(e.dst, to, e.src, from, e.itemsize);
        } else {
            store(e.dst, to, e.to, load(e.src, from, e.from));
        }
    }
}

__device__ __forceinline__ void carry_out(const Entry& e, u32 thread, u32 threads) {
    // One run, or rows of one length whose live part is a run each, moved as they are.
    u32 rows = e.sizes[1];
    bool is_rows = e.sizes[0] == 1 && e.live_dim == 2 && e.to == e.from && e.dst_strides[2] == 1 &&
                   (e.src_strides[2] == 1 || e.live == 0) && rows <= 4;
    if (!is_rows) {
        write_elements(&e, thread, threads);
        return;
    }
    u64 live = (u64)e.live * e.itemsize, all = (u64)e.sizes[2] * e.itemsize;
    u64 value = repeated(e.value, e.itemsize);
    for (u32 row = 0; row < rows; row++) {
        u8* dst = e.dst + (i64)row * e.dst_strides[1] * e.itemsize;
        copy_run(dst, e.src + (i64)row * e.src_strides[1] * e.itemsize, live, thread, threads);
        pad_run(dst + live, value, all - live, thread, threads);
    }
}

template <int N>
struct Table {
    u32 count;
    u32 blocks;
    Entry entries[N];
};

template <int N>
__device__ __forceinline__ void fill(const Table<N>& table) {
    u32 index = 0;
    while (index + 1 < table.count && table.entries[index + 1].first_block <= blockIdx.x) index++;
    if (index >= table.count) return;
    const Entry& e = table.entries[index];
    u32 end = index + 1 < table.count ? table.entries[index + 1].first_block : table.blocks;
    carry_out(e, (blockIdx.x - e.first_block) * THREADS + threadIdx.x, (end - e.first_block) * THREADS);
}

// Two sizes of one kernel: parameters are copied on every launch.
extern "C" __global__ void __launch_bounds__(THREADS) devicegraph_fill_small(const __grid_constant__ Table<16> table) {
    fill(table);
}

extern "C" __global__ void __launch_bounds__(THREADS) devicegraph_fill_large(const __grid_constant__ Table<56> table) {
    fill(table);
}

// What a memset node of a graph does, as a kernel: rows of `width` bytes, `pitch` apart. `value` repeats the element over
// its eight bytes.
extern "C" __global__ void __launch_bounds__(THREADS)
    devicegraph_set(u8* dst, u64 pitch, u64 value, u64 width, u64 height) {
    u32 thread = blockIdx.x * THREADS + threadIdx.x, threads = gridDim.x * THREADS;
    for (u64 row = blockIdx.y; row < height; row += gridDim.y) pad_run(dst + row * pitch, value, width, thread, threads);
}
