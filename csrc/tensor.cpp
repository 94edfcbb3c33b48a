#include "tensor.hpp"

#include <stdexcept>
#include <string>

namespace triforce {
namespace {

const char* name_of(Type type) {
    switch (type) {
        case Type::f32: return "float32";
        case Type::bf16: return "bfloat16";
        case Type::half: return "float16";
        case Type::f64: return "float64";
        case Type::i64: return "int64";
        case Type::i32: return "int32";
        case Type::i8: return "int8";
        case Type::u8: return "uint8";
        case Type::boolean: return "bool";
        default: return "another type";
    }
}

std::string describe(Type type, const int64_t* shape, int dims) {
    std::string text = name_of(type);
    text += " (";
    for (int i = 0; i < dims; i++) text += (i ? ", " : "") + (shape[i] < 0 ? "any" : std::to_string(shape[i]));
    return text + ")";
}

}  // namespace

void Tensor::expect(Type wanted, std::initializer_list<int64_t> wanted_shape) const {
    bool fits = type == wanted && dims == static_cast<int>(wanted_shape.size());
    const int64_t* size = shape;
    for (const int64_t want : wanted_shape) fits = fits && (want < 0 || want == *size), ++size;
    if (fits) return;
    const std::string expected = describe(wanted, wanted_shape.begin(), static_cast<int>(wanted_shape.size()));
    throw std::invalid_argument(std::string(name) + " must be " + expected + ", is " + describe(type, shape, dims));
}

}  // namespace triforce
