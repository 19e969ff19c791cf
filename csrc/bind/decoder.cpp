// The decoder's construction from packed weights.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cmath>
#include <optional>

#include "bind/arrays.h"

namespace paceline {
namespace {

Activation activation(const std::string& name) {
    using enum Activation;
    return named<Activation>(name, {{"silu", silu}, {"gelu_tanh", gelu_tanh}, {"clamped_silu", clamped_silu}},
                             "the activation is silu, gelu_tanh or clamped_silu");
}

std::vector<float> vector_of(nb::handle array, size_t size, const char* what) {
    const auto values = nb::cast<Array<float>>(array);
    require(values.size() == size, std::string(what) + " has the wrong length");
    return {values.data(), values.data() + size};
}

// A matrix by its name; null for Python's None.
std::shared_ptr<Matrix> matrix_at(const nb::dict& found, const char* name) {
    auto matrix = found.contains(name) ? nb::cast<std::shared_ptr<Matrix>>(found[name]) : nullptr;
    require(matrix != nullptr, std::string("a layer lacks the matrix ") + name);
    return matrix;
}

std::shared_ptr<const Matrix> matrix_of(const nb::dict& found, const char* name, size_t out, size_t in) {
    auto matrix = matrix_at(found, name);
    require(matrix->out() == out && matrix->in() == in, std::string("the wrong shape of ") + name);
    return matrix;
}

std::vector<float> maybe_vector(const nb::dict& vectors, const char* name, size_t size) {
    return vectors.contains(name) ? vector_of(vectors[name], size, name) : std::vector<float>();
}

bool alike(const std::shared_ptr<const Matrix>& a, const std::shared_ptr<const Matrix>& b) { return read_alike(a->type(), b->type()); }

// The experts of a layer; null without a router.
std::shared_ptr<const Mixture> mixture_of(const Shape& shape, const nb::dict& matrices, const nb::dict& vectors) {
    if (!matrices.contains("router")) return nullptr;
    const auto router = matrix_at(matrices, "router");
    const size_t num = router->out(), size = matrix_at(matrices, "experts.0.gate")->out();
    require(num <= kMaxExperts && 0 < shape.experts_per_token && shape.experts_per_token <= std::min(num, kMaxExpertsPerToken),
            "a layer has at most 512 experts, and a token at most 32 of them");
    Mixture found{shape.experts_per_token, shape.routing, matrix_of(matrices, "router", num, shape.hidden),
                  maybe_vector(vectors, "router_bias", num), maybe_vector(vectors, "router_correction", num), nullptr, {}};
    if (matrices.contains("shared_gate")) found.shared_gate = matrix_of(matrices, "shared_gate", 1, shape.hidden);
    const bool has_floats = router->type() == WeightType::f32 || router->type() == WeightType::bf16;
    require(has_floats && (!found.shared_gate || found.shared_gate->type() == router->type()), "a router has floats");
    for (size_t i = 0; i < num; ++i) {
        const std::string name = "experts." + std::to_string(i) + ".";
        const auto matrix = [&](const char* part, size_t out, size_t in) { return matrix_of(matrices, (name + part).c_str(), out, in); };
        const auto bias = [&](const char* part, size_t n) { return maybe_vector(vectors, (name + part).c_str(), n); };
        found.experts.push_back({matrix("gate", size, shape.hidden), matrix("up", size, shape.hidden), matrix("down", shape.hidden, size),
                                 bias("gate_bias", size), bias("up_bias", size), bias("down_bias", shape.hidden)});
        const Expert &one = found.experts.back(), &first = found.experts[0];
        require(alike(one.gate, first.gate) && alike(one.up, first.gate) && alike(one.down, first.down),
                "the experts of a layer must have one type, or types of a file's blocks");
    }
    return std::make_shared<const Mixture>(std::move(found));
}

// norms_all: the norms of q and k go over all heads together.
Layer layer_of(const Shape& shape, const HeadShape& heads, const nb::dict& matrices, const nb::dict& vectors, bool first, bool fused,
               bool norms_all) {
    const size_t q = shape.num_heads * heads.dim, kv = heads.kv_size(), ranks = shape.num_ranks, own_hidden = shape.hidden / ranks;
    const auto maybe = [&](const char* name, size_t size) { return maybe_vector(vectors, name, size); };
    Layer layer;
    layer.heads = heads;
    require(vectors.contains("attn_norm") || vectors.contains("attn_post_norm") || (first && fused), "a layer lacks the norm of attention");
    require(vectors.contains("mlp_norm") || vectors.contains("mlp_post_norm"), "a layer lacks the norm of its feed-forward network");
    layer.attn_norm = maybe("attn_norm", shape.hidden);
    layer.mlp_norm = maybe("mlp_norm", shape.hidden);
    layer.attn_post_norm = maybe("attn_post_norm", shape.hidden);
    layer.mlp_post_norm = maybe("mlp_post_norm", shape.hidden);
    if (first && !fused) layer.feature_norm = maybe("hidden_norm", shape.hidden);
    const size_t inputs = layer.feature_norm.empty() ? shape.hidden : 2 * shape.hidden;
    layer.sinks = maybe("attn_sinks", shape.num_heads);
    (norms_all ? layer.all_q_norm : layer.q_norm) = maybe("attn_q_norm", norms_all ? q : heads.dim);
    (norms_all ? layer.all_k_norm : layer.k_norm) = maybe("attn_k_norm", norms_all ? kv : heads.dim);
    layer.q_bias = maybe("attn_q_bias", q);
    layer.k_bias = maybe("attn_k_bias", kv);
    layer.v_bias = maybe("attn_v_bias", kv);
    layer.o_bias = maybe("attn_o_bias", own_hidden);
    layer.down_bias = maybe("mlp_down_bias", own_hidden);
    layer.q = matrix_of(matrices, "attn_q", q, inputs);
    if (matrices.contains("attn_k")) {
        layer.k = matrix_of(matrices, "attn_k", kv, inputs);
        layer.v = matrix_of(matrices, "attn_v", kv, inputs);
    }
    if (vectors.contains("layer_scale")) layer.scale = vector_of(vectors["layer_scale"], 1, "layer_scale")[0];
    layer.o = matrix_of(matrices, "attn_o", own_hidden, q * ranks);
    layer.mixture = mixture_of(shape, matrices, vectors);
    require(ranks == 1 || (layer.k && !layer.mixture && !norms_all),
            "ranks share layers of their own keys, without experts and norms of all heads");
    if (!layer.mixture || layer.mixture->shared_gate || matrices.contains("mlp_gate")) {
        const size_t size = matrix_at(matrices, "mlp_gate")->out();
        require(size <= shape.intermediate, "a layer is wider than the widest");
        layer.gate = matrix_of(matrices, "mlp_gate", size, shape.hidden);
        layer.up = matrix_of(matrices, "mlp_up", size, shape.hidden);
        layer.down = matrix_of(matrices, "mlp_down", own_hidden, size * ranks);
        require(ranks == 1 || (q % kPanel == 0 && size % kPanel == 0), "a rank has whole panels of every matrix");
        layer.gate_bias = maybe("mlp_gate_bias", size);
        layer.up_bias = maybe("mlp_up_bias", size);
    }
    require((!layer.k || (alike(layer.q, layer.k) && alike(layer.q, layer.v))) && (!layer.gate || alike(layer.gate, layer.up)),
            "matrices that read the same activations must have one type, or types of a file's blocks");
    return layer;
}

// The weights that make layer inputs of tokens, and those that read them in the layers.
LayerInputs inputs_of(const Shape& shape, const nb::dict& matrices, const nb::dict& vectors, const nb::list& layers, std::vector<Layer>& to) {
    require(vectors.contains("input_norm"), "inputs of layers lack their norm");
    const size_t size = nb::cast<Array<float>>(vectors["input_norm"]).size(), width = size * to.size();
    require(0 < size && size <= kMaxSide / std::max<size_t>(to.size(), 1), "the inputs of layers are too large");
    for (size_t i = 0; i < to.size(); ++i) {
        const auto parts = nb::cast<nb::tuple>(layers[i]);
        const auto own = nb::cast<nb::dict>(parts[0]), norms = nb::cast<nb::dict>(parts[1]);
        require(norms.contains("input_post_norm"), "a layer lacks the norm of its input");
        to[i].input_gate = matrix_of(own, "input_gate", size, shape.hidden);
        to[i].input_out = matrix_of(own, "input_out", shape.hidden, size);
        to[i].input_post_norm = vector_of(norms["input_post_norm"], shape.hidden, "input_post_norm");
    }
    return {matrix_of(matrices, "input_embed", shape.vocab, width), matrix_of(matrices, "input_proj", width, shape.hidden),
            vector_of(vectors["input_norm"], size, "input_norm")};
}

// The heads of each layer.
std::vector<HeadShape> heads_of(const Shape& shape, const std::vector<std::pair<size_t, size_t>>& given) {
    require(given.size() == shape.num_layers, "every layer needs its heads");
    std::vector<HeadShape> found;
    for (const auto& [num_kv, dim] : given) {
        require(0 < num_kv && num_kv <= shape.num_heads && shape.num_heads % num_kv == 0, "the heads do not fit each other");
        require(0 < dim && dim <= shape.head_dim && dim % 2 == 0, "heads are larger than the largest, or odd");
        found.push_back({num_kv, dim});
    }
    return found;
}

// Set the layer of a store that each layer reads. Layers without keys of their own come last and read another layer's.
void set_kv_layers(std::vector<Layer>& layers, const std::vector<size_t>& given) {
    require(given.size() == layers.size(), "every layer needs its keys and values");
    size_t stored = 0;
    for (size_t i = 0; i < layers.size(); ++i) {
        layers[i].kv = given[i];
        if (layers[i].k) require(layers[i].kv == i && stored++ == i, "layers with keys of their own come first, in order");
        require(layers[i].kv < stored && layers[layers[i].kv].heads == layers[i].heads, "a layer reads keys of none before, or of other heads");
    }
}

// The corrector of a block head; its kind says whether it has `mix` and a state.
Corrector corrector_of(const Shape& shape, const nb::dict& matrices, const nb::dict& vectors) {
    Corrector found;
    if (matrices.contains("out")) {
        const size_t rank = found.rank = matrix_at(matrices, "out")->in();
        require(rank <= kMaxSide / 4, "the corrector is too wide");
        found.before = matrix_of(matrices, "before", shape.vocab, rank);
        found.out = matrix_of(matrices, "out", shape.head_size, rank);
        require(!matrices.contains("gate") || !matrices.contains("joint"), "a corrector has a gate or a state");
        if (matrices.contains("joint")) found.state_size = rank;
        if (matrices.contains("gate")) found.mix = matrix_of(matrices, "gate", rank, shape.hidden + rank);
        if (matrices.contains("joint")) found.mix = matrix_of(matrices, "joint", 3 * rank, 2 * rank + shape.hidden);
        if (found.mix) found.mix_bias = maybe_vector(vectors, "mix_bias", found.mix->out());
    }
    if (!vectors.contains("confidence")) return found;
    const auto values = nb::cast<Array<float>>(vectors["confidence"]);
    require(values.size() == shape.hidden || values.size() == shape.hidden + found.rank, "confidence has the wrong length");
    found.confidence.assign(values.data(), values.data() + values.size());
    found.confidence_bias = vectors.contains("confidence_bias") ? vector_of(vectors["confidence_bias"], 1, "confidence_bias")[0] : 0.0f;
    return found;
}

void check_shape(const Shape& s) {
    for (size_t n : {s.vocab, s.hidden, s.intermediate, s.num_layers, s.num_heads, s.head_dim})
        require(0 < n && n <= kMaxSide, "every size of a model is between 1 and 2**24");
    require(s.num_heads * s.head_dim <= kMaxSide, "the heads are too large");
}

// Return the number of ranks that can share a decoder of these sizes.
size_t check_ranks(const RankMemory& ranks, const Shape& s) {
    require(s.hidden % (ranks.size() * kPanel) == 0, "ranks have whole panels of every matrix");
    const size_t widest = ranks.size() * std::max(s.num_heads * s.head_dim, s.intermediate);
    require(2 * std::max(s.hidden, widest) <= RankMemory::kRoom, "ranks exchange shorter rows");
    return ranks.size();
}

// Set each layer's window and row of the RoPE frequencies. Empty lists: no windows, and the first row.
void set_windows(std::vector<Layer>& layers, const std::vector<size_t>& windows, const std::vector<size_t>& ropes, size_t num_ropes) {
    require(windows.size() == ropes.size() && (windows.empty() || windows.size() == layers.size()), "every layer needs a window and a RoPE");
    for (size_t i = 0; i < windows.size(); ++i) {
        require(windows[i] <= kMaxSide && ropes[i] < num_ropes, "a window or a RoPE out of bounds");
        layers[i].window = windows[i], layers[i].rope = ropes[i];
    }
}

// The target's token id of each row of the LM head.
std::vector<uint32_t> checked_ids(const Ids& ids, const Shape& shape) {
    require(ids.size() == shape.head_size, "every row of the head needs its token id");
    for (size_t i = 0; i < ids.size(); ++i)
        require(0 <= ids.data()[i] && static_cast<size_t>(ids.data()[i]) < shape.vocab, "token ids must lie in the vocabulary");
    return {ids.data(), ids.data() + ids.size()};
}

void make_decoder(Decoder* self, size_t vocab, size_t hidden, size_t intermediate, size_t num_heads, size_t head_dim,
                  const std::vector<std::pair<size_t, size_t>>& heads, const std::vector<size_t>& kv_layers, float norm_eps,
                  const std::shared_ptr<ThreadPool>& pool, const std::shared_ptr<Matrix>& embed, const std::shared_ptr<Matrix>& head,
                  const Array<float>& final_norm, const Table<float>& inverse_frequencies, const Table<float>& magnitudes,
                  const nb::list& layers, const std::vector<size_t>& windows, const std::vector<size_t>& ropes, float query_scale,
                  float embed_scale, const std::string& activation_name, float residual_scale, float score_cap, float logit_cap,
                  float query_growth, float query_context, bool norms_all, bool norms_residual, bool feeds_normed,
                  const nb::dict& fusing_matrices, const nb::dict& fusing_vectors, const std::optional<Ids>& token_ids,
                  size_t experts_per_token, bool norms_shares, bool norms_values, const nb::dict& input_matrices,
                  const nb::dict& input_vectors, bool routes_by_sigmoid, float share_scale, bool reads_rows,
                  const nb::dict& corrector_matrices, const nb::dict& corrector_vectors, const std::shared_ptr<RankMemory>& ranks) {
    Shape shape{vocab, hidden, intermediate, layers.size(), num_heads, 0, head_dim, norm_eps, query_scale, embed_scale,
                activation(activation_name)};
    shape.residual_scale = residual_scale, shape.score_cap = score_cap, shape.logit_cap = logit_cap;
    shape.query_growth = query_growth, shape.query_context = query_context;
    for (float x : {residual_scale, score_cap, logit_cap, query_growth, query_context})
        require(std::isfinite(x) && x >= 0.0f, "factors and caps are finite and not negative");
    require(query_context >= 1.0f, "a context has at least one position");
    shape.norms_residual = norms_residual, shape.feeds_normed = feeds_normed, shape.reads_rows = reads_rows;
    shape.experts_per_token = experts_per_token, shape.routing = {norms_shares, routes_by_sigmoid, share_scale};
    for (float x : {query_scale, embed_scale, share_scale}) require(std::isfinite(x), "a scale is not a finite number");
    check_shape(shape);
    const std::vector<HeadShape> own_heads = heads_of(shape, heads);
    for (const HeadShape& own : own_heads) shape.kv_size = std::max(shape.kv_size, own.kv_size());
    if (ranks) shape.num_ranks = check_ranks(*ranks, shape);
    const bool follows = ranks && ranks->rank() > 0;
    require(!embed == follows && !head == follows, "rank 0 has the tables, and no other");
    require(follows || (embed->out() == shape.vocab && embed->in() == shape.hidden), "the wrong shape of the embedding");
    require(follows || head->in() == shape.hidden, "the wrong shape of the head");
    shape.head_size = follows ? shape.vocab : head->out();
    require(token_ids || shape.head_size <= shape.vocab, "the head has more rows than there are tokens");
    require(inverse_frequencies.shape(0) > 0 && inverse_frequencies.shape(1) == head_dim / 2, "the wrong shape of inverse_frequencies");
    require(magnitudes.shape(0) == inverse_frequencies.shape(0) && magnitudes.shape(1) == head_dim / 2, "the wrong shape of magnitudes");
    const bool fused = fusing_matrices.contains("fc");
    require(final_norm.size() > 0 || fused || follows, "only a model that fuses features can do without the last norm");
    require(!ranks || (!fused && !reads_rows && !token_ids && !input_matrices.size()), "ranks share a plain decoder");
    Weights weights;
    weights.embed = embed, weights.head = head;
    weights.inverse_frequencies.assign(inverse_frequencies.data(), inverse_frequencies.data() + inverse_frequencies.size());
    weights.magnitudes.assign(magnitudes.data(), magnitudes.data() + magnitudes.size());
    if (final_norm.size() > 0) weights.final_norm = vector_of(nb::cast(final_norm), shape.hidden, "final_norm");
    if (fused) weights.fuse = matrix_of(fusing_matrices, "fc", shape.hidden, 2 * shape.hidden);
    weights.fuse_bias = maybe_vector(fusing_vectors, "fc_bias", shape.hidden);
    weights.embed_norm = maybe_vector(fusing_vectors, "embed_norm", shape.hidden);
    weights.feature_norm = maybe_vector(fusing_vectors, "feature_norm", shape.hidden);
    if (reads_rows) weights.corrector = corrector_of(shape, corrector_matrices, corrector_vectors);
    if (token_ids) weights.token_ids = checked_ids(*token_ids, shape);
    for (nb::handle layer : layers) {
        const auto parts = nb::cast<nb::tuple>(layer);
        require(parts.size() == 2, "a layer is a pair of matrices and vectors");
        const HeadShape& own = own_heads[weights.layers.size()];
        weights.layers.push_back(layer_of(shape, own, nb::cast<nb::dict>(parts[0]), nb::cast<nb::dict>(parts[1]),
                                          weights.layers.empty(), fused, norms_all));
        if (norms_values) weights.layers.back().v_norm.assign(own.dim, 1.0f);
    }
    set_kv_layers(weights.layers, kv_layers);
    if (input_matrices.contains("input_embed"))
        weights.inputs = inputs_of(shape, input_matrices, input_vectors, layers, weights.layers);
    std::shared_ptr<const Mixture> first;
    for (const Layer& layer : weights.layers) {
        const auto& own = layer.mixture;
        require(!own || !first || (own->experts.size() == first->experts.size() && own->size() == first->size()),
                "layers with experts have one number and size of them");
        if (!first) first = own;
    }
    set_windows(weights.layers, windows, ropes, inverse_frequencies.shape(0));
    for (const Layer& layer : weights.layers)
        require(!reads_rows || (layer.k && !layer.window && layer.feature_norm.empty() && layer.all_k_norm.empty() && layer.v_norm.empty()),
                "layers of a block head are plain");
    require(!reads_rows || !weights.inputs.embed, "layers of a block head have no inputs of their own");
    shape.reads_features = fused || !weights.layers[0].feature_norm.empty();
    new (self) Decoder(shape, std::move(weights), pool, ranks);
}

}  // namespace

void bind_decoder(nb::module_& m) {
    nb::class_<RankMemory>(m, "RankMemory")
        .def("__init__", [](RankMemory* self, int file, size_t rank, size_t size) {
            require(1 < size && size <= 64 && rank < size, "there are 2 to 64 ranks");
            new (self) RankMemory(file, rank, size);
        }, "file"_a, "rank"_a, "size"_a)
        .def_prop_ro("size", &RankMemory::size);
    m.attr("RANK_MEMORY_BYTES") = RankMemory::kBytes;
    nb::class_<Decoder> decoder(m, "Decoder");
    decoder
        .def("__init__", &make_decoder, "vocab"_a, "hidden"_a, "intermediate"_a, "num_heads"_a, "head_dim"_a, "heads"_a, "kv_layers"_a,
             "norm_eps"_a, "pool"_a, "embed"_a.none(), "head"_a.none(), "final_norm"_a, "inverse_frequencies"_a, "magnitudes"_a, "layers"_a,
             "windows"_a, "ropes"_a, "query_scale"_a, "embed_scale"_a, "activation"_a, "residual_scale"_a = 1.0f, "score_cap"_a = 0.0f,
             "logit_cap"_a = 0.0f, "query_growth"_a = 0.0f, "query_context"_a = 1.0f, "norms_all"_a = false, "norms_residual"_a = false,
             "feeds_normed"_a = false, "fusing_matrices"_a = nb::dict(), "fusing_vectors"_a = nb::dict(), "token_ids"_a = nb::none(),
             "experts_per_token"_a = 0, "norms_shares"_a = true, "norms_values"_a = false, "input_matrices"_a = nb::dict(),
             "input_vectors"_a = nb::dict(), "routes_by_sigmoid"_a = false, "share_scale"_a = 1.0f, "reads_rows"_a = false,
             "corrector_matrices"_a = nb::dict(), "corrector_vectors"_a = nb::dict(), "ranks"_a.none() = nb::none())
        .def_prop_ro("vocab", [](const Decoder& self) { return self.shape().vocab; })
        .def_prop_ro("maps_ids", &Decoder::maps_ids)
        .def_prop_ro("hidden", [](const Decoder& self) { return self.shape().hidden; })
        .def_prop_ro("weight_bytes", &Decoder::weight_bytes)
        .def_prop_ro("touched_experts", &Decoder::touched_experts)
        .def("set_token_id", [](Decoder& self, size_t index, size_t id) {
            require(self.maps_ids() && index < self.shape().head_size && id < self.shape().vocab, "no such row or token");
            self.set_token_id(index, static_cast<uint32_t>(id));
        }, "index"_a, "token_id"_a);
    bind_passes(m, decoder);
}

}  // namespace paceline
