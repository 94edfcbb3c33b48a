// Tensor arguments of the bindings: borrowed views, checked before anything reads them.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <optional>

#include <nanobind/nanobind.h>

#include "types.hpp"

namespace triforce {

/// A contiguous tensor in CPU memory, borrowed: valid while the caller of the binding holds its argument.
struct Tensor {
    const char* name;
    void* data;
    Type type;
    int dims;
    int64_t shape[8];

    int64_t operator[](int dim) const { return shape[dim]; }
    /// Bytes of a row of a matrix of numbers or of bytes.
    int64_t row_bytes() const { return shape[1] * (type == Type::u8 ? 1 : size_of(type)); }

    /// Throws nb::value_error unless type and shape fit. -1: any size. The error names the expected and the actual type
    /// and shape.
    void expect(Type type, std::initializer_list<int64_t> shape) const;

    /// The data, after `expect`.
    void* as(Type wanted_type, std::initializer_list<int64_t> wanted) const {
        expect(wanted_type, wanted);
        return data;
    }
    template <class T>
    T* as(std::initializer_list<int64_t> wanted) const {
        return static_cast<T*>(as(type_of(T{}), wanted));
    }
};

/// Types of arguments that `tensor` checks. `annotation`: the type in Python signatures.
#define TF_ARGUMENT(Argument, annotation)                                            \
    class Argument : public nanobind::handle {                                       \
      public:                                                                        \
        static constexpr auto Name = nanobind::detail::const_name(annotation);       \
        using nanobind::handle::handle;                                              \
        Argument(const nanobind::handle& object) : handle(object) {}                 \
        static bool check_(nanobind::handle) { return true; }                        \
    }
TF_ARGUMENT(TensorArg, "numpy.typing.NDArray[typing.Any]");
TF_ARGUMENT(WeightArg, "numpy.typing.NDArray[typing.Any] | triforce.model.weights.QuantizedWeight");
TF_ARGUMENT(IntArrayArg, "numpy.typing.NDArray[numpy.int64]");
TF_ARGUMENT(BoolArrayArg, "numpy.typing.NDArray[numpy.bool]");
TF_ARGUMENT(NoiseArg, "Noise | numpy.typing.NDArray[typing.Any]");
#undef TF_ARGUMENT

/// Throws nb::value_error unless `object` is a contiguous CPU tensor or array of torch, numpy or another library with
/// DLPack that outlives the call.
Tensor tensor(const char* name, nanobind::handle object);

/// `tensor` for an argument that may be None.
inline std::optional<Tensor> optional_tensor(const char* name, nanobind::handle object) {
    return object.is_none() ? std::nullopt : std::optional(tensor(name, object));
}

}  // namespace triforce
