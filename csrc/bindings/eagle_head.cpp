#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "../eagle_head.hpp"
#include "pass_args.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace triforce {
namespace {

void init(EagleHead* self, std::shared_ptr<Embedding> embedding, TensorArg fc, TensorArg q, TensorArg k,
          TensorArg v, TensorArg o, TensorArg gate, TensorArg up, TensorArg down, TensorArg head,
          TensorArg embedding_proj, TensorArg embedding_norm, TensorArg hidden_norm, TensorArg post_norm,
          TensorArg norm, TensorArg fc_norm, Ints tokens, int64_t head_dim, float eps, bool norm_output,
          bool norm_before_residual, int bits) {
    EagleHeadWeights w{{tensor("fc", fc)}, {tensor("q_proj", q)}, {tensor("k_proj", k)}, {tensor("v_proj", v)},
                       {tensor("o_proj", o)}, {tensor("gate_proj", gate)}, {tensor("up_proj", up)},
                       {tensor("down_proj", down)}, {tensor("head", head)}, std::nullopt,
                       tensor("embedding_norm", embedding_norm), tensor("hidden_norm", hidden_norm),
                       tensor("post_norm", post_norm), tensor("norm", norm), optional_tensor("fc_norm", fc_norm)};
    if (!embedding_proj.is_none()) w.embedding_proj = WeightSource{tensor("embedding_proj", embedding_proj)};
    new (self) EagleHead(std::move(embedding), w, {head_dim, eps, norm_output, norm_before_residual},
                         std::move(tokens), bits);
}

EagleHeadMemory memory_of(const EagleHead& draft, const Pages& entries, TensorArg states) {
    const Tensor slot_states = tensor("states", states);
    return {&entries, static_cast<char*>(slot_states.as(draft.type(), {-1, draft.hidden()})), slot_states[0]};
}

void forward(const EagleHead& draft, const Pages& entries, TensorArg states, TensorArg ids, Ints positions,
             Ints counts, TensorArg cos, TensorArg sin, const ViewArg& view_arg, TensorArg at, TensorArg logits) {
    const EagleHeadMemory memory = memory_of(draft, entries, states);
    const Tensor ids_tensor = tensor("ids", ids), columns = tensor("at", at);
    ForwardBatch batch{};
    batch.ids = ids_tensor.as<int64_t>({-1, -1});
    batch.rows = ids_tensor[0], batch.width = ids_tensor[1];
    require(static_cast<int64_t>(positions.size()) == batch.rows && positions.size() == counts.size(),
            "positions and counts must have one number for each row");
    int64_t table = 0;
    std::tie(batch.rotation, table) = rotation(cos, sin, entries.dim);
    for (size_t b = 0; b < counts.size(); b++)
        require(0 <= counts[b] && counts[b] <= batch.width && 0 <= positions[b] && positions[b] <= table - counts[b],
                "counts must lie in [0, T] and positions in the tables");
    batch.positions = std::move(positions), batch.counts = std::move(counts);
    batch.views = {view(view_arg, batch.rows, entries.heads)};
    batch.at = columns.as<int64_t>({batch.rows, -1}), batch.scored = columns[1];
    batch.logits = tensor("logits", logits).as<float>({batch.rows, batch.scored, draft.vocabulary()});
    const nb::gil_scoped_release released;
    draft.check(memory, batch);
    draft.forward(memory, batch);
}

void note(const EagleHead& draft, const Pages& entries, TensorArg states, TensorArg ids, IntArrayArg positions,
          IntArrayArg slots, IntArrayArg before, IntArrayArg columns, TensorArg passed, TensorArg cos, TensorArg sin) {
    const EagleHeadMemory memory = memory_of(draft, entries, states);
    const Tensor ids_tensor = tensor("ids", ids), layer_states = tensor("passed", passed);
    const int64_t N = ids_tensor.dims ? ids_tensor[0] : 0;
    const auto numbers = [&](const char* name, IntArrayArg from) { return tensor(name, from).as<int64_t>({N}); };
    const float* from = layer_states.as<float>({draft.states(), -1, draft.hidden()});
    const NotedTokens tokens{N, ids_tensor.as<int64_t>({N}), numbers("positions", positions), numbers("slots", slots),
                             numbers("before", before), from, numbers("columns", columns), layer_states[1]};
    const auto [tables, table] = rotation(cos, sin, entries.dim);
    for (int64_t i = 0; i < N; i++)
        require(0 <= tokens.positions[i] && tokens.positions[i] < table, "positions must lie in the tables");
    const nb::gil_scoped_release released;
    draft.check(memory, tokens);
    draft.note(memory, tokens, tables);
}

InvalidRowTuple fused(const EagleHead& draft, const Pages& entries, TensorArg states, const DraftedTexts& texts) {
    const EagleHeadMemory memory = memory_of(draft, entries, states);
    const Pass pass = [&](const ForwardBatch& batch) {
        draft.check(memory, batch);
        draft.forward(memory, batch);
    };
    return draft_by(pass, {&entries}, draft.vocabulary(), texts);
}

}  // namespace

void bind_eagle_head(nb::module_& m) {
    nb::class_<EagleHead>(m, "EagleHead",
                          "An EAGLE head: a draft of one layer that reads hidden states of a target, and the target's "
                          "embedding. All weights are of one type. tokens: token ids of the rows of `head`.")
        .def("__init__", &init, nb::kw_only(), "embedding"_a, "fc"_a, "q_proj"_a, "k_proj"_a, "v_proj"_a, "o_proj"_a,
             "gate_proj"_a, "up_proj"_a, "down_proj"_a, "head"_a, "embedding_proj"_a.none(), "embedding_norm"_a,
             "hidden_norm"_a, "post_norm"_a, "norm"_a, "fc_norm"_a.none(), "tokens"_a, "head_dim"_a, "eps"_a,
             "norm_output"_a, "norm_before_residual"_a, "bits"_a = 0)
        .def_prop_ro("bytes", &EagleHead::bytes, "Size of the packed weights.")
        .def("forward", &forward, nb::kw_only(), "entries"_a, "states"_a, "ids"_a, "positions"_a, "counts"_a, "cos"_a,
             "sin"_a, "view"_a, "at"_a, "logits"_a,
             "Run a pass of ids (B, T) int64 over entries and states (slots, C).\n\nOut: `logits` (B, J, V) float32 of "
             "columns `at` (B, J) int64. The output of a row's last token becomes the state of its slot.")
        .def("note", &note, nb::kw_only(), "entries"_a, "states"_a, "ids"_a, "positions"_a, "slots"_a, "before"_a,
             "columns"_a, "passed"_a, "cos"_a, "sin"_a,
             "Store states and entries of N tokens of a target pass at `slots`. before: the slots of the tokens before "
             "them.\n\npassed (S, B * T, C) float32: the residual stream of the pass after each of S layers. columns: "
             "index of each token in B * T.")
        .def("fused_draft", &fused, nb::kw_only(), "entries"_a, "states"_a, "texts"_a,
             "Draft tokens, as the function `fused_draft` does.");
}

}  // namespace triforce
