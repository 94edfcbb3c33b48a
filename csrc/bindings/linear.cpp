#include <string>

#include <nanobind/nanobind.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "../experts.hpp"
#include "../matrix.hpp"
#include "../tensor.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace triforce {
namespace {

std::optional<Tensor> optional_tensor(const char* name, TensorArg object) {
    return object.is_none() ? std::nullopt : std::optional(tensor(name, object));
}

void linear(const Matrix& matrix, TensorArg x_object, TensorArg y_object) {
    const Tensor x = tensor("x", x_object), y = tensor("y", y_object);
    x.expect(matrix.type(), {-1, matrix.inputs()});
    float* out = y.as<float>({x[0], matrix.outputs()});
    const nb::gil_scoped_release released;
    matrix.linear(x.data, x[0], out);
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

LayerWeights qkv_weights(TensorArg norm, WeightArg q, WeightArg k, WeightArg v, TensorArg q_bias, TensorArg k_bias,
                         TensorArg v_bias, TensorArg q_norm, TensorArg k_norm) {
    LayerWeights weights{};
    weights.input_norm = optional_tensor("input_norm", norm);
    weights.q = weight("q_proj", q), weights.k = weight("k_proj", k), weights.v = weight("v_proj", v);
    weights.q_bias = optional_tensor("q_bias", q_bias), weights.k_bias = optional_tensor("k_bias", k_bias);
    weights.v_bias = optional_tensor("v_bias", v_bias);
    weights.q_norm = optional_tensor("q_norm", q_norm), weights.k_norm = optional_tensor("k_norm", k_norm);
    return weights;
}

Activation activation_named(const std::string& name) {
    require(name == "silu" || name == "gelu", "activation must be silu or gelu");
    return name == "gelu" ? Activation::gelu : Activation::silu;
}

std::vector<WeightSource> weights_of(const char* name, const std::vector<nb::object>& objects) {
    std::vector<WeightSource> found;
    for (const nb::object& object : objects) found.push_back(weight(name, WeightArg(object)));
    return found;
}

void init_layer(DecoderLayer* self, TensorArg input_norm, WeightArg q, WeightArg k, WeightArg v, WeightArg o,
                TensorArg post_norm, WeightArg gate, WeightArg up, WeightArg down, TensorArg q_bias,
                TensorArg k_bias, TensorArg v_bias, TensorArg q_norm, TensorArg k_norm, TensorArg attn_out_norm,
                TensorArg mlp_out_norm, TensorArg router, const std::vector<nb::object>& gates,
                const std::vector<nb::object>& ups, const std::vector<nb::object>& downs, int64_t head_dim, float eps,
                int bits, float query_scale, float residual_scale, const std::string& activation, int64_t chosen,
                bool renormalised) {
    LayerWeights weights = qkv_weights(input_norm, q, k, v, q_bias, k_bias, v_bias, q_norm, k_norm);
    weights.o = weight("o_proj", o), weights.post_norm = optional_tensor("post_norm", post_norm);
    weights.attn_out_norm = optional_tensor("attn_out_norm", attn_out_norm);
    weights.mlp_out_norm = optional_tensor("mlp_out_norm", mlp_out_norm);
    const LayerSettings settings{head_dim, eps, bits, query_scale, residual_scale, activation_named(activation), chosen,
                                 renormalised};
    if (!router.is_none()) {
        const ExpertWeights experts{{tensor("router", router)}, weights_of("gate_proj", gates),
                                    weights_of("up_proj", ups), weights_of("down_proj", downs)};
        new (self) DecoderLayer(weights, &experts, settings);
        return;
    }
    weights.gate = weight("gate_proj", gate), weights.up = weight("up_proj", up);
    weights.down = weight("down_proj", down);
    new (self) DecoderLayer(weights, nullptr, settings);
}

void init_projections(QkvProjections* self, TensorArg norm, WeightArg q, WeightArg k, WeightArg v, TensorArg q_bias,
                      TensorArg k_bias, TensorArg v_bias, TensorArg q_norm, TensorArg k_norm, int64_t head_dim,
                      float eps, int bits) {
    new (self) QkvProjections(qkv_weights(norm, q, k, v, q_bias, k_bias, v_bias, q_norm, k_norm), {head_dim, eps, bits});
}

void qkv(const QkvProjections& layer, TensorArg x_object, TensorArg q_object, TensorArg k_object, TensorArg v_object) {
    const Tensor x = tensor("x", x_object);
    const float* from = x.as<float>({-1, layer.hidden()});
    float* q = tensor("q", q_object).as<float>({x[0], layer.q_size()});
    float* k = tensor("k", k_object).as<float>({x[0], layer.kv_size()});
    float* v = tensor("v", v_object).as<float>({x[0], layer.kv_size()});
    const nb::gil_scoped_release released;
    layer.qkv(from, x[0], q, k, v);
}

void gated_mlp(const GatedMlp& mlp, TensorArg x_object, TensorArg gated_object) {
    const Tensor x = tensor("x", x_object), gated = tensor("gated", gated_object);
    const float* from = x.as<float>({-1, mlp.hidden()});
    gated.expect(mlp.type(), {x[0], mlp.stride()});
    const nb::gil_scoped_release released;
    mlp.forward(from, x[0], gated.data);
}

void finish(const DecoderLayer& layer, TensorArg x_object, TensorArg attn_out_object) {
    const Tensor x = tensor("x", x_object), attn_out = tensor("attn_out", attn_out_object);
    float* stream = x.as<float>({-1, layer.hidden()});
    attn_out.expect(layer.type(), {x[0], layer.q_size()});
    const nb::gil_scoped_release released;
    layer.finish(stream, x[0], attn_out.data);
}

void logits(const LmHead& head, TensorArg x_object, TensorArg out_object) {
    const Tensor x = tensor("x", x_object);
    const float* from = x.as<float>({-1, head.hidden()});
    float* out = tensor("out", out_object).as<float>({x[0], head.vocabulary()});
    const nb::gil_scoped_release released;
    head.logits(from, x[0], out);
}

void embed(WeightArg embedding, TensorArg ids_object, TensorArg out_object) {
    const WeightSource table = weight("embedding", embedding);
    const Tensor ids = tensor("ids", ids_object);
    const int64_t* id = ids.as<int64_t>({-1});
    float* out = tensor("out", out_object).as<float>({ids[0], table.inputs()});
    for (int64_t i = 0; i < ids[0]; i++) {
        require(0 <= id[i] && id[i] < table.outputs(), "ids must be rows of the embedding");
        table.row(id[i], out + i * table.inputs());
    }
}

/// Bytes (outputs, bytes of a row) as the numbers that they are in a GGUF file.
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
    m.def("embed", &embed, "embedding"_a, "ids"_a, "out"_a,
          "Write rows `ids` (count) int64 of an embedding, as its file has it, to out (count, inputs) float32.");
    nb::class_<Matrix>(m, "Matrix",
                       "Weights (outputs, inputs) bfloat16, float32 or of a GGUF type, packed for the kernels; rounded to "
                       "8 or 4 bits if those are given.")
        .def("__init__",
             [](Matrix* self, WeightArg from, int bits) { new (self) Matrix({weight("weight", from)}, bits); },
             "weight"_a, nb::kw_only(), "bits"_a = 0)
        .def_prop_ro("bytes", &Matrix::bytes, "Size of the packed weights.")
        .def("linear", &linear, "x"_a, "y"_a,
             "Write y = x W^T: x (rows, inputs) of the type that the weights had, or of that of a GGUF weight's inputs, "
             "y (rows, outputs) float32.")
        .def("rows", &rows, "ids"_a, "out"_a,
             "Write rows `ids` (count) int64 of the weight to out (count, inputs) float32.");
    nb::class_<QkvProjections>(m, "QkvProjections",
                               "The query, key and value projections of a layer, for some of its heads.")
        .def("__init__", &init_projections, "input_norm"_a, "q_proj"_a, "k_proj"_a, "v_proj"_a, "q_bias"_a.none(),
             "k_bias"_a.none(), "v_bias"_a.none(), "q_norm"_a.none(), "k_norm"_a.none(), nb::kw_only(), "head_dim"_a,
             "eps"_a, "bits"_a = 0)
        .def("qkv", &qkv, "x"_a, "q"_a, "k"_a, "v"_a,
             "Write q (N, H * D), k and v (N, G * D), not rotated, of x (N, C); all are float32.");
    nb::class_<DecoderLayer, QkvProjections>(m, "DecoderLayer", "A decoder layer but for rotation and attention.")
        .def("__init__", &init_layer, "input_norm"_a.none(), "q_proj"_a, "k_proj"_a, "v_proj"_a, "o_proj"_a,
             "post_norm"_a.none(), "gate_proj"_a.none(), "up_proj"_a.none(), "down_proj"_a.none(), "q_bias"_a.none(), "k_bias"_a.none(),
             "v_bias"_a.none(), "q_norm"_a.none(), "k_norm"_a.none(), nb::kw_only(), "attn_out_norm"_a = nb::none(),
             "mlp_out_norm"_a = nb::none(), "router"_a = nb::none(),
             "gate_projs"_a = std::vector<nb::object>(), "up_projs"_a = std::vector<nb::object>(),
             "down_projs"_a = std::vector<nb::object>(), "head_dim"_a, "eps"_a, "bits"_a = 0, "query_scale"_a = 1.0f,
             "residual_scale"_a = 1.0f, "activation"_a = "silu", "chosen"_a = 0, "renormalised"_a = false)
        .def_prop_ro("bytes", &DecoderLayer::bytes, "Size of the packed weights.")
        .def("finish", &finish, "x"_a, "attn_out"_a,
             "Add the output projection of attention, `attn_out` (N, H * D), and then the MLP to x (N, C) float32.");
    nb::class_<GatedMlp>(m, "GatedMlp", "The first half of an MLP, or some of its outputs.")
        .def("__init__",
             [](GatedMlp* self, TensorArg norm, WeightArg gate, WeightArg up, float eps, int bits) {
                 new (self) GatedMlp(tensor("post_norm", norm), weight("gate_proj", gate), weight("up_proj", up),
                                 {0, eps, bits});
             },
             "post_norm"_a, "gate_proj"_a, "up_proj"_a, nb::kw_only(), "eps"_a, "bits"_a = 0)
        .def_prop_ro("stride", &GatedMlp::stride, "Outputs, up to a multiple of 16.")
        .def("forward", &gated_mlp, "x"_a, "gated"_a,
             "Write silu(gate) * up of the normed x (rows, hidden) float32 to `gated` (rows, stride).");
    nb::class_<LmHead>(m, "LmHead", "The final norm and the output matrix.")
        .def("__init__",
             [](LmHead* self, TensorArg norm, std::shared_ptr<Matrix> matrix, float eps, float logit_scale) {
                 new (self) LmHead(tensor("norm", norm), std::move(matrix), eps, logit_scale);
             },
             "norm"_a, "matrix"_a, nb::kw_only(), "eps"_a, "logit_scale"_a = 1.0f)
        .def("logits", &logits, "x"_a, "out"_a, "Write the logits of x (N, C) float32 to out (N, V) float32.");
}

}  // namespace triforce
