// The border to Python. Everything that comes in is checked here; nothing behind it checks again.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <stdexcept>

#include "bind/arrays.h"
#include "model/decoder.h"
#include "model/fuse.h"
#include "isa/kernels.h"
#include "model/matrix.h"
#include "host/measure.h"
#include "model/sampling.h"
#include "base/thread_pool.h"
#include "model/multistep.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace paceline {
namespace {

constexpr size_t kMostTokens = size_t{1} << 31;  // so that an id fits 32 bits

template <class T>
using Array = nb::ndarray<const T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

template <class T>
Sampler<T>& sampler() {
    thread_local Sampler<T> own;  // scratch memory of a few vocabulary rows, kept
    return own;
}

template <class T>
size_t checked_size(const Array<T>& logits) {
    if (logits.size() == 0 || logits.size() >= kMostTokens) throw std::invalid_argument("a row needs 1 to 2**31 logits");
    return logits.size();
}

Edits checked_edits(const Array<int64_t>& ids, const Array<float>& scale, const Array<float>& add, size_t vocab) {
    if (ids.size() != scale.size() || ids.size() != add.size())
        throw std::invalid_argument("edits need as many scales and sums as ids");
    for (size_t i = 0; i < ids.size(); ++i)
        if (ids.data()[i] < 0 || static_cast<size_t>(ids.data()[i]) >= vocab)
            throw std::out_of_range("an edit's token id lies outside the vocabulary");
    return {ids.data(), scale.data(), add.data(), ids.size()};
}

template <class T>
int64_t choose(const Array<T>& logits, double temperature, int64_t top_k, double top_p, double min_p,
               const Array<int64_t>& ids, const Array<float>& scale, const Array<float>& add, uint32_t k0,
               uint32_t k1) {
    const size_t vocab = checked_size(logits);
    const Edits edits = checked_edits(ids, scale, add, vocab);
    nb::gil_scoped_release unlocked;
    Sampler<T>& row = sampler<T>();
    row.load(logits.data(), vocab, temperature, edits);
    return temperature > 0.0 ? row.choose({top_k, top_p, min_p}, {k0, k1}) : row.argmax();
}

// The token, and by how many logits it was ahead of the next.
template <class T>
std::tuple<int64_t, double> choose_ahead(const Array<T>& logits, double temperature, int64_t top_k, double top_p,
                                         double min_p, const Array<int64_t>& ids, const Array<float>& scale,
                                         const Array<float>& add, uint32_t k0, uint32_t k1) {
    const size_t vocab = checked_size(logits);
    const Edits edits = checked_edits(ids, scale, add, vocab);
    nb::gil_scoped_release unlocked;
    Sampler<T>& row = sampler<T>();
    row.load(logits.data(), vocab, temperature, edits);
    if (temperature > 0.0) {
        double ahead = 0.0;
        const int64_t id = row.choose({top_k, top_p, min_p}, {k0, k1}, &ahead);
        return {id, margin(ahead, temperature)};
    }
    return {row.argmax(), row.lead()};
}

template <class T>
std::vector<int64_t> keep(const Array<T>& z, int64_t top_k, double top_p, double min_p) {
    Sampler<T>& row = sampler<T>();
    row.load(z.data(), checked_size(z), 1.0, {});
    std::vector<int64_t> ids;
    for (const auto& c : row.keep({top_k, top_p, min_p})) ids.push_back(c.id);
    return ids;
}

template <class T>
std::tuple<double, std::vector<int64_t>, std::vector<double>> logprobs(const Array<T>& logits, int64_t token_id,
                                                                       size_t num_top) {
    const size_t vocab = checked_size(logits);
    if (token_id < 0 || static_cast<size_t>(token_id) >= vocab)
        throw std::out_of_range("the token id lies outside the vocabulary");
    std::vector<int64_t> ids;
    std::vector<double> values;
    Sampler<T>& row = sampler<T>();
    row.view(logits.data(), vocab);
    const double total = row.broken() ? NAN : row.log_total();
    for (const auto& c : row.leaders(num_top)) {
        ids.push_back(c.id);
        values.push_back(static_cast<double>(c.value) - total);
    }
    return {static_cast<double>(logits.data()[token_id]) - total, ids, values};
}

template <class T>
void bind_sampling(nb::module_& m) {
    m.def("choose", &choose<T>, "logits"_a.noconvert(), "temperature"_a, "top_k"_a, "top_p"_a, "min_p"_a, "edit_ids"_a,
          "edit_scale"_a, "edit_add"_a, "k0"_a, "k1"_a);
    m.def("choose_ahead", &choose_ahead<T>, "logits"_a.noconvert(), "temperature"_a, "top_k"_a, "top_p"_a, "min_p"_a,
          "edit_ids"_a, "edit_scale"_a, "edit_add"_a, "k0"_a, "k1"_a);
    m.def("keep", &keep<T>, "z"_a.noconvert(), "top_k"_a, "top_p"_a, "min_p"_a);
    m.def("logprobs", &logprobs<T>, "logits"_a.noconvert(), "token_id"_a, "num_top"_a);
}

// Weights ----------------------------------------------------------------------------------------

template <class T>
using Table = nb::ndarray<const T, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

constexpr size_t kMostSide = size_t{1} << 24;  // rows or columns of a matrix

void require(bool holds, const std::string& message) {
    if (!holds) throw std::invalid_argument(message);
}

WeightType weight_type(const std::string& name) {
    if (name == "int8") return WeightType::int8;
    if (name == "int4_row") return WeightType::int4_row;
    if (name == "int4") return WeightType::int4;
    if (name == "bf16") return WeightType::bf16;
    require(name == "f32", "weights are int8, int4_row, int4, bf16 or f32, not " + name);
    return WeightType::f32;
}

Activation activation(const std::string& name) {
    if (name == "silu") return Activation::silu;
    require(name == "gelu_tanh", "the activation is silu or gelu_tanh, not " + name);
    return Activation::gelu;
}

KVType kv_type(const std::string& name) {
    if (name == "i16") return KVType::i16;
    if (name == "i8") return KVType::i8;
    if (name == "f16") return KVType::f16;
    require(name == "f32", "KV is i16, i8, f16 or f32, not " + name);
    return KVType::f32;
}

void check_sides(size_t out, size_t in, WeightType type) {
    require(0 < out && out <= kMostSide && 0 < in && in <= kMostSide, "a matrix has 1 to 2**24 rows and columns");
    require(!is_spread(type) || in <= kMostInputs, "a matrix of int8 or int4_row has at most 2**16 columns");
}

std::shared_ptr<Matrix> pack(const Table<float>& weights, const std::string& type) {
    const WeightType chosen = weight_type(type);
    check_sides(weights.shape(0), weights.shape(1), chosen);
    nb::gil_scoped_release unlocked;
    return std::make_shared<Matrix>(Matrix::pack(weights.data(), weights.shape(0), weights.shape(1), chosen));
}

std::shared_ptr<Matrix> pack_int4(const Table<uint8_t>& values, const Table<uint16_t>& scales,
                                  const Table<uint16_t>& minima) {
    const size_t out = values.shape(0), in = values.shape(1);
    check_sides(out, in, WeightType::int4);
    require(in % kInt4Group == 0, "rows of 4-bit blocks are multiples of 32 long");
    for (const auto* halves : {&scales, &minima})
        require(halves->shape(0) == out && halves->shape(1) == in / kInt4Group,
                "4-bit blocks need a scale and a minimum for every 32 values");
    nb::gil_scoped_release unlocked;
    return std::make_shared<Matrix>(Matrix::pack_int4(values.data(), scales.data(), minima.data(), out, in));
}

std::vector<float> vector_of(nb::handle array, size_t size, const char* what) {
    const auto values = nb::cast<Array<float>>(array);
    require(values.size() == size, std::string(what) + " has the wrong length");
    return {values.data(), values.data() + size};
}

std::shared_ptr<const Matrix> matrix_of(const nb::dict& found, const char* name, size_t out, size_t in) {
    require(found.contains(name), std::string("a layer lacks the matrix ") + name);
    auto matrix = nb::cast<std::shared_ptr<Matrix>>(found[name]);
    require(matrix->out() == out && matrix->in() == in, std::string("the wrong shape of ") + name);
    return matrix;
}

std::vector<float> maybe_vector(const nb::dict& vectors, const char* name, size_t size) {
    return vectors.contains(name) ? vector_of(vectors[name], size, name) : std::vector<float>();
}

Layer layer_of(const Shape& shape, const nb::dict& matrices, const nb::dict& vectors, bool first, bool fused) {
    const size_t q = shape.num_heads * shape.head_dim, kv = shape.num_kv_heads * shape.head_dim;
    const auto maybe = [&](const char* name, size_t size) { return maybe_vector(vectors, name, size); };
    Layer layer;
    require(vectors.contains("attn_norm") || (first && fused), "a layer lacks the norm before attention");
    require(vectors.contains("mlp_norm"), "a layer lacks the norm before its feed-forward network");
    layer.attn_norm = maybe("attn_norm", shape.hidden);
    layer.mlp_norm = maybe("mlp_norm", shape.hidden);
    layer.attn_post_norm = maybe("attn_post_norm", shape.hidden);
    layer.mlp_post_norm = maybe("mlp_post_norm", shape.hidden);
    if (first && !fused) layer.feature_norm = maybe("hidden_norm", shape.hidden);
    const size_t read = layer.feature_norm.empty() ? shape.hidden : 2 * shape.hidden;
    layer.q_norm = maybe("attn_q_norm", shape.head_dim);
    layer.k_norm = maybe("attn_k_norm", shape.head_dim);
    layer.q_bias = maybe("attn_q_bias", q);
    layer.k_bias = maybe("attn_k_bias", kv);
    layer.v_bias = maybe("attn_v_bias", kv);
    layer.o_bias = maybe("attn_o_bias", shape.hidden);
    layer.gate_bias = maybe("mlp_gate_bias", shape.intermediate);
    layer.up_bias = maybe("mlp_up_bias", shape.intermediate);
    layer.down_bias = maybe("mlp_down_bias", shape.hidden);
    layer.q = matrix_of(matrices, "attn_q", q, read);
    layer.k = matrix_of(matrices, "attn_k", kv, read);
    layer.v = matrix_of(matrices, "attn_v", kv, read);
    layer.o = matrix_of(matrices, "attn_o", shape.hidden, q);
    layer.gate = matrix_of(matrices, "mlp_gate", shape.intermediate, shape.hidden);
    layer.up = matrix_of(matrices, "mlp_up", shape.intermediate, shape.hidden);
    layer.down = matrix_of(matrices, "mlp_down", shape.hidden, shape.intermediate);
    require(layer.q->type() == layer.k->type() && layer.q->type() == layer.v->type() &&
                layer.gate->type() == layer.up->type(),
            "matrices that read the same activations must have one type");
    return layer;
}

Relay relay_of(const Shape& shape, const nb::dict& matrices, const nb::dict& vectors) {
    const size_t size = nb::cast<std::shared_ptr<Matrix>>(matrices["written"])->in();
    require(vectors.contains("embed_norm"), "a relay lacks the norm of the embedding");
    require(matrices.contains("tell"), "a relay lacks the matrix tell");
    const size_t inner = nb::cast<std::shared_ptr<Matrix>>(matrices["tell"])->in();
    return {size, inner, vector_of(vectors["embed_norm"], shape.hidden, "embed_norm"),
            matrix_of(matrices, "place", 2 * inner, 2 * shape.hidden),
            matrix_of(matrices, "known", 2 * inner, shape.hidden + size), matrix_of(matrices, "tell", size, inner),
            matrix_of(matrices, "written", shape.head_size, size)};
}

void check_shape(const Shape& s) {
    for (size_t n : {s.vocab, s.hidden, s.intermediate, s.num_layers, s.num_heads, s.num_kv_heads, s.head_dim})
        require(0 < n && n <= kMostSide, "every size of a model is between 1 and 2**24");
    require(s.num_heads % s.num_kv_heads == 0 && s.head_dim % 2 == 0, "the heads do not fit each other");
    require(s.num_heads * s.head_dim <= kMostSide, "the heads are too large");
}

// Give each layer its window and its row of the RoPE frequencies; none of either: the first row, and no window.
void set_places(std::vector<Layer>& layers, const std::vector<size_t>& windows, const std::vector<size_t>& ropes,
                size_t num_ropes) {
    require(windows.size() == ropes.size() && (windows.empty() || windows.size() == layers.size()),
            "every layer needs a window and a RoPE");
    for (size_t i = 0; i < windows.size(); ++i) {
        require(windows[i] <= kMostSide && ropes[i] < num_ropes, "a window or a RoPE out of bounds");
        layers[i].window = windows[i], layers[i].rope = ropes[i];
    }
}

// The target's id of each of the head's rows.
std::vector<uint32_t> checked_ids(const Array<int64_t>& ids, const Shape& shape) {
    require(ids.size() == shape.head_size, "every row of the head needs its token id");
    for (size_t i = 0; i < ids.size(); ++i)
        require(0 <= ids.data()[i] && static_cast<size_t>(ids.data()[i]) < shape.vocab, "token ids must lie in the vocabulary");
    return {ids.data(), ids.data() + ids.size()};
}

Decoder make_decoder(Shape shape, const std::shared_ptr<Team>& team, const std::shared_ptr<Matrix>& embed,
                     const std::shared_ptr<Matrix>& head, const Array<float>& final_norm,
                     const Table<float>& inverse_frequencies, const nb::list& layers,
                     const std::vector<size_t>& windows, const std::vector<size_t>& ropes,
                     const nb::dict& fusing_matrices, const nb::dict& fusing_vectors, const nb::dict& relay_matrices,
                     const nb::dict& relay_vectors, const std::optional<Array<int64_t>>& token_ids) {
    check_shape(shape);
    require(embed->out() == shape.vocab && embed->in() == shape.hidden, "the wrong shape of the embedding");
    require(head->in() == shape.hidden, "the wrong shape of the head");
    shape.head_size = head->out();
    require(layers.size() == shape.num_layers, "the wrong number of layers");
    require(inverse_frequencies.shape(0) > 0 && inverse_frequencies.shape(1) == shape.head_dim / 2,
            "the wrong shape of inverse_frequencies");
    const bool fused = fusing_matrices.contains("fc");
    require(final_norm.size() > 0 || fused, "only a model that fuses features can do without the last norm");
    Weights weights;
    weights.embed = embed, weights.head = head;
    weights.inverse_frequencies.assign(inverse_frequencies.data(), inverse_frequencies.data() + inverse_frequencies.size());
    if (final_norm.size() > 0) weights.final_norm = vector_of(nb::cast(final_norm), shape.hidden, "final_norm");
    if (fused) weights.fuse = matrix_of(fusing_matrices, "fc", shape.hidden, 2 * shape.hidden);
    weights.fuse_bias = maybe_vector(fusing_vectors, "fc_bias", shape.hidden);
    weights.embed_norm = maybe_vector(fusing_vectors, "embed_norm", shape.hidden);
    if (relay_matrices.contains("written")) weights.relay = relay_of(shape, relay_matrices, relay_vectors);
    if (token_ids) weights.token_ids = checked_ids(*token_ids, shape);
    for (nb::handle layer : layers) {
        const auto parts = nb::cast<nb::tuple>(layer);
        require(parts.size() == 2, "a layer is a pair of matrices and vectors");
        weights.layers.push_back(layer_of(shape, nb::cast<nb::dict>(parts[0]), nb::cast<nb::dict>(parts[1]),
                                          weights.layers.empty(), fused));
    }
    set_places(weights.layers, windows, ropes, inverse_frequencies.shape(0));
    shape.reads_features = fused || !weights.layers[0].feature_norm.empty();
    return Decoder(shape, std::move(weights), team);
}

// The pass ---------------------------------------------------------------------------------------

template <class T>
using Out = nb::ndarray<T, nb::c_contig, nb::device::cpu>;

void check_kv(const Shape& shape, const KVStore& kv, size_t num_layers) {
    require(kv.num_kv_heads() == shape.num_kv_heads && kv.head_dim() == shape.head_dim,
            "the KV store belongs to another model");
    require(num_layers <= shape.num_layers && num_layers <= kv.num_layers(), "the store has too few layers");
}

void check_tokens(const Shape& shape, const KVStore& kv, const Pass& pass) {
    const auto below = [](int64_t value, size_t end) { return value >= 0 && static_cast<size_t>(value) < end; };
    for (size_t t = 0; t < pass.num_tokens; ++t) {
        require(below(pass.token_ids[t], shape.vocab), "a token id lies outside the vocabulary");
        require(below(pass.slots[t], kv.num_pages() * kPageTokens), "a slot lies outside the KV store");
        require(below(pass.positions[t], pass.max_pages * kPageTokens), "a position lies beyond its row's pages");
    }
    require(pass.cu_len[0] == 0 && pass.cu_len[pass.num_rows] == static_cast<int64_t>(pass.num_tokens),
            "cu_len must lead from 0 to the number of tokens");
    for (size_t row = 0; row < pass.num_rows; ++row) {
        require(pass.cu_len[row] <= pass.cu_len[row + 1] && below(pass.cu_len[row + 1], pass.num_tokens + 1),
                "cu_len must not fall");  // both ends bounded before a position is read: it starts from 0
        require(pass.first_keys[row] >= 0 && (pass.cu_len[row] == pass.cu_len[row + 1] ||
                                              pass.first_keys[row] <= pass.positions[pass.cu_len[row]]),
                "a row's first key must not lie behind its tokens");
        for (int64_t t = pass.cu_len[row] + 1; t < pass.cu_len[row + 1]; ++t)
            require(pass.positions[t] == pass.positions[t - 1] + 1, "a row's tokens must have consecutive positions");
    }
    for (size_t i = 0; i < pass.num_rows * pass.max_pages; ++i)
        require(below(pass.pages[i], kv.num_pages()), "a page lies outside the KV store");
    for (int64_t token : pass.wanted) require(below(token, pass.num_tokens), "a wanted token is not in the pass");
}

// From arrays with one entry for each wanted token, edits one after another.
void choose_list(ChooseList* self, const Array<uint8_t>& kinds, const Array<double>& temperatures, const Table<double>& filters,
                 const Table<uint32_t>& keys, const Array<int64_t>& edit_offsets, const Array<int64_t>& edit_ids,
                 const Array<float>& edit_scale, const Array<float>& edit_add) {
    const size_t num_wanted = kinds.size();
    require(temperatures.size() == num_wanted && filters.shape(0) == num_wanted && filters.shape(1) == 3 &&
                keys.shape(0) == num_wanted && keys.shape(1) == 2 && edit_offsets.size() == num_wanted + 1,
            "every wanted token needs a kind, a temperature, filters, a key and edits");
    checked_edits(edit_ids, edit_scale, edit_add, kMostTokens);
    const int64_t* offsets = edit_offsets.data();
    const auto num_edits = static_cast<int64_t>(edit_ids.size());
    ChooseList list;
    for (size_t i = 0; i < num_wanted; ++i) {
        require(kinds.data()[i] <= 3, "a kind is 0, 1, 2 or 3");
        require(0 <= offsets[i] && offsets[i] <= offsets[i + 1] && offsets[i + 1] <= num_edits, "edit offsets must rise");
        const Edits edits{edit_ids.data() + offsets[i], edit_scale.data() + offsets[i], edit_add.data() + offsets[i],
                          static_cast<size_t>(offsets[i + 1] - offsets[i])};
        const double* filter = filters.data() + 3 * i;
        require(0 <= filter[0] && filter[0] < kMostTokens, "top_k lies out of bounds");
        list.all.push_back({static_cast<Kind>(kinds.data()[i]), temperatures.data()[i],
                            {static_cast<int64_t>(filter[0]), filter[1], filter[2]},
                            {keys.data()[2 * i], keys.data()[2 * i + 1]}, edits});
    }
    list.kept = {nb::ndarray<>(edit_ids), nb::ndarray<>(edit_scale), nb::ndarray<>(edit_add)};
    new (self) ChooseList(std::move(list));
}

// What a pass reads, as arrays.
struct PassArrays {
    Array<int64_t> token_ids, positions, slots, cu_len;
    Table<int64_t> pages;
    Array<int64_t> first_keys;
    Table<float> features;
    Array<int64_t> wanted;
};

Pass checked_pass(const Shape& shape, const KVStore& kv, const PassArrays& read, size_t vocab, size_t num_layers) {
    check_kv(shape, kv, num_layers);
    const size_t num_tokens = read.token_ids.size(), num_rows = read.pages.shape(0);
    require(0 < vocab && vocab <= shape.head_size, "the model has fewer token ids");
    require(read.positions.size() == num_tokens && read.slots.size() == num_tokens, "every token needs a position and a slot");
    require(read.cu_len.size() >= 1 && num_rows == read.cu_len.size() - 1, "every row needs its pages");
    require(read.first_keys.size() == num_rows, "every row needs its first key");
    require(read.features.shape(0) == (shape.reads_features ? num_tokens : 0) && read.features.shape(1) == shape.hidden,
            "features have the wrong shape: one for every token of a model that reads them, none of another");
    Pass pass{num_tokens, num_rows, read.pages.shape(1), read.token_ids.data(), read.positions.data(), read.slots.data(),
              read.cu_len.data(), read.pages.data(), read.first_keys.data(), read.features.data(),
              {read.wanted.data(), read.wanted.data() + read.wanted.size()}, {}, vocab, num_layers, {}, nullptr, nullptr, nullptr};
    check_tokens(shape, kv, pass);
    return pass;
}

// What a pass writes, as arrays.
struct ChosenArrays {
    Out<float> taps;
    Out<int64_t> chosen;
    Out<float> logits, margins;
};

Pass whole_pass(const Decoder& decoder, const KVStore& kv, const PassArrays& read, const ChooseList& chooses, size_t vocab,
                size_t num_layers, const std::vector<size_t>& tap_layers, const ChosenArrays& out) {
    const Shape& shape = decoder.shape();
    Pass pass = checked_pass(shape, kv, read, vocab, num_layers);
    const size_t num_wanted = pass.wanted.size(), num_tokens = pass.num_tokens;
    pass.chooses = chooses.checked(num_wanted, decoder.maps_ids() ? shape.vocab : vocab);
    const size_t num_logit_rows = chooses.num_logit_rows();
    require(out.chosen.size() == num_wanted && out.logits.size() == num_logit_rows * vocab, "the outputs have the wrong size");
    require(out.margins.size() == 0 || out.margins.size() == num_wanted, "a margin for every wanted token, or none");
    require(out.taps.size() == tap_layers.size() * num_tokens * shape.hidden, "the taps have the wrong size");
    for (size_t i = 0; i < tap_layers.size(); ++i) {
        require(tap_layers[i] <= num_layers, "a tap beyond the layers that run");
        pass.taps.emplace_back(tap_layers[i], out.taps.data() + i * num_tokens * shape.hidden);
    }
    std::fill_n(out.margins.data(), out.margins.size(), NAN);
    pass.chosen = out.chosen.data(), pass.logits = out.logits.data();
    pass.margins = out.margins.size() ? out.margins.data() : nullptr;
    return pass;
}

void forward(Decoder& decoder, const KVStore& kv, const PassArrays& read, const ChooseList& chooses, size_t vocab,
             size_t num_layers, const std::vector<size_t>& tap_layers, const Out<float>& taps, const Out<int64_t>& chosen,
             const Out<float>& logits, const Out<float>& margins) {
    const Pass pass = whole_pass(decoder, kv, read, chooses, vocab, num_layers, tap_layers, {taps, chosen, logits, margins});
    nb::gil_scoped_release unlocked;
    if (pass.num_tokens > 0) decoder.forward(pass, kv);
}

// A pass that was begun, and all that it reads and writes: whoever drops it waits for its end.
struct Begun {
    nb::object decoder, kv, read, chooses;
    ChosenArrays out;

    Begun(nb::object decoder, nb::object kv, nb::object read, nb::object chooses, ChosenArrays out)
        : decoder(std::move(decoder)), kv(std::move(kv)), read(std::move(read)), chooses(std::move(chooses)), out(std::move(out)) {}
    Begun(Begun&&) = default;
    ~Begun() {
        if (decoder.is_valid()) nb::cast<Decoder&>(decoder).finish();
    }
};

Begun begin(nb::object decoder, nb::object kv, nb::object read, nb::object chooses, size_t vocab, size_t num_layers,
            const std::vector<size_t>& tap_layers, const Out<float>& taps, const Out<int64_t>& chosen, const Out<float>& logits,
            const Out<float>& margins) {
    Begun begun(std::move(decoder), std::move(kv), std::move(read), std::move(chooses), {taps, chosen, logits, margins});
    auto& itself = nb::cast<Decoder&>(begun.decoder);
    const auto& store = nb::cast<const KVStore&>(begun.kv);
    Pass pass = whole_pass(itself, store, nb::cast<const PassArrays&>(begun.read), nb::cast<const ChooseList&>(begun.chooses),
                           vocab, num_layers, tap_layers, begun.out);
    nb::gil_scoped_release unlocked;
    if (pass.num_tokens > 0) itself.begin(std::move(pass), store);
    return begun;
}

void check_turns(const Pass& pass, const Turns& turns, bool relayed) {
    require(turns.depths.size() == pass.num_rows, "every row needs its depth");
    require(turns.pointers.size() == pass.num_rows, "every row needs its pointer, or none in its place");
    size_t at = 0;
    for (size_t row = 0; row < pass.num_rows; ++row) {
        const int64_t end = pass.cu_len[row + 1], depth = turns.depths[row], num_wanted = relayed ? depth : 1;
        require(1 <= depth && num_wanted <= end - pass.cu_len[row], "a row is one deep at least, with a place for each guess");
        for (int64_t i = end - num_wanted; i < end; ++i)
            require(at < pass.wanted.size() && pass.wanted[at++] == i, "the wanted tokens are the last of their rows");
        const auto reach = static_cast<int64_t>(pass.max_pages * kPageTokens) - pass.positions[end - 1];
        require(relayed || depth <= reach, "a row goes on beyond its pages");
    }
    require(at == pass.wanted.size(), "every wanted token is a row's");
    require(std::none_of(turns.chooses.begin(), turns.chooses.end(), [](const Choose& c) { return c.kind == Kind::logits; }),
            "passes in turn choose every token themselves");
}

void forward_in_turn(Decoder& decoder, const KVStore& kv, const PassArrays& read, const ChooseList& chooses,
                     size_t vocab, size_t num_layers, const std::vector<int64_t>& depths, const Table<double>& stops,
                     const std::vector<const Pointer*>& pointers, const Out<int64_t>& chosen, const Out<float>& margins) {
    const Pass pass = checked_pass(decoder.shape(), kv, read, vocab, num_layers);
    const size_t num_ids = decoder.maps_ids() ? decoder.shape().vocab : vocab;
    Turns turns{depths, stops.shape(0) ? stops.data() : nullptr, chooses.checked(chosen.size(), num_ids), pointers, num_ids,
                chosen.data(), margins.data()};
    const bool relayed = decoder.relays().size > 0;
    check_turns(pass, turns, relayed);
    size_t num_chosen = 0;
    for (int64_t depth : depths) num_chosen += static_cast<size_t>(depth);
    require(stops.shape(1) == 3 && (!stops.shape(0) || stops.shape(0) == num_chosen), "the stops have the wrong shape");
    require(chosen.size() == num_chosen && margins.size() == num_chosen, "the outputs have the wrong size");
    std::fill_n(chosen.data(), num_chosen, kUnchosen);
    std::fill_n(margins.data(), num_chosen, NAN);
    nb::gil_scoped_release unlocked;
    relayed ? run_relayed(decoder, pass, turns, kv) : run_in_turn(decoder, pass, turns, kv);
}

// One place of guesses, see `Place`; without token_ids only what the first ones tell is computed.
void relay(Decoder& decoder, const Table<float>& first, const Table<float>& normed, const Array<int64_t>& token_ids,
           const Table<float>& before, const ChooseList& chooses, size_t vocab, const Out<int64_t>& chosen,
           const Out<float>& logits, const Out<float>& margins, const Out<float>& told) {
    const Shape& shape = decoder.shape();
    const size_t n = normed.shape(0), size = decoder.relays().size, num_known = token_ids.size();
    require(size > 0, "this decoder has no relay");
    for (const auto* states : {&first, &normed})
        require(n > 0 && states->shape(0) == n && states->shape(1) == shape.hidden, "states have the wrong shape");
    require(told.size() == n * size, "what is told has the wrong shape");
    require(num_known == 0 || num_known == n, "every guess but the first ones has one before it");
    require(before.shape(0) == num_known && before.shape(1) == size, "what was told before has the wrong shape");
    require(0 < vocab && vocab <= shape.head_size, "the model has fewer token ids");
    Pass pass{};
    pass.vocab = vocab;
    pass.chooses = chooses.checked(num_known, decoder.maps_ids() ? shape.vocab : vocab);
    require(chosen.size() == num_known && margins.size() == num_known && logits.size() == chooses.num_logit_rows() * vocab,
            "the outputs have the wrong size");
    Place place{n, num_known ? token_ids.data() : nullptr, before.data(), {}, {}, {}, told.data()};
    std::vector<const float*> firsts;
    for (size_t i = 0; i < n; ++i) {
        firsts.push_back(first.data() + i * shape.hidden);
        place.normed.push_back(normed.data() + i * shape.hidden);
    }
    for (size_t i = 0; i < num_known; ++i) {
        const int64_t token = token_ids.data()[i];
        require(0 <= token && static_cast<size_t>(token) < shape.vocab, "a token id lies outside the vocabulary");
        pass.wanted.push_back(static_cast<int64_t>(i));
    }
    std::fill_n(margins.data(), num_known, NAN);
    pass.chosen = chosen.data(), pass.logits = logits.data(), pass.margins = margins.data();
    nb::gil_scoped_release unlocked;
    Lines<float> sums;
    decoder.relay_places(firsts, place.normed, sums);
    for (size_t i = 0; i < n; ++i) place.sums.push_back(&sums[i * round_up(2 * decoder.relays().inner, kPanel)]);
    decoder.relay(place, pass);
}

void multiply(Team& team, const Matrix& matrix, const Table<float>& x, const Out<float>& out) {
    const size_t num_rows = x.shape(0), width = matrix.in(), stride = round_up(matrix.out(), kPanel);
    require(x.shape(1) == width && out.size() == num_rows * matrix.out(), "the rows do not fit the matrix");
    nb::gil_scoped_release unlocked;
    Activations rows;
    rows.reserve(num_rows, width);
    Lines<float> padded(round_up(width, kInt8Group)), found(num_rows * stride);
    for (size_t row = 0; row < num_rows; ++row) {
        std::copy_n(x.data() + row * width, width, padded.data());
        rows.set(row, padded.data(), matrix.type(), width);
    }
    team.run([&](size_t) { multiply_all(team, {{&matrix, &rows, found.data(), stride, nullptr}}, num_rows); });
    for (size_t row = 0; row < num_rows; ++row)
        std::copy_n(&found[row * stride], matrix.out(), out.data() + row * matrix.out());
}

void fuse_states(Team& team, const Matrix& fc, const Table<float>& states, const Table<float>& norms, float eps,
                 const Out<float>& features) {
    require(states.shape(1) == fc.in() && features.size() == states.shape(0) * fc.out(), "the states do not fit the matrix");
    require(norms.shape(0) == 0 || norms.shape(0) * norms.shape(1) == fc.in(), "the norms do not fit the states");
    nb::gil_scoped_release unlocked;
    fuse(team, {&fc, norms.data(), norms.shape(0), eps}, states.data(), states.shape(0), features.data());
}

void bind_measures(nb::module_& m) {
    constexpr size_t kMostBytes = size_t{1} << 34;
    m.def("read_bandwidth", [](Team& team, size_t bytes) {
        require(bytes <= kMostBytes, "at most 16 GiB are read");
        nb::gil_scoped_release unlocked;
        return read_bandwidth(team, bytes);
    }, "team"_a, "bytes"_a);
    m.def("dot_peak", [](Team& team) {
        nb::gil_scoped_release unlocked;
        return dot_peak(team);
    }, "team"_a);
    m.def("time_products", [](Team& team, const std::vector<std::shared_ptr<Matrix>>& matrices, size_t num_tokens,
                              size_t repeats) {
        require(!matrices.empty() && 0 < num_tokens && num_tokens <= 1 << 16 && repeats <= 1 << 16, "nothing to time");
        nb::gil_scoped_release unlocked;
        return time_products(team, matrices, num_tokens, repeats);
    }, "team"_a, "matrices"_a, "num_tokens"_a, "repeats"_a);
}

void bind_decoder(nb::module_& m) {
    nb::class_<Team>(m, "Team").def("__init__", [](Team* self, size_t num_threads) {
        require(1 <= num_threads && num_threads <= 1024, "a team has 1 to 1024 threads");
        new (self) Team(num_threads);
    }, "num_threads"_a).def_prop_ro("num_threads", &Team::size);
    nb::class_<Matrix>(m, "Matrix")
        .def_prop_ro("num_bytes", &Matrix::bytes)
        .def("row", [](const Matrix& self, size_t index, const Out<float>& to) {
            require(index < self.out() && to.size() == self.in(), "no such row");
            self.row(index, to.data());
        }, "index"_a, "to"_a)
        .def("put_row", [](Matrix& self, size_t index, const Array<float>& weights) {
            require(index < self.out() && weights.size() == self.in(), "no such row");
            self.put_row(index, weights.data());
        }, "index"_a, "weights"_a.noconvert());
    m.def("pack", &pack, "weights"_a.noconvert(), "dtype"_a);
    m.def("pack_int4", &pack_int4, "values"_a.noconvert(), "scales"_a.noconvert(), "minima"_a.noconvert());
    m.def("multiply", &multiply, "team"_a, "matrix"_a, "x"_a.noconvert(), "out"_a.noconvert());
    m.def("fuse", &fuse_states, "team"_a, "fc"_a, "states"_a.noconvert(), "norms"_a.noconvert(), "eps"_a,
          "features"_a.noconvert());
    nb::class_<KVStore>(m, "KVStore")
        .def("__init__", [](KVStore* self, const std::string& type, size_t num_layers, size_t num_pages,
                            size_t num_kv_heads, size_t head_dim) {
            const KVType chosen = kv_type(type);
            require(head_dim <= 256 || chosen == KVType::f16 || chosen == KVType::f32,
                    "whole-number KV wants heads of at most 256 dimensions; f16 takes any");
            for (size_t n : {num_layers, num_kv_heads, head_dim}) require(0 < n && n <= kMostSide, "a size out of bounds");
            require(0 < num_pages && num_pages < size_t{1} << 40, "a KV store has at least one page");
            require(KVStore::fits(chosen, num_layers, num_pages, num_kv_heads, head_dim),
                    "a KV store of this many pages is larger than any memory");
            new (self) KVStore(chosen, num_layers, num_pages, num_kv_heads, head_dim);
        }, "dtype"_a, "num_layers"_a, "num_pages"_a, "num_kv_heads"_a, "head_dim"_a)
        .def_prop_ro("num_pages", &KVStore::num_pages)
        .def_prop_ro("bytes_per_token", &KVStore::bytes_per_token);
    nb::class_<PassArrays>(m, "Read")
        .def(nb::init<Array<int64_t>, Array<int64_t>, Array<int64_t>, Array<int64_t>, Table<int64_t>, Array<int64_t>, Table<float>,
                      Array<int64_t>>(),
             "token_ids"_a.noconvert(), "positions"_a.noconvert(), "slots"_a.noconvert(), "cu_len"_a.noconvert(),
             "pages"_a.noconvert(), "first_keys"_a.noconvert(), "features"_a.noconvert(), "wanted"_a.noconvert());
    nb::class_<ChooseList>(m, "Chooses")
        .def_prop_ro("num_logit_rows", &ChooseList::num_logit_rows)
        .def("told", &told)
        .def("__init__", &choose_list, "kinds"_a, "temperatures"_a, "filters"_a, "keys"_a, "edit_offsets"_a, "edit_ids"_a, "edit_scale"_a, "edit_add"_a);
    nb::class_<Begun>(m, "Begun");
    nb::class_<Decoder>(m, "Decoder")
        .def("__init__", [](Decoder* self, size_t vocab, size_t hidden, size_t intermediate, size_t num_heads,
                            size_t num_kv_heads, size_t head_dim, float norm_eps, const std::shared_ptr<Team>& team,
                            const std::shared_ptr<Matrix>& embed, const std::shared_ptr<Matrix>& head,
                            const Array<float>& final_norm, const Table<float>& inverse_frequencies,
                            const nb::list& layers, const std::vector<size_t>& windows,
                            const std::vector<size_t>& ropes, float query_scale, float embed_scale,
                            const std::string& gate, bool norms_residual, bool feeds_normed, const nb::dict& fusing_matrices,
                            const nb::dict& fusing_vectors, const nb::dict& relay_matrices, const nb::dict& relay_vectors,
                            const std::optional<Array<int64_t>>& token_ids) {
            Shape shape{vocab, hidden, intermediate, layers.size(), num_heads, num_kv_heads, head_dim, norm_eps,
                        query_scale, embed_scale, activation(gate)};
            shape.norms_residual = norms_residual, shape.feeds_normed = feeds_normed;
            require(std::isfinite(query_scale) && std::isfinite(embed_scale), "a scale is not a finite number");
            new (self) Decoder(make_decoder(shape, team, embed, head, final_norm, inverse_frequencies, layers, windows,
                                            ropes, fusing_matrices, fusing_vectors, relay_matrices, relay_vectors, token_ids));
        }, "vocab"_a, "hidden"_a, "intermediate"_a, "num_heads"_a, "num_kv_heads"_a, "head_dim"_a, "norm_eps"_a,
           "team"_a, "embed"_a, "head"_a, "final_norm"_a, "inverse_frequencies"_a, "layers"_a,
           "windows"_a, "ropes"_a, "query_scale"_a, "embed_scale"_a, "activation"_a, "norms_residual"_a = false,
           "feeds_normed"_a = false, "fusing_matrices"_a = nb::dict(), "fusing_vectors"_a = nb::dict(),
           "relay_matrices"_a = nb::dict(), "relay_vectors"_a = nb::dict(), "token_ids"_a = nb::none())
        .def_prop_ro("vocab", [](const Decoder& self) { return self.shape().vocab; })
        .def_prop_ro("maps_ids", &Decoder::maps_ids)
        .def_prop_ro("relay_size", [](const Decoder& self) { return self.relays().size; })
        .def_prop_ro("hidden", [](const Decoder& self) { return self.shape().hidden; })
        .def_prop_ro("weight_bytes", &Decoder::weight_bytes)
        .def("set_token_id", [](Decoder& self, size_t index, size_t id) {
            require(self.maps_ids() && index < self.shape().head_size && id < self.shape().vocab, "no such row or token");
            self.set_token_id(index, static_cast<uint32_t>(id));
        }, "index"_a, "token_id"_a)
        .def("forward", &forward, "kv"_a, "read"_a, "chooses"_a, "vocab"_a, "num_layers"_a, "tap_layers"_a,
             "taps"_a.noconvert(), "chosen"_a.noconvert(), "logits"_a.noconvert(), "margins"_a.noconvert())
        .def("begin", &begin, "kv"_a, "read"_a, "chooses"_a, "vocab"_a, "num_layers"_a, "tap_layers"_a, "taps"_a.noconvert(),
             "chosen"_a.noconvert(), "logits"_a.noconvert(), "margins"_a.noconvert())
        .def("finish", &Decoder::finish, nb::call_guard<nb::gil_scoped_release>())
        .def("forward_in_turn", &forward_in_turn, "kv"_a, "read"_a, "chooses"_a, "vocab"_a, "num_layers"_a, "depths"_a,
             "stops"_a.noconvert(), "pointers"_a, "chosen"_a.noconvert(), "margins"_a.noconvert())
        .def("relay", &relay, "first"_a.noconvert(), "normed"_a.noconvert(), "token_ids"_a.noconvert(),
             "before"_a.noconvert(), "chooses"_a, "vocab"_a, "chosen"_a.noconvert(), "logits"_a.noconvert(),
             "margins"_a.noconvert(), "told"_a.noconvert());
}

}  // namespace
}  // namespace paceline

NB_MODULE(_ext, m) {
    m.doc() = "Native kernels of Paceline.";
    nb::set_leak_warnings(false);  // caches of a process keep models until it ends
    paceline::bind_sampling<float>(m);
    paceline::bind_sampling<double>(m);
    paceline::bind_decoder(m);
    paceline::bind_control(m);
    paceline::bind_costs(m);
    paceline::bind_rounds(m);
    paceline::bind_lookup(m);
    paceline::bind_rows(m);
    paceline::bind_measures(m);
    m.def("gumbel", [](uint32_t k0, uint32_t k1, uint32_t id) { return paceline::gumbel({k0, k1}, id); }, "k0"_a,
          "k1"_a, "id"_a);
    m.def("isa", [] { return paceline::kernels().name; }, "The instruction set in use.");
}
