#include <string>

#include <nanobind/nanobind.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "../embedding.hpp"
#include "arguments.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace triforce {
namespace {

void linear(const Matrix& matrix, TensorArg x_object, TensorArg y_object, bool int8_inputs) {
    const Tensor x = tensor("x", x_object), y = tensor("y", y_object);
    x.expect(matrix.type(), {-1, matrix.inputs()});
    float* out = y.as<float>({x[0], matrix.outputs()});
    const nb::gil_scoped_release released;
    matrix.linear(x.data, x[0], out, input_codes(int8_inputs));
}

void rows(const Matrix& matrix, TensorArg ids_object, TensorArg out_object) {
    const Tensor ids = tensor("ids", ids_object), out = tensor("out", out_object);
    const int64_t* id = ids.as<int64_t>({-1});
    float* to = out.as<float>({ids[0], matrix.inputs()});
    for (int64_t i = 0; i < ids[0]; i++)
        if (id[i] < 0 || id[i] >= matrix.outputs())
            throw nb::value_error(
                ("no row " + std::to_string(id[i]) + " in " + std::to_string(matrix.outputs())).c_str());
    matrix.rows(id, ids[0], to);
}

void embed(const Embedding& embedding, TensorArg ids_object, TensorArg out_object) {
    const Tensor ids = tensor("ids", ids_object);
    const int64_t* id = ids.as<int64_t>({-1});
    float* out = tensor("out", out_object).as<float>({ids[0], embedding.hidden()});
    for (int64_t i = 0; i < ids[0]; i++)
        require(0 <= id[i] && id[i] < embedding.vocabulary(), "ids must be rows of the embedding");
    const nb::gil_scoped_release released;
    embedding.rows(id, ids[0], out);
}

/// A weight of a GGUF type without blocks: F32, F16 or BF16. blocks (outputs, bytes of a row): its bytes.
WeightSource numbers(Tensor blocks, const std::string& kind, bool narrow) {
    const Type type = kind == "F32" ? Type::f32 : kind == "F16" ? Type::half : Type::bf16;
    require(type != Type::bf16 || kind == "BF16", ("there are no kernels for weights of type " + kind).c_str());
    blocks.expect(Type::u8, {-1, -1});
    require(blocks[1] % size_of(type) == 0 && reinterpret_cast<uintptr_t>(blocks.data) % size_of(type) == 0,
            (std::string(blocks.name) + " does not have whole numbers, aligned").c_str());
    blocks.type = type, blocks.shape[1] /= size_of(type);
    return {blocks, Format::none, narrow || type == Type::bf16 ? Type::bf16 : Type::f32};
}

}  // namespace

WeightSource weight(const char* name, WeightArg object) {
    if (!nb::hasattr(object, "kind")) return {tensor(name, object)};
    const std::string kind = nb::cast<std::string>(object.attr("kind"));
    const Format format = format_named(kind.c_str());
    const bool narrow = nb::cast<bool>(object.attr("narrow"));
    const Tensor blocks = tensor(name, object.attr("blocks"));
    if (format != Format::none) return {blocks, format, narrow ? Type::bf16 : Type::f32};
    return numbers(blocks, kind, narrow);
}

void bind_linear(nb::module_& m) {
    nb::class_<Matrix>(m, "Matrix",
                       "Weights (outputs, inputs) of bfloat16, float32 or a GGUF type, packed for the "
                       "kernels.\n\nbits: 8 or 4 rounds weights of more bits; 0 keeps them.")
        .def("__init__",
             [](Matrix* self, WeightArg from, int bits) { new (self) Matrix({weight("weight", from)}, bits); },
             "weight"_a, nb::kw_only(), "bits"_a = 0)
        .def_prop_ro("bytes", &Matrix::bytes, "Size of the packed weights.")
        .def("linear", &linear, "x"_a, "y"_a, nb::kw_only(), "int8_inputs"_a = false,
             "Write y = x W^T to y (rows, outputs) float32. x (rows, inputs) is of the type of the weights; for "
             "weights of a GGUF type, of the type of their inputs. int8_inputs: whether inputs of weights with a scale "
             "for each group are rounded to int8, not to int16.")
        .def("rows", &rows, "ids"_a, "out"_a,
             "Write rows `ids` (count) int64 of the weight to out (count, inputs) float32.");
    nb::class_<Embedding>(m, "Embedding",
                          "Embedding: rows of a table (V, C) in its file's type, borrowed, or of a packed matrix, "
                          "times `scale`.")
        .def("__init__",
             [](Embedding* self, std::shared_ptr<Matrix> matrix, float scale) {
                 new (self) Embedding(std::move(matrix), scale);
             },
             "matrix"_a, "scale"_a = 1.0f)
        .def("__init__",
             [](Embedding* self, WeightArg table, float scale) {
                 new (self) Embedding(weight("embedding", table), scale);
             },
             "table"_a, "scale"_a = 1.0f, nb::keep_alive<1, 2>())
        .def("rows", &embed, "ids"_a, "out"_a, "Write rows `ids` (count) int64 to out (count, C) float32.");
}

}  // namespace triforce
