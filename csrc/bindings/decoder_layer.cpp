#include <algorithm>
#include <string>

#include <nanobind/nanobind.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "../experts.hpp"
#include "../memory.hpp"
#include "arguments.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace triforce {
namespace {

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

void init_layer(DecoderLayer* self, TensorArg input_norm, WeightArg q, WeightArg k, WeightArg v, WeightArg o,
                TensorArg post_norm, WeightArg gate, WeightArg up, WeightArg down, TensorArg q_bias,
                TensorArg k_bias, TensorArg v_bias, TensorArg q_norm, TensorArg k_norm, TensorArg attn_out_norm,
                TensorArg mlp_out_norm, TensorArg o_bias, TensorArg gate_bias, TensorArg up_bias, TensorArg down_bias,
                std::shared_ptr<Experts> experts, int64_t head_dim, float eps, int bits, float query_scale,
                float residual_scale, const std::string& activation) {
    LayerWeights weights = qkv_weights(input_norm, q, k, v, q_bias, k_bias, v_bias, q_norm, k_norm);
    weights.o = weight("o_proj", o), weights.post_norm = optional_tensor("post_norm", post_norm);
    weights.attn_out_norm = optional_tensor("attn_out_norm", attn_out_norm);
    weights.mlp_out_norm = optional_tensor("mlp_out_norm", mlp_out_norm);
    weights.o_bias = optional_tensor("o_bias", o_bias), weights.down_bias = optional_tensor("down_bias", down_bias);
    weights.gate_bias = optional_tensor("gate_bias", gate_bias), weights.up_bias = optional_tensor("up_bias", up_bias);
    if (!experts) {
        weights.gate = weight("gate_proj", gate), weights.up = weight("up_proj", up);
        weights.down = weight("down_proj", down);
    }
    new (self) DecoderLayer(weights, std::move(experts),
                            {head_dim, eps, bits, query_scale, residual_scale, activation_named(activation)});
}

void init_projections(QkvProjections* self, TensorArg norm, WeightArg q, WeightArg k, WeightArg v, TensorArg q_bias,
                      TensorArg k_bias, TensorArg v_bias, TensorArg q_norm, TensorArg k_norm, int64_t head_dim,
                      float eps, int bits, float query_scale) {
    new (self) QkvProjections(qkv_weights(norm, q, k, v, q_bias, k_bias, v_bias, q_norm, k_norm),
                              {head_dim, eps, bits, query_scale});
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

int64_t finish(const DecoderLayer& layer, TensorArg x_object, TensorArg attn_out_object, bool int8_inputs) {
    const Tensor x = tensor("x", x_object), attn_out = tensor("attn_out", attn_out_object);
    float* stream = x.as<float>({-1, layer.hidden()});
    attn_out.expect(layer.type(), {x[0], layer.q_size()});
    const nb::gil_scoped_release released;
    return layer.finish(stream, x[0], attn_out.data, input_codes(int8_inputs));
}

void init_mlp(GatedMlp* self, TensorArg norm, WeightArg gate, WeightArg up, TensorArg gate_bias, TensorArg up_bias,
              float eps, int bits, const std::string& activation) {
    LayerSettings settings{0, eps, bits};
    settings.activation = activation_named(activation);
    new (self) GatedMlp({optional_tensor("post_norm", norm), weight("gate_proj", gate), weight("up_proj", up),
                         optional_tensor("gate_bias", gate_bias), optional_tensor("up_bias", up_bias)},
                        settings);
}

void gated_mlp(const GatedMlp& mlp, TensorArg x_object, TensorArg gated_object, bool int8_inputs) {
    const Tensor x = tensor("x", x_object), gated = tensor("gated", gated_object);
    const float* from = x.as<float>({-1, mlp.hidden()});
    gated.expect(mlp.type(), {x[0], mlp.stride()});
    const nb::gil_scoped_release released;
    mlp.forward(from, x[0], gated.data, input_codes(int8_inputs));
}

void init_norm(Norm* self, TensorArg weight, float eps) {
    const Tensor vector = tensor("weight", weight);
    require(vector.type == Type::bf16 || vector.type == Type::f32, "weight must be bfloat16 or float32");
    vector.expect(vector.type, {-1});
    new (self) Norm(make_norm(vector, vector[0], vector.type, eps));
}

void normed(const Norm& norm, TensorArg x_object) {
    const Tensor x = tensor("x", x_object);
    float* rows = x.as<float>({-1, norm.size});
    const int64_t stride = round_up(norm.size, block_size);
    const nb::gil_scoped_release released;
    if (stride == norm.size) return norm(rows, x[0], Type::f32, rows);
    Scratch scratch;
    float* padded = scratch.take<float>(x[0] * stride);
    norm(rows, x[0], Type::f32, padded);
    for (int64_t row = 0; row < x[0]; row++) std::copy_n(padded + row * stride, norm.size, rows + row * norm.size);
}

void logits(const LmHead& head, TensorArg x_object, TensorArg out_object) {
    const Tensor x = tensor("x", x_object);
    const float* from = x.as<float>({-1, head.hidden()});
    float* out = tensor("out", out_object).as<float>({x[0], head.vocabulary()});
    const nb::gil_scoped_release released;
    head.logits(from, x[0], out);
}

void bind_mlp(nb::module_& m) {
    nb::class_<GatedMlp>(m, "GatedMlp", "The first half of an MLP, with all of its outputs or with some.")
        .def("__init__", &init_mlp, "post_norm"_a.none(), "gate_proj"_a, "up_proj"_a,
             "gate_bias"_a = nb::none(), "up_bias"_a = nb::none(), nb::kw_only(), "eps"_a, "bits"_a = 0,
             "activation"_a = "silu")
        .def_prop_ro("stride", &GatedMlp::stride, "Outputs, rounded up to a multiple of 16.")
        .def("forward", &gated_mlp, "x"_a, "gated"_a, nb::kw_only(), "int8_inputs"_a = false,
             "Norm x (rows, hidden) float32. Write the activation of its gate and up projection to `gated` (rows, "
             "stride).");
}

}  // namespace

void bind_decoder_layer(nb::module_& m) {
    nb::class_<QkvProjections>(m, "QkvProjections",
                               "The query, key and value projections of a layer, for some of its heads.")
        .def("__init__", &init_projections, "input_norm"_a.none(), "q_proj"_a, "k_proj"_a, "v_proj"_a,
             "q_bias"_a.none(), "k_bias"_a.none(), "v_bias"_a.none(), "q_norm"_a.none(), "k_norm"_a.none(),
             nb::kw_only(), "head_dim"_a, "eps"_a, "bits"_a = 0, "query_scale"_a = 1.0f)
        .def("qkv", &qkv, "x"_a, "q"_a, "k"_a, "v"_a,
             "Write q (N, H * D), k and v (N, G * D) of x (N, C), before rotation. All are float32.");
    nb::class_<DecoderLayer, QkvProjections>(m, "DecoderLayer", "A decoder layer without rotation and attention.")
        .def("__init__", &init_layer, "input_norm"_a.none(), "q_proj"_a, "k_proj"_a, "v_proj"_a, "o_proj"_a,
             "post_norm"_a.none(), "gate_proj"_a.none(), "up_proj"_a.none(), "down_proj"_a.none(), "q_bias"_a.none(),
             "k_bias"_a.none(), "v_bias"_a.none(), "q_norm"_a.none(), "k_norm"_a.none(), nb::kw_only(),
             "attn_out_norm"_a = nb::none(), "mlp_out_norm"_a = nb::none(), "o_bias"_a = nb::none(),
             "gate_bias"_a = nb::none(), "up_bias"_a = nb::none(), "down_bias"_a = nb::none(),
             "experts"_a = nb::none(), "head_dim"_a, "eps"_a, "bits"_a = 0, "query_scale"_a = 1.0f,
             "residual_scale"_a = 1.0f, "activation"_a = "silu")
        .def_prop_ro("bytes", &DecoderLayer::bytes, "Size of the packed weights.")
        .def("finish", &finish, "x"_a, "attn_out"_a, nb::kw_only(), "int8_inputs"_a = false,
             "Add the output projection of attention, `attn_out` (N, H * D), and then the MLP to x (N, C) "
             "float32.\n\nReturns the number of distinct experts of the first 8 tokens; 0 without experts.");
    bind_mlp(m);
    nb::class_<Norm>(m, "Norm", "An RMSNorm of rows.")
        .def("__init__", &init_norm, "weight"_a, nb::kw_only(), "eps"_a)
        .def("forward", &normed, "x"_a, "Norm x (rows, size) float32 in place.");
    nb::class_<LmHead>(m, "LmHead", "The final norm and the output matrix.")
        .def("__init__",
             [](LmHead* self, TensorArg norm, std::shared_ptr<Matrix> matrix, float eps, float logit_scale,
                float logit_cap) {
                 new (self) LmHead(tensor("norm", norm), std::move(matrix), eps, logit_scale, logit_cap);
             },
             "norm"_a, "matrix"_a, nb::kw_only(), "eps"_a, "logit_scale"_a = 1.0f, "logit_cap"_a = 0.0f)
        .def("logits", &logits, "x"_a, "out"_a, "Write the logits of x (N, C) float32 to out (N, V) float32.");
}

}  // namespace triforce
