#include <algorithm>
#include <string>

#include <nanobind/nanobind.h>
#include <nanobind/stl/shared_ptr.h>

#include "block.hpp"
#include "matrix.hpp"
#include "tensor.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace triforce {
namespace {

std::optional<Tensor> optional_tensor(const char* name, nb::handle object) {
    return object.is_none() ? std::nullopt : std::optional(tensor(name, object));
}

void linear(const Matrix& matrix, nb::handle x_object, nb::handle y_object) {
    const Tensor x = tensor("x", x_object), y = tensor("y", y_object);
    x.expect(matrix.type(), {-1, matrix.inputs()});
    float* out = y.as<float>({x[0], matrix.outputs()});
    const nb::gil_scoped_release released;
    matrix.linear(x.data, x[0], out);
}

void rows(const Matrix& matrix, nb::handle ids_object, nb::handle out_object) {
    const Tensor ids = tensor("ids", ids_object), out = tensor("out", out_object);
    const int64_t* id = ids.as<int64_t>({-1});
    float* to = out.as<float>({ids[0], matrix.inputs()});
    for (int64_t i = 0; i < ids[0]; i++)
        if (id[i] < 0 || id[i] >= matrix.outputs())
            throw nb::value_error(
                ("no row " + std::to_string(id[i]) + " in " + std::to_string(matrix.outputs())).c_str());
    matrix.rows(id, ids[0], to);
}

void init_block(Block* self, nb::handle input_norm, nb::handle q, nb::handle k, nb::handle v, nb::handle o,
                nb::handle post_norm, nb::handle gate, nb::handle up, nb::handle down, nb::handle q_bias,
                nb::handle k_bias, nb::handle v_bias, nb::handle q_norm, nb::handle k_norm, int64_t head_dim,
                float eps, bool int8) {
    Parts parts{
        tensor("input_norm", input_norm),  tensor("q_proj", q),
        tensor("k_proj", k),               tensor("v_proj", v),
        tensor("o_proj", o),               tensor("post_norm", post_norm),
        tensor("gate_proj", gate),         tensor("up_proj", up),
        tensor("down_proj", down),         optional_tensor("q_bias", q_bias),
        optional_tensor("k_bias", k_bias), optional_tensor("v_bias", v_bias),
        optional_tensor("q_norm", q_norm), optional_tensor("k_norm", k_norm)};
    new (self) Block(parts, head_dim, eps, int8);
}

void init_projections(Projections* self, nb::handle norm, nb::handle q, nb::handle k, nb::handle v, nb::handle q_bias,
                      nb::handle k_bias, nb::handle v_bias, nb::handle q_norm, nb::handle k_norm, int64_t head_dim,
                      float eps, bool int8) {
    Parts parts{};
    parts.input_norm = tensor("input_norm", norm);
    parts.q = tensor("q_proj", q), parts.k = tensor("k_proj", k), parts.v = tensor("v_proj", v);
    parts.q_bias = optional_tensor("q_bias", q_bias), parts.k_bias = optional_tensor("k_bias", k_bias);
    parts.v_bias = optional_tensor("v_bias", v_bias);
    parts.q_norm = optional_tensor("q_norm", q_norm), parts.k_norm = optional_tensor("k_norm", k_norm);
    new (self) Projections(parts, head_dim, eps, int8);
}

template <class Of>
void qkv(const Of& block, nb::handle x_object, nb::handle q_object, nb::handle k_object, nb::handle v_object) {
    const Tensor x = tensor("x", x_object);
    const float* from = x.as<float>({-1, block.hidden()});
    float* q = tensor("q", q_object).as<float>({x[0], block.q_size()});
    float* k = tensor("k", k_object).as<float>({x[0], block.kv_size()});
    float* v = tensor("v", v_object).as<float>({x[0], block.kv_size()});
    const nb::gil_scoped_release released;
    block.qkv(from, x[0], q, k, v);
}

void gate(const Gate& gate, nb::handle x_object, nb::handle gated_object) {
    const Tensor x = tensor("x", x_object), gated = tensor("gated", gated_object);
    const float* from = x.as<float>({-1, gate.hidden()});
    gated.expect(gate.type(), {x[0], gate.stride()});
    const nb::gil_scoped_release released;
    gate.run(from, x[0], gated.data);
}

void finish(const Block& block, nb::handle x_object, nb::handle mixed_object) {
    const Tensor x = tensor("x", x_object), mixed = tensor("mixed", mixed_object);
    float* stream = x.as<float>({-1, block.hidden()});
    mixed.expect(block.type(), {x[0], block.q_size()});
    const nb::gil_scoped_release released;
    block.finish(stream, x[0], mixed.data);
}

void logits(const Head& head, nb::handle x_object, nb::handle out_object) {
    const Tensor x = tensor("x", x_object);
    const float* from = x.as<float>({-1, head.hidden()});
    float* out = tensor("out", out_object).as<float>({x[0], head.vocabulary()});
    const nb::gil_scoped_release released;
    head.logits(from, x[0], out);
}

}  // namespace

void bind_linear(nb::module_& m) {
    nb::class_<Matrix>(m, "Matrix",
                       "Weights (outputs, inputs) of bfloat16 or float32, packed for the kernels; as int8 on demand.")
        .def("__init__",
             [](Matrix* self, nb::handle weight, bool int8) { new (self) Matrix(tensor("weight", weight), int8); },
             "weight"_a, nb::kw_only(), "int8"_a = false)
        .def_prop_ro("bytes", &Matrix::bytes)
        .def("linear", &linear, "x"_a, "y"_a,
             "y = x W^T: x (rows, inputs) of the type that the weights had, y (rows, outputs) float32.")
        .def("rows", &rows, "ids"_a, "out"_a,
             "out (count, inputs) float32 becomes rows `ids` (count) int64 of the weight.");
    nb::class_<Block>(m, "Block", "The linear side of one decoder layer.")
        .def("__init__", &init_block, "input_norm"_a, "q_proj"_a, "k_proj"_a, "v_proj"_a, "o_proj"_a, "post_norm"_a,
             "gate_proj"_a, "up_proj"_a, "down_proj"_a, "q_bias"_a.none(), "k_bias"_a.none(), "v_bias"_a.none(),
             "q_norm"_a.none(), "k_norm"_a.none(), nb::kw_only(), "head_dim"_a, "eps"_a, "int8"_a = false)
        .def_prop_ro("bytes", &Block::bytes)
        .def("qkv", &qkv<Block>, "x"_a, "q"_a, "k"_a, "v"_a)
        .def("finish", &finish, "x"_a, "mixed"_a);
    nb::class_<Projections>(m, "Projections", "What a layer does before its attention, for some of its heads.")
        .def("__init__", &init_projections, "input_norm"_a, "q_proj"_a, "k_proj"_a, "v_proj"_a, "q_bias"_a.none(),
             "k_bias"_a.none(), "v_bias"_a.none(), "q_norm"_a.none(), "k_norm"_a.none(), nb::kw_only(), "head_dim"_a,
             "eps"_a, "int8"_a = false)
        .def("qkv", &qkv<Projections>, "x"_a, "q"_a, "k"_a, "v"_a);
    nb::class_<Gate>(m, "Gate", "The first half of an MLP, or some of its outputs.")
        .def("__init__",
             [](Gate* self, nb::handle norm, nb::handle gate, nb::handle up, float eps, bool int8) {
                 new (self) Gate(tensor("post_norm", norm), tensor("gate_proj", gate), tensor("up_proj", up), eps,
                                 int8);
             },
             "post_norm"_a, "gate_proj"_a, "up_proj"_a, nb::kw_only(), "eps"_a, "int8"_a = false)
        .def_prop_ro("stride", &Gate::stride, "Outputs, up to a multiple of 16.")
        .def("run", &gate, "x"_a, "gated"_a, "gated (rows, stride) becomes silu(gate) * up of the normed x.");
    nb::class_<Head>(m, "Head", "The final norm and the output matrix.")
        .def("__init__",
             [](Head* self, nb::handle norm, std::shared_ptr<Matrix> matrix, float eps) {
                 new (self) Head(tensor("norm", norm), std::move(matrix), eps);
             },
             "norm"_a, "matrix"_a, nb::kw_only(), "eps"_a)
        .def("logits", &logits, "x"_a, "out"_a);
}

}  // namespace triforce
