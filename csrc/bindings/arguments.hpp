// Arguments of the bindings from Python: tensors and weights, lent for the call.
#pragma once

#include <optional>

#include <nanobind/nanobind.h>

#include "../matrix.hpp"
#include "../tensor.hpp"

namespace triforce {

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

/// A weight from Python: a tensor or a QuantizedWeight. The latter has `blocks`, bytes of a GGUF type; `kind`, the name
/// of the type; and `narrow`, whether the input of products is bfloat16. Throws nb::value_error or
/// std::invalid_argument.
WeightSource weight(const char* name, WeightArg object);

/// The rounding of products' inputs, as Python says it.
constexpr InputCodes input_codes(bool int8_inputs) { return int8_inputs ? InputCodes::int8 : InputCodes::int16; }

}  // namespace triforce
