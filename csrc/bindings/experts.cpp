#include <string>
#include <vector>

#include <nanobind/nanobind.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "../experts.hpp"
#include "arguments.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace triforce {
namespace {

using Objects = std::vector<nb::object>;

std::vector<Tensor> tensors_of(const char* name, const Objects& objects) {
    std::vector<Tensor> found;
    for (const nb::object& object : objects) found.push_back(tensor(name, object));
    return found;
}

std::vector<WeightSource> weights_of(const char* name, const Objects& objects) {
    std::vector<WeightSource> found;
    for (const nb::object& object : objects) found.push_back(weight(name, WeightArg(object)));
    return found;
}

void init_experts(Experts* self, TensorArg post_norm, TensorArg router, const Objects& gates, const Objects& ups,
                  const Objects& downs, TensorArg router_bias, TensorArg correction, const Objects& gate_biases,
                  const Objects& up_biases, const Objects& down_biases, float eps, int bits,
                  const std::string& activation, int64_t chosen, bool sigmoid, bool renormalised, double scale,
                  int64_t groups, int64_t chosen_groups) {
    const ExpertWeights weights{{tensor("router", router)},
                                optional_tensor("router_bias", router_bias),
                                optional_tensor("correction", correction),
                                weights_of("gate_proj", gates),
                                weights_of("up_proj", ups),
                                weights_of("down_proj", downs),
                                tensors_of("gate_bias", gate_biases),
                                tensors_of("up_bias", up_biases),
                                tensors_of("down_bias", down_biases)};
    require(!weights.gate.empty(), "there must be as many experts as the router has outputs, or more");
    new (self) Experts(optional_tensor("post_norm", post_norm), weights, weights.gate[0].input,
                       {0, eps, bits, 1, 1, activation_named(activation)},
                       {chosen, sigmoid, renormalised, scale, groups, chosen_groups});
}

ExpertChoices gate_experts(const Experts& experts, TensorArg x_object, TensorArg gated_object, bool int8_inputs) {
    const Tensor x = tensor("x", x_object), gated = tensor("gated", gated_object);
    const float* from = x.as<float>({-1, experts.hidden()});
    gated.expect(experts.type(), {x[0] * experts.per_row(), experts.gated_stride()});
    const nb::gil_scoped_release released;
    return experts.gate(from, x[0], gated.data, input_codes(int8_inputs));
}

void down_experts(const Experts& experts, const ExpertChoices& choices, TensorArg gated_object, TensorArg sum_object) {
    const Tensor gated = tensor("gated", gated_object), sum = tensor("sum", sum_object);
    gated.expect(experts.type(), {choices.count(), experts.down_stride()});
    float* out = sum.as<float>({choices.count() / experts.per_row(), experts.outputs()});
    const nb::gil_scoped_release released;
    experts.down(choices, gated.data, sum[0], out);
}

}  // namespace

void bind_experts(nb::module_& m) {
    nb::class_<ExpertChoices>(m, "ExpertChoices", "For each expert: its rows, and the weights of its outputs.")
        .def_prop_ro("touched", &ExpertChoices::touched,
                     "Number of distinct experts that the first 8 rows go through.");
    nb::class_<Experts>(m, "Experts",
                        "The experts of a layer, with all outputs of their matrices or with some.\n\nExperts beyond "
                        "the router's outputs are shared: all rows go through them. The router's rule: see "
                        "`model.config.Experts`.")
        .def("__init__", &init_experts, "post_norm"_a.none(), nb::kw_only(), "router"_a, "gate_projs"_a, "up_projs"_a,
             "down_projs"_a, "router_bias"_a = nb::none(), "correction"_a = nb::none(), "gate_biases"_a = Objects(),
             "up_biases"_a = Objects(), "down_biases"_a = Objects(), "eps"_a, "bits"_a = 0, "activation"_a = "silu",
             "chosen"_a, "sigmoid"_a = false, "renormalised"_a = false, "scale"_a = 1.0, "groups"_a = 1,
             "chosen_groups"_a = 1)
        .def_prop_ro("stride", &Experts::gated_stride, "Outputs of a gate projection, rounded up to a multiple of 16.")
        .def("gate", &gate_experts, "x"_a, "gated"_a, nb::kw_only(), "int8_inputs"_a = false,
             "Choose K experts for each row of x (N, hidden) float32, including shared experts. Write the first half "
             "of each expert's MLP to `gated` (N * K, stride), expert after expert.")
        .def("down", &down_experts, "choices"_a, "gated"_a, "sum"_a,
             "Write the weighted sum of the chosen experts' outputs to `sum` (N, outputs) float32. `gated` (N * K, "
             "inputs rounded up to a multiple of 16): the first halves of the experts' MLPs; rows end in zeros.");
}

}  // namespace triforce
