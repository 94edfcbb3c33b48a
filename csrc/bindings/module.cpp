#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "../simd_dispatch.hpp"
#include "../threads.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace triforce {

void bind_linear(nb::module_& m);
void bind_attention(nb::module_& m);
void bind_decoder(nb::module_& m);
void bind_offload(nb::module_& m);
void bind_layerwise_pass(nb::module_& m);
void bind_sampler(nb::module_& m);
void bind_fused_draft(nb::module_& m);
void bind_bandwidth(nb::module_& m);

namespace {

std::vector<std::string> usable_levels() {
    std::vector<std::string> names;
    for (const Available& each : levels())
        if (!each.missing) names.push_back(name_of(each.level));
    return names;
}

}  // namespace

NB_MODULE(_native, m) {
    m.doc() = "CPU kernels of triforce. A row's result depends on that row alone, bit for bit.";
    m.def("levels", &usable_levels, "Instruction-set levels that this CPU can run, slowest first.");
    m.def("level", [] { return name_of(level()); }, "The level in use.");
    m.def("use", &use, "level"_a, "Use one level from now on; ValueError if it is unknown or this CPU cannot run it.");
    m.def("threads", &threads, "The number of threads of a kernel.");
    m.def("set_threads", &set_threads, "count"_a, nb::call_guard<nb::gil_scoped_release>(),
          "Set the number of threads; ValueError below 1.");
    bind_linear(m);
    bind_attention(m);
    bind_decoder(m);
    bind_offload(m);
    bind_layerwise_pass(m);
    bind_sampler(m);
    bind_fused_draft(m);
    bind_bandwidth(m);
}

}  // namespace triforce
