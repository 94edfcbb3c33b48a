#include "decoder.hpp"

#include <algorithm>

#include "memory.hpp"
#include "offloaded_pass.hpp"

namespace triforce {
namespace {

/// Memory of one pass, which its layers share.
struct Activations {
    float *x, *q, *k, *v;
    char *rotated, *q_sinks, *attn_out;
};

Activations activations(Scratch& scratch, const ForwardBatch& batch, const DecoderLayer& layer) {
    const size_t N = batch.rows * batch.width, Q = layer.q_size(), P = layer.kv_size();
    const size_t bytes = N * Q * size_of(layer.type());
    Activations a{};
    a.x = batch.x ? batch.x : scratch.take<float>(N * layer.hidden());
    a.q = scratch.take<float>(N * Q), a.k = scratch.take<float>(N * P), a.v = scratch.take<float>(N * P);
    a.rotated = scratch.take<char>(bytes), a.attn_out = scratch.take<char>(bytes);
    for (const View& view : batch.views)
        if (view.window && view.sinks && !a.q_sinks) a.q_sinks = scratch.take<char>(bytes);
    return a;
}

/// Copies the residual stream (N, C) after `layers` layers, if batch.state_layers has this number.
void keep_state(const ForwardBatch& batch, int64_t layers, const float* x, int64_t size) {
    for (size_t i = 0; i < batch.state_layers.size(); i++)
        if (batch.state_layers[i] == layers) std::copy_n(x, size, batch.states + static_cast<int64_t>(i) * size);
}

/// The search of each layer; null if the layer's queries see their whole lists.
std::vector<const Search*> searches(const ForwardBatch& batch) {
    std::vector<const Search*> all;
    for (const View& view : batch.views)
        all.insert(all.end(), view.layers, view.search.picks.empty() ? nullptr : &view.search);
    return all;
}

/// Writes keys and values to their pages, rotates the queries and sets them in the call.
void rope_and_write(Attention& call, const ForwardBatch& batch, const Activations& a, const Places& at,
                    int64_t rotation, char* rotated) {
    const int64_t N = batch.rows * batch.width;
    rope_and_write(NewTokens{call.pages, N, call.heads, a.q, a.k, a.v, batch.rotation.at(rotation, call.pages->dim),
                             at.positions, at.sink_positions, at.slots, rotated, a.q_sinks});
    call.q = rotated, call.q_sinks = call.window && call.sinks ? a.q_sinks : nullptr, call.out = a.attn_out;
}

}  // namespace

Places take_places(Scratch& scratch, int64_t count) {
    return {scratch.take<int64_t>(count), scratch.take<int64_t>(count), scratch.take<int64_t>(count),
            scratch.take<int64_t>(count)};
}

void locate(const Places& at, const ForwardBatch& batch, const Attention& call) {
    const int64_t largest = std::max<int64_t>(call.sinks + call.window - 1, 0);
    for (int64_t i = 0; i < batch.rows * batch.width; i++) {
        const int64_t b = i / batch.width, t = i % batch.width, key = call.starts[b] + t;
        const bool real = t < batch.counts[b];
        const auto slot = [&](int64_t index) {
            return call.list(b, 0)[index / page_size] * int64_t{page_size} + index % page_size;
        };
        at.positions[i] = real ? batch.positions[b] + t : 0;
        at.sink_positions[i] = std::min(at.positions[i], largest);
        at.slots[i] = real ? slot(key) : 0;
        at.previous_slots[i] = real && key ? slot(key - 1) : 0;
    }
}

std::vector<Attention> attention_calls(const std::vector<const Pages*>& memory, const ForwardBatch& batch, int heads) {
    std::vector<Attention> calls;
    for (const View& view : batch.views)
        for (int64_t i = 0; i < view.layers && calls.size() < memory.size(); i++) {
            Attention call{};
            call.pages = memory[calls.size()];
            call.rows = batch.rows, call.width = batch.width, call.heads = heads;
            call.starts = view.starts.data(), call.counts = batch.counts.data();
            call.lists = view.lists + i * view.layer_stride;
            call.row_stride = view.row_stride, call.head_stride = view.head_stride, call.list_length = view.list_length;
            call.sinks = view.sinks, call.window = view.window;
            if (!view.coarse.empty()) call.coarse = view.coarse.data();
            if (batch.mass) call.mass = batch.mass + calls.size() * batch.rows * call.pages->heads * view.list_length;
            calls.push_back(call);
        }
    return calls;
}

Decoder::Decoder(std::vector<std::shared_ptr<DecoderLayer>> layers, std::shared_ptr<LmHead> head,
                 std::shared_ptr<Embedding> embedding, std::vector<int64_t> rotations, InputCodes codes)
    : layers_(std::move(layers)), head_(std::move(head)), embedding_(std::move(embedding)),
      rotations_(std::move(rotations)), codes_(codes) {
    require(!layers_.empty(), "a decoder has at least one layer");
    require(rotations_.size() == layers_.size() && *std::min_element(rotations_.begin(), rotations_.end()) >= 0,
            "each layer has a rotation");
    const DecoderLayer& first = *layers_.front();
    for (const auto& layer : layers_)
        require(layer->hidden() == head_->hidden() && layer->q_size() == first.q_size() &&
                layer->kv_size() == first.kv_size() && layer->type() == first.type(), "layers and head must be alike");
    embedding_->expect(first.type(), head_->vocabulary(), head_->hidden());
}

void Decoder::check(const std::vector<const Pages*>& memory, const ForwardBatch& batch) const {
    const DecoderLayer& layer = *layers_.front();
    int64_t layers = 0;
    for (const View& view : batch.views) layers += view.layers;
    require(memory.size() == layers_.size() && layers == static_cast<int64_t>(layers_.size()),
            "pages and views must be of all layers");
    require(0 <= batch.first_layer && batch.first_layer < batch.last_layer && batch.last_layer <= layers &&
            (batch.x || batch.last_layer - batch.first_layer == layers),
            "a part of the layers needs a residual stream");
    require(*std::max_element(rotations_.begin(), rotations_.end()) < batch.rotation.count(memory[0]->dim),
            "the tables must have the rotation of each layer");
    for (const Pages* pages : memory)
        require(pages->type == layer.type() && pages->heads * pages->dim == layer.kv_size() &&
                layer.q_size() % layer.kv_size() == 0, "pages must be of the model's type and shape");
    for (int64_t i = 0; i < batch.rows * batch.width; i++)
        require(0 <= batch.ids[i] && batch.ids[i] < head_->vocabulary(), "ids must be in the vocabulary");
    for (int64_t i = 0; batch.at && i < batch.rows * batch.scored; i++)
        require(0 <= batch.at[i] && batch.at[i] < batch.width, "at must lie in [0, T)");
    for (const int64_t after : batch.state_layers)
        require(0 < after && after < layers + (batch.scored > 0), "states are those behind layers that are finished");
    const int32_t* checked = nullptr;
    const int heads = static_cast<int>(layer.q_size() / memory[0]->dim);
    const std::vector<Attention> attention = attention_calls(memory, batch, heads);
    const std::vector<const Search*> searched = searches(batch);
    for (size_t i = 0; i < attention.size(); i++) {
        if (attention[i].lists != checked) triforce::check(attention[i]), checked = attention[i].lists;
        if (searched[i]) triforce::check(*searched[i], attention[i]);
    }
}

double Decoder::forward(const std::vector<const Pages*>& memory, const ForwardBatch& batch) const {
    Scratch scratch;
    const int64_t N = batch.rows * batch.width, layers = static_cast<int64_t>(layers_.size());
    const DecoderLayer& first = *layers_.front();
    const Activations a = activations(scratch, batch, first);
    const std::vector<const Search*> searched = searches(batch);
    const int64_t queries_of_a_layer = N * first.q_size() * size_of(first.type());
    const int heads = static_cast<int>(first.q_size() / memory[0]->dim);
    std::vector<Attention> attention = attention_calls(memory, batch, heads);
    std::optional<OffloadedPass> offloaded;
    const auto is_offloaded = [](const Pages* pages) { return pages->offload != nullptr; };
    if (const auto found = std::find_if(memory.begin(), memory.end(), is_offloaded); found != memory.end()) {
        const Attention *first_call = &attention[batch.first_layer], *end_call = attention.data() + batch.last_layer;
        offloaded.emplace(*(*found)->offload, first_call, end_call, batch.past_committed, batch.keep).start();
    }
    if (batch.first_layer == 0) embedding_->rows(batch.ids, N, a.x);
    const Places at = take_places(scratch, N);
    int64_t touched = 0, mixtures = 0;
    for (int64_t i = batch.first_layer; i < batch.last_layer; i++) {
        const bool output_needed = batch.scored || i + 1 < layers;
        // Views have different starts, and their lists may name different pages.
        if (i == batch.first_layer || attention[i].starts != attention[i - 1].starts) locate(at, batch, attention[i]);
        layers_[i]->qkv(a.x, N, a.q, a.k, a.v);
        char* rotated = batch.queries ? batch.queries + i * queries_of_a_layer : a.rotated;
        rope_and_write(attention[i], batch, a, at, rotations_[i], rotated);
        if (output_needed || batch.mass) {
            if (memory[i]->offload)
                offloaded->attend(attention[i]);  // without search: offloaded memory has no sketches
            else if (searched[i])
                search_and_attend(*searched[i], attention[i]);
            else
                attend(attention[i]);
        }
        if (output_needed) {
            const int64_t experts = layers_[i]->finish(a.x, N, a.attn_out, codes_);
            touched += experts, mixtures += experts > 0;
        }
        keep_state(batch, i + 1, a.x, N * first.hidden());
    }
    if (batch.scored && batch.last_layer == layers) score(batch, a.x);
    return mixtures ? static_cast<double>(touched) / static_cast<double>(mixtures) : 0;
}

void Decoder::score(const ForwardBatch& batch, const float* x) const {
    const int64_t C = head_->hidden(), J = batch.scored;
    if (!batch.at) return head_->logits(x, batch.rows * J, batch.logits);
    Scratch scratch;
    float* scored = scratch.take<float>(batch.rows * J * C);
    for (int64_t i = 0; i < batch.rows * J; i++)
        std::copy_n(x + (i / J * batch.width + batch.at[i]) * C, C, scored + i * C);
    head_->logits(scored, batch.rows * J, batch.logits);
}

}  // namespace triforce
