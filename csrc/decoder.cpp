#include "decoder.hpp"

#include <algorithm>
#include <stdexcept>

#include "memory.hpp"
#include "offload.hpp"

namespace triforce {
namespace {

void require(bool fine, const char* why) {
    if (!fine) throw std::invalid_argument(why);
}

template <class T>
void widen(const void* from, int64_t count, float* to) {
    for (int64_t i = 0; i < count; i++) to[i] = to_float(static_cast<const T*>(from)[i]);
}

/// What passes from layer to layer and from step to step.
struct Activations {
    float *x, *q, *k, *v;
    char *rotated, *q_sinks, *mixed;
    int64_t *positions, *positions_to_sinks, *slots;
};

Activations activations(Scratch& scratch, const Feed& feed, const Block& block) {
    const size_t N = feed.rows * feed.width, Q = block.q_size(), P = block.kv_size();
    const size_t bytes = N * Q * size_of(block.type());
    Activations a{};
    a.x = feed.x ? feed.x : scratch.take<float>(N * block.hidden());
    a.q = scratch.take<float>(N * Q), a.k = scratch.take<float>(N * P), a.v = scratch.take<float>(N * P);
    a.rotated = scratch.take<char>(bytes), a.mixed = scratch.take<char>(bytes);
    if (feed.views.front().window) a.q_sinks = scratch.take<char>(bytes);
    a.positions = scratch.take<int64_t>(N);
    a.positions_to_sinks = scratch.take<int64_t>(N);
    a.slots = scratch.take<int64_t>(N);
    return a;
}

/// Positions and slots of the new tokens; padding goes to the scratch page.
void place(const Feed& feed, const Attention& call, const Activations& a) {
    const int64_t last_to_sinks = call.sinks + call.window - 1;
    for (int64_t i = 0; i < feed.rows * feed.width; i++) {
        const int64_t b = i / feed.width, t = i % feed.width, key = call.starts[b] + t;
        const bool real = t < feed.counts[b];
        a.positions[i] = real ? feed.positions[b] + t : 0;
        a.positions_to_sinks[i] = std::min(a.positions[i], std::max<int64_t>(last_to_sinks, 0));
        a.slots[i] = real ? call.list(b, 0)[key / page_size] * int64_t{page_size} + key % page_size : 0;
    }
}

/// The attention of each layer, but for what it reads and writes.
std::vector<Attention> calls(const std::vector<const Pages*>& memory, const Feed& feed, int heads) {
    std::vector<Attention> calls;
    for (const View& view : feed.views)
        for (int64_t i = 0; i < view.layers && calls.size() < memory.size(); i++) {
            Attention call{};
            call.pages = memory[calls.size()];
            call.rows = feed.rows, call.width = feed.width, call.heads = heads;
            call.starts = view.starts.data(), call.counts = feed.counts.data();
            call.lists = view.lists + i * view.layer_stride;
            call.row_stride = view.row_stride, call.head_stride = view.head_stride, call.list_length = view.list_length;
            call.sinks = view.sinks, call.window = view.window;
            if (!view.coarse.empty()) call.coarse = view.coarse.data();
            if (feed.mass) call.mass = feed.mass + calls.size() * feed.rows * call.pages->heads * view.list_length;
            calls.push_back(call);
        }
    return calls;
}

/// Of each layer; null: its queries see all of their lists.
std::vector<const Search*> searches(const Feed& feed) {
    std::vector<const Search*> found;
    for (const View& view : feed.views) found.insert(found.end(), view.layers, view.search.picks.empty() ? nullptr : &view.search);
    return found;
}

/// Keys and values into their pages; the queries are ready for their attention.
void remember(Attention& call, const Feed& feed, const Activations& a, char* rotated) {
    const int64_t N = feed.rows * feed.width;
    run(NewTokens{call.pages, N, call.heads, a.q, a.k, a.v, feed.rotation, a.positions, a.positions_to_sinks, a.slots,
                  rotated, a.q_sinks});
    call.q = rotated, call.q_sinks = a.q_sinks, call.mixed = a.mixed;
}

}  // namespace

Decoder::Decoder(std::vector<std::shared_ptr<Block>> blocks, std::shared_ptr<Head> head,
                 std::optional<Tensor> embedding)
    : blocks_(std::move(blocks)), head_(std::move(head)), embedding_(std::move(embedding)) {
    require(!blocks_.empty(), "a decoder has at least one block");
    const Block& first = *blocks_.front();
    for (const auto& block : blocks_)
        require(block->hidden() == head_->hidden() && block->q_size() == first.q_size() &&
                block->kv_size() == first.kv_size() && block->type() == first.type(), "blocks and head must be alike");
    if (embedding_) embedding_->expect(first.type(), {head_->vocabulary(), head_->hidden()});
}

void Decoder::check(const std::vector<const Pages*>& memory, const Feed& feed) const {
    const Block& block = *blocks_.front();
    int64_t layers = 0;
    for (const View& view : feed.views) layers += view.layers;
    require(memory.size() == blocks_.size() && layers == static_cast<int64_t>(blocks_.size()),
            "pages and views must be of all layers");
    require(0 <= feed.first_layer && feed.first_layer < feed.last_layer && feed.last_layer <= layers &&
            (feed.x || feed.last_layer - feed.first_layer == layers), "a part of the layers needs a residual stream");
    for (const Pages* pages : memory)
        require(pages->is_bf16 == (block.type() == Type::bf16) && pages->heads * pages->dim == block.kv_size() &&
                block.q_size() % block.kv_size() == 0, "pages must be of the model's type and shape");
    for (int64_t i = 0; i < feed.rows * feed.width; i++)
        require(0 <= feed.ids[i] && feed.ids[i] < head_->vocabulary(), "ids must be in the vocabulary");
    for (int64_t i = 0; feed.at && i < feed.rows * feed.scored; i++)
        require(0 <= feed.at[i] && feed.at[i] < feed.width, "at must lie in [0, T)");
    const int32_t* checked = nullptr;
    const std::vector<Attention> attention = calls(memory, feed, 0);
    const std::vector<const Search*> searched = searches(feed);
    for (size_t i = 0; i < attention.size(); i++) {
        if (attention[i].lists != checked) triforce::check(attention[i]), checked = attention[i].lists;
        if (searched[i]) triforce::check(*searched[i], attention[i]);
    }
}

void Decoder::run(const std::vector<const Pages*>& memory, const Feed& feed) const {
    Scratch scratch;
    const int64_t N = feed.rows * feed.width, layers = static_cast<int64_t>(blocks_.size());
    const Block& first = *blocks_.front();
    const Activations a = activations(scratch, feed, first);
    const std::vector<const Search*> searched = searches(feed);
    const int64_t queries_of_a_layer = N * first.q_size() * size_of(first.type());
    std::vector<Attention> attention = calls(memory, feed, static_cast<int>(first.q_size() / memory[0]->dim));
    std::optional<OffloadedPass> offloaded;
    if (Offload* home = memory[0]->home)
        offloaded.emplace(*home, attention.data() + feed.first_layer, attention.data() + feed.last_layer,
                          OffloadedPass::How{feed.exact, feed.keep});
    if (feed.first_layer == 0) embed(feed, a.x);
    place(feed, attention[0], a);
    for (int64_t i = feed.first_layer; i < feed.last_layer; i++) {
        const bool goes_on = feed.scored || i + 1 < layers;
        blocks_[i]->qkv(a.x, N, a.q, a.k, a.v);
        remember(attention[i], feed, a, feed.queries ? feed.queries + i * queries_of_a_layer : a.rotated);
        if (goes_on || feed.mass) {
            if (offloaded) {
                offloaded->attend(attention[i]);  // it shows all that a search may leave out
            } else {
                searched[i] ? triforce::run(*searched[i], attention[i]) : triforce::run(attention[i]);
            }
        }
        if (goes_on) blocks_[i]->finish(a.x, N, a.mixed);
    }
    if (feed.scored && feed.last_layer == layers) score(feed, a.x);
}

void Decoder::embed(const Feed& feed, float* x) const {
    const int64_t C = head_->hidden();
    if (!embedding_) return head_->matrix().rows(feed.ids, feed.rows * feed.width, x);
    const bool narrow = embedding_->type == Type::bf16;
    const char* table = static_cast<const char*>(embedding_->data);
    for (int64_t i = 0; i < feed.rows * feed.width; i++) {
        const char* row = table + feed.ids[i] * C * size_of(embedding_->type);
        narrow ? widen<bf16>(row, C, x + i * C) : widen<float>(row, C, x + i * C);
    }
}

void Decoder::score(const Feed& feed, const float* x) const {
    const int64_t C = head_->hidden(), J = feed.scored;
    if (!feed.at) return head_->logits(x, feed.rows * J, feed.logits);
    Scratch scratch;
    float* scored = scratch.take<float>(feed.rows * J * C);
    for (int64_t i = 0; i < feed.rows * J; i++)
        std::copy_n(x + (i / J * feed.width + feed.at[i]) * C, C, scored + i * C);
    head_->logits(scored, feed.rows * J, feed.logits);
}

}  // namespace triforce
