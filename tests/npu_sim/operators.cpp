// The operators of the simulated device library: as few as a small graph needs, on strided tensors in host memory.
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "acl/acl.h"

#define EXPORTED extern "C" __attribute__((visibility("default")))
// The call that runs an operator is the same for all; the one before it, which follows the macro, prepares it.
#define OPERATOR(NAME)                                                                   \
    EXPORTED int NAME(void*, uint64_t, aclOpExecutor* executor, void* stream) {          \
        return simulated_submit(stream, executor->name.c_str(), run_executor, executor); \
    }                                                                                    \
    EXPORTED int NAME##GetWorkspaceSize

extern "C" int simulated_submit(void* stream, const char* name, int (*function)(void*), void* argument);

using Sizes = std::vector<int64_t>;

struct aclTensor {
    Sizes sizes;
    Sizes strides;
    int64_t offset;
    aclDataType dtype;
    char* data;

    int64_t numel() const {
        int64_t number = 1;
        for (int64_t size : sizes) number *= size;
        return number;
    }
};
struct aclScalar {
    double value;
};
struct aclIntArray {
    Sizes values;
};
struct aclTensorList {
    std::vector<const aclTensor*> tensors;
};
struct aclFloatArray {};
struct aclBoolArray {};
struct aclScalarList {};
struct aclOpExecutor {
    std::string name;
    std::function<void()> run;
};

static int run_executor(void* executor) {
    static_cast<aclOpExecutor*>(executor)->run();
    return 0;
}

// Values go through double: exact for whole numbers of a sensible size, which is what tests compute with.

static double load(const void* place, aclDataType dtype) {
    switch (dtype) {
        case ACL_FLOAT:
            return *static_cast<const float*>(place);
        case ACL_DOUBLE:
            return *static_cast<const double*>(place);
        case ACL_INT64:
            return static_cast<double>(*static_cast<const int64_t*>(place));
        case ACL_INT32:
            return *static_cast<const int32_t*>(place);
        case ACL_BOOL:
        case ACL_UINT8:
            return *static_cast<const uint8_t*>(place);
        default:
            return 0;
    }
}

static void store(void* place, aclDataType dtype, double value) {
    switch (dtype) {
        case ACL_FLOAT:
            *static_cast<float*>(place) = static_cast<float>(value);
            break;
        case ACL_DOUBLE:
            *static_cast<double*>(place) = value;
            break;
        case ACL_INT64:
            *static_cast<int64_t*>(place) = static_cast<int64_t>(value);
            break;
        case ACL_INT32:
            *static_cast<int32_t*>(place) = static_cast<int32_t>(value);
            break;
        case ACL_BOOL:
            *static_cast<uint8_t*>(place) = value != 0;
            break;
        case ACL_UINT8:
            *static_cast<uint8_t*>(place) = static_cast<uint8_t>(value);
            break;
        default:
            break;
    }
}

static int64_t bytes_of(aclDataType dtype) {
    switch (dtype) {
        case ACL_DOUBLE:
        case ACL_INT64:
            return 8;
        case ACL_FLOAT:
        case ACL_INT32:
            return 4;
        case ACL_FLOAT16:
        case ACL_BF16:
            return 2;
        default:
            return 1;
    }
}

// The address in a tensor of an element, numbered in an iteration over `sizes`, that the tensor is broadcast to; with
// `wraps`, of a tensor that is repeated to them.
static char* address(const aclTensor& tensor, const Sizes& sizes, int64_t number, bool wraps = false) {
    int64_t offset = tensor.offset;
    auto missing = static_cast<int64_t>(sizes.size()) - static_cast<int64_t>(tensor.sizes.size());
    for (auto axis = static_cast<int64_t>(sizes.size()) - 1; axis >= 0; axis--) {
        int64_t index = number % sizes[axis];
        number /= sizes[axis];
        int64_t own = axis - missing;
        if (own < 0 || tensor.sizes[own] == 1) continue;
        offset += (wraps ? index % tensor.sizes[own] : index) * tensor.strides[own];
    }
    return tensor.data + offset * bytes_of(tensor.dtype);
}

// `address` for every element of an iteration; tensors that lie as they are iterated over are quick.
class Places {
public:
    Places(const aclTensor& tensor, const Sizes& sizes, bool wraps = false)
        : tensor_(tensor), sizes_(sizes), wraps_(wraps), bytes_(bytes_of(tensor.dtype)) {
        int64_t step = 1;
        is_plain_ = tensor.sizes == sizes;
        for (auto axis = static_cast<int64_t>(sizes.size()) - 1; is_plain_ && axis >= 0; axis--) {
            is_plain_ = sizes[axis] == 1 || tensor.strides[axis] == step;
            step *= sizes[axis];
        }
    }
    char* operator[](int64_t number) const {
        if (is_plain_) return tensor_.data + (tensor_.offset + number) * bytes_;
        return address(tensor_, sizes_, number, wraps_);
    }

private:
    const aclTensor& tensor_;
    const Sizes& sizes_;
    bool wraps_;
    int64_t bytes_;
    bool is_plain_;
};

static int prepare(uint64_t* workspace, aclOpExecutor** executor, const char* name, std::function<void()> run) {
    *workspace = 0;
    *executor = new aclOpExecutor{name, std::move(run)};
    return 0;
}

template <class Function>
static std::function<void()> binary(const aclTensor* left, const aclTensor* right, const aclTensor* out,
                                    Function function) {
    return [left = *left, right = *right, out = *out, function] {
        Places from_left(left, out.sizes), from_right(right, out.sizes), to(out, out.sizes);
        for (int64_t number = 0, end = out.numel(); number < end; number++) {
            double x = load(from_left[number], left.dtype), y = load(from_right[number], right.dtype);
            store(to[number], out.dtype, function(x, y));
        }
    };
}

template <class Function>
static std::function<void()> unary(const aclTensor* in, const aclTensor* out, Function function, bool wraps = false) {
    return [in = *in, out = *out, function, wraps] {
        Places from(in, out.sizes, wraps), to(out, out.sizes);
        for (int64_t number = 0, end = out.numel(); number < end; number++) {
            store(to[number], out.dtype, function(load(from[number], in.dtype)));
        }
    };
}

// Reduces along `axes`: whatever the shape of `out`, its elements are in the order of the axes that are left.
template <class Function>
static std::function<void()> reduce(const aclTensor* in, const aclIntArray* axes, const aclTensor* out,
                                    Function function) {
    return [in = *in, axes = axes->values, out = *out, function] {
        auto rank = static_cast<int64_t>(in.sizes.size());
        Sizes kept = in.sizes;
        for (int64_t axis : axes) kept[axis < 0 ? axis + rank : axis] = 1;
        std::vector<double> results(out.numel());
        std::vector<bool> begun(out.numel());
        Places from(in, in.sizes), to(out, out.sizes);
        for (int64_t number = 0, end = in.numel(); number < end; number++) {
            int64_t place = 0, rest = number, step = 1;
            for (int64_t axis = rank - 1; axis >= 0; axis--) {
                int64_t index = rest % in.sizes[axis];
                rest /= in.sizes[axis];
                if (kept[axis] != 1) place += index * step;
                step *= kept[axis];
            }
            double x = load(from[number], in.dtype);
            results[place] = begun[place] ? function(results[place], x) : x;
            begun[place] = true;
        }
        for (int64_t number = 0, end = out.numel(); number < end; number++) {
            store(to[number], out.dtype, results[number]);
        }
    };
}

static std::function<void()> product(const aclTensor* left, const aclTensor* right, const aclTensor* out) {
    return [left = *left, right = *right, out = *out] {
        auto at = [](const aclTensor& tensor, int64_t row, int64_t column) {
            int64_t offset = tensor.offset + row * tensor.strides[0] + column * tensor.strides[1];
            return tensor.data + offset * bytes_of(tensor.dtype);
        };
        for (int64_t row = 0; row < out.sizes[0]; row++) {
            for (int64_t column = 0; column < out.sizes[1]; column++) {
                double sum = 0;
                for (int64_t inner = 0; inner < left.sizes[1]; inner++) {
                    sum += load(at(left, row, inner), left.dtype) * load(at(right, inner, column), right.dtype);
                }
                store(at(out, row, column), out.dtype, sum);
            }
        }
    };
}

// What operators take.

EXPORTED aclTensor* aclCreateTensor(const int64_t* sizes, uint64_t rank, aclDataType dtype, const int64_t* strides,
                                    int64_t offset, aclFormat, const int64_t*, uint64_t, void* data) {
    return new aclTensor{Sizes(sizes, sizes + rank), Sizes(strides, strides + rank), offset, dtype,
                         static_cast<char*>(data)};
}
EXPORTED aclScalar* aclCreateScalar(void* value, aclDataType dtype) {
    return new aclScalar{load(value, dtype)};
}
EXPORTED aclIntArray* aclCreateIntArray(const int64_t* values, uint64_t number) {
    return new aclIntArray{Sizes(values, values + number)};
}
EXPORTED aclFloatArray* aclCreateFloatArray(const float*, uint64_t) {
    return new aclFloatArray();
}
EXPORTED aclBoolArray* aclCreateBoolArray(const bool*, uint64_t) {
    return new aclBoolArray();
}
EXPORTED aclTensorList* aclCreateTensorList(const aclTensor* const* tensors, uint64_t number) {
    return new aclTensorList{std::vector<const aclTensor*>(tensors, tensors + number)};
}
EXPORTED aclScalarList* aclCreateScalarList(const aclScalar* const*, uint64_t) {
    return new aclScalarList();
}
// Captured operators read them at replay: nothing is ever freed.
EXPORTED int aclDestroyTensor(const aclTensor*) {
    return 0;
}
EXPORTED int aclDestroyScalar(const aclScalar*) {
    return 0;
}
EXPORTED int aclDestroyIntArray(const aclIntArray*) {
    return 0;
}
EXPORTED int aclDestroyFloatArray(const aclFloatArray*) {
    return 0;
}
EXPORTED int aclDestroyBoolArray(const aclBoolArray*) {
    return 0;
}
EXPORTED int aclDestroyTensorList(const aclTensorList*) {
    return 0;
}
EXPORTED int aclDestroyScalarList(const aclScalarList*) {
    return 0;
}

// The operators.

OPERATOR(aclnnAdd)(const aclTensor* left, const aclTensor* right, const aclScalar* alpha, aclTensor* out,
                   uint64_t* workspace, aclOpExecutor** executor) {
    return prepare(workspace, executor, "aclnnAdd",
                   binary(left, right, out, [k = alpha->value](double x, double y) { return x + k * y; }));
}
OPERATOR(aclnnAdds)(const aclTensor* in, const aclScalar* other, const aclScalar* alpha, aclTensor* out,
                    uint64_t* workspace, aclOpExecutor** executor) {
    return prepare(workspace, executor, "aclnnAdds",
                   unary(in, out, [k = alpha->value * other->value](double x) { return x + k; }));
}
OPERATOR(aclnnInplaceAdd)(aclTensor* self, const aclTensor* other, const aclScalar* alpha, uint64_t* workspace,
                          aclOpExecutor** executor) {
    return prepare(workspace, executor, "aclnnInplaceAdd",
                   binary(self, other, self, [k = alpha->value](double x, double y) { return x + k * y; }));
}
OPERATOR(aclnnInplaceAdds)(aclTensor* self, const aclScalar* other, const aclScalar* alpha, uint64_t* workspace,
                           aclOpExecutor** executor) {
    return prepare(workspace, executor, "aclnnInplaceAdds",
                   unary(self, self, [k = alpha->value * other->value](double x) { return x + k; }));
}
OPERATOR(aclnnMul)(const aclTensor* left, const aclTensor* right, aclTensor* out, uint64_t* workspace,
                   aclOpExecutor** executor) {
    return prepare(workspace, executor, "aclnnMul", binary(left, right, out, [](double x, double y) { return x * y; }));
}
OPERATOR(aclnnMuls)(const aclTensor* in, const aclScalar* other, aclTensor* out, uint64_t* workspace,
                    aclOpExecutor** executor) {
    return prepare(workspace, executor, "aclnnMuls", unary(in, out, [k = other->value](double x) { return x * k; }));
}
OPERATOR(aclnnInplaceMul)(aclTensor* self, const aclTensor* other, uint64_t* workspace, aclOpExecutor** executor) {
    return prepare(workspace, executor, "aclnnInplaceMul",
                   binary(self, other, self, [](double x, double y) { return x * y; }));
}
OPERATOR(aclnnInplaceMuls)(aclTensor* self, const aclScalar* other, uint64_t* workspace, aclOpExecutor** executor) {
    return prepare(workspace, executor, "aclnnInplaceMuls",
                   unary(self, self, [k = other->value](double x) { return x * k; }));
}
OPERATOR(aclnnRelu)(const aclTensor* in, aclTensor* out, uint64_t* workspace, aclOpExecutor** executor) {
    return prepare(workspace, executor, "aclnnRelu", unary(in, out, [](double x) { return x > 0 ? x : 0; }));
}
OPERATOR(aclnnInplaceFillScalar)(aclTensor* self, const aclScalar* value, uint64_t* workspace,
                                 aclOpExecutor** executor) {
    return prepare(workspace, executor, "aclnnInplaceFillScalar",
                   unary(self, self, [k = value->value](double) { return k; }));
}
OPERATOR(aclnnInplaceZero)(aclTensor* self, uint64_t* workspace, aclOpExecutor** executor) {
    return prepare(workspace, executor, "aclnnInplaceZero", unary(self, self, [](double) { return 0.0; }));
}
OPERATOR(aclnnInplaceOne)(aclTensor* self, uint64_t* workspace, aclOpExecutor** executor) {
    return prepare(workspace, executor, "aclnnInplaceOne", unary(self, self, [](double) { return 1.0; }));
}
OPERATOR(aclnnInplaceCopy)(aclTensor* self, const aclTensor* from, uint64_t* workspace, aclOpExecutor** executor) {
    return prepare(workspace, executor, "aclnnInplaceCopy", unary(from, self, [](double x) { return x; }));
}
OPERATOR(aclnnCast)(const aclTensor* in, int, aclTensor* out, uint64_t* workspace, aclOpExecutor** executor) {
    return prepare(workspace, executor, "aclnnCast", unary(in, out, [](double x) { return x; }));
}
OPERATOR(aclnnRepeat)(const aclTensor* in, const aclIntArray*, aclTensor* out, uint64_t* workspace,
                      aclOpExecutor** executor) {
    return prepare(workspace, executor, "aclnnRepeat", unary(in, out, [](double x) { return x; }, true));
}
OPERATOR(aclnnReduceSum)(const aclTensor* in, const aclIntArray* axes, bool, int, aclTensor* out, uint64_t* workspace,
                         aclOpExecutor** executor) {
    return prepare(workspace, executor, "aclnnReduceSum",
                   reduce(in, axes, out, [](double x, double y) { return x + y; }));
}
OPERATOR(aclnnAmax)(const aclTensor* in, const aclIntArray* axes, bool, aclTensor* out, uint64_t* workspace,
                    aclOpExecutor** executor) {
    return prepare(workspace, executor, "aclnnAmax",
                   reduce(in, axes, out, [](double x, double y) { return x > y ? x : y; }));
}
OPERATOR(aclnnMatmul)(const aclTensor* left, const aclTensor* right, aclTensor* out, int8_t, uint64_t* workspace,
                      aclOpExecutor** executor) {
    return prepare(workspace, executor, "aclnnMatmul", product(left, right, out));
}
OPERATOR(aclnnMm)(const aclTensor* left, const aclTensor* right, aclTensor* out, int8_t, uint64_t* workspace,
                  aclOpExecutor** executor) {
    return prepare(workspace, executor, "aclnnMm", product(left, right, out));
}
