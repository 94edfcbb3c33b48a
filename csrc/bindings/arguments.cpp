#include "arguments.hpp"

#include <algorithm>
#include <string>

#include <nanobind/ndarray.h>

namespace nb = nanobind;

namespace triforce {
namespace {

// The part of DLPack's C exchange API (dlpack.h 1.2 and later) that lends a view without a Python call, which
// `__dlpack__` needs.
struct ExchangeApi {
    struct {
        uint32_t major, minor;
        const ExchangeApi* previous;
    } header;
    int (*allocate)();
    int (*export_owned)();
    int (*import_owned)();
    int (*borrow)(void* object, nb::dlpack::dltensor* out);
};

const ExchangeApi* find_exchange_api(PyTypeObject* type) {
    constexpr const char* capsule_name = "dlpack_exchange_api";
    const nb::handle owner = reinterpret_cast<PyObject*>(type);
    const nb::object capsule = nb::getattr(owner, "__dlpack_c_exchange_api__", nb::none());
    if (!PyCapsule_IsValid(capsule.ptr(), capsule_name)) return nullptr;
    auto* api = static_cast<const ExchangeApi*>(PyCapsule_GetPointer(capsule.ptr(), capsule_name));
    while (api && api->header.major != 1) api = api->header.previous;
    return api && api->borrow ? api : nullptr;
}

// Nearly all tensors are of one Python type, so the API of the last type is kept. The interpreter lock guards the two
// variables.
const ExchangeApi* exchange_api(PyTypeObject* type) {
    static PyTypeObject* last_type = nullptr;
    static const ExchangeApi* last_api = nullptr;
    if (type != last_type) {
        last_api = find_exchange_api(type);
        last_type = type;
    }
    return last_api;
}

struct Kind {
    nb::dlpack::dtype dtype;
    Type type;
};
using Code = nb::dlpack::dtype_code;
constexpr Kind kinds[] = {
    {{static_cast<uint8_t>(Code::Float), 32, 1}, Type::f32},
    {{static_cast<uint8_t>(Code::Bfloat), 16, 1}, Type::bf16},
    {{static_cast<uint8_t>(Code::Float), 16, 1}, Type::half},
    {{static_cast<uint8_t>(Code::Float), 64, 1}, Type::f64},
    {{static_cast<uint8_t>(Code::Int), 64, 1}, Type::i64},
    {{static_cast<uint8_t>(Code::Int), 32, 1}, Type::i32},
    {{static_cast<uint8_t>(Code::Int), 8, 1}, Type::i8},
    {{static_cast<uint8_t>(Code::UInt), 8, 1}, Type::u8},
    {{static_cast<uint8_t>(Code::Bool), 8, 1}, Type::boolean},
};

Type find_type(nb::dlpack::dtype dtype) {
    for (const Kind& kind : kinds)
        if (kind.dtype == dtype) return kind.type;
    return Type::other;
}

/// The type that a format string of the buffer protocol names.
Type find_type(const char* format) {
    switch (format ? *format : 'B') {
        case '?': return Type::boolean;
        case 'B': return Type::u8;
        case 'H': return Type::bf16;  // numpy has no bfloat16: arrays of its bits stand for it (triforce.arrays)
        case 'b': return Type::i8;
        case 'd': return Type::f64;
        case 'e': return Type::half;
        case 'f': return Type::f32;
        case 'i': return Type::i32;
        case 'l': return sizeof(long) == 8 ? Type::i64 : Type::i32;
        case 'q': return Type::i64;
        default: return Type::other;
    }
}

[[noreturn]] void refuse(const char* name, const std::string& why) {
    throw nb::value_error((std::string(name) + " " + why).c_str());
}

bool contiguous(int dims, const int64_t* shape, const int64_t* strides) {
    int64_t step = 1;
    for (int i = dims - 1; i >= 0; i--) {
        if (shape[i] == 0) return true;
        if (strides && shape[i] > 1 && strides[i] != step) return false;
        step *= shape[i];
    }
    return true;
}

Tensor view(const char* name, const nb::dlpack::dltensor& t) {
    if (t.device.device_type != nb::device::cpu::value) refuse(name, "must be in CPU memory");
    if (t.ndim > 8) refuse(name, "has more than 8 dimensions");
    if (!contiguous(t.ndim, t.shape, t.strides)) refuse(name, "must be contiguous");
    Tensor out{name, static_cast<char*>(t.data) + t.byte_offset, find_type(t.dtype), t.ndim, {}};
    for (int i = 0; i < t.ndim; i++) out.shape[i] = t.shape[i];
    return out;
}

/// A view by the buffer protocol, for numpy's arrays.
Tensor buffer(const char* name, nb::handle object) {
    Py_buffer lent;
    if (PyObject_GetBuffer(object.ptr(), &lent, PyBUF_ND | PyBUF_FORMAT)) {
        PyErr_Clear();
        refuse(name, "must be contiguous");
    }
    Tensor out{name, lent.buf, find_type(lent.format), lent.ndim, {}};
    if (lent.ndim <= 8) std::copy_n(lent.shape, lent.ndim, out.shape);
    PyBuffer_Release(&lent);
    if (out.dims > 8) refuse(name, "has more than 8 dimensions");
    return out;
}

}  // namespace

Tensor tensor(const char* name, nb::handle object) {
    if (PyObject_CheckBuffer(object.ptr())) return buffer(name, object);
    nb::dlpack::dltensor t{};
    if (const ExchangeApi* api = exchange_api(Py_TYPE(object.ptr()))) {
        if (api->borrow(object.ptr(), &t)) throw nb::python_error();
        return view(name, t);
    }
    nb::ndarray<nb::ro> array;
    if (!nb::try_cast(object, array)) refuse(name, "must be a tensor");
    t.data = const_cast<void*>(static_cast<const void*>(array.data()));
    t.device = {array.device_type(), array.device_id()};
    t.ndim = static_cast<int32_t>(array.ndim());
    t.dtype = array.dtype();
    t.shape = const_cast<int64_t*>(array.shape_ptr());
    t.strides = const_cast<int64_t*>(array.stride_ptr());
    return view(name, t);
}

}  // namespace triforce
