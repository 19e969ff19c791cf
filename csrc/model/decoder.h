// A Llama-family decoder over paged keys and values: one call per forward pass, the choice of tokens included.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "base/zero_pages.h"
#include "model/matrix.h"
#include "model/sampling.h"
#include "base/thread_pool.h"

namespace paceline {

enum class KVType { i16, i8, f16, f32 };
enum class Activation { silu, gelu };  // gelu by its tanh

struct Shape {
    size_t vocab, hidden, intermediate, num_layers, num_heads, num_kv_heads, head_dim;
    float norm_eps;
    float query_scale;        // what scores of attention are multiplied by
    float embed_scale = 1.0f;  // and embeddings
    Activation activation = Activation::silu;
    size_t head_size = 0;         // tokens the head chooses among: `vocab`, or a vocabulary of its own
    bool reads_features = false;  // a feature comes beside each token: see `Weights::fuse` and `Layer::feature_norm`
    bool norms_residual = false;  // the first layer goes on from the normed feature
    bool feeds_normed = false;    // of passes in turn, the next reads the last hidden state as the head does
};

struct Layer {
    size_t window = 0;  // how many tokens each token sees, its own included; 0: all
    size_t rope = 0;    // which row of `Weights::inverse_frequencies`
    std::vector<float> attn_norm, mlp_norm;            // the first one empty: the layer reads its input as it is
    std::vector<float> attn_post_norm, mlp_post_norm;  // of what a block adds to the residual stream, or empty
    std::vector<float> feature_norm;            // of a first layer that itself reads features, twice the width in all
    std::vector<float> q_norm, k_norm;          // [head_dim], or empty
    std::vector<float> q_bias, k_bias, v_bias;  // or empty; so are the next
    std::vector<float> o_bias, gate_bias, up_bias, down_bias;
    std::shared_ptr<const Matrix> q, k, v, o, gate, up, down;
};

// What tells each guess of a head that makes all of them in one pass of those before it: `relay` in backend/reference/head_layers.py.
struct Relay {
    size_t size = 0, inner = 0;             // numbers that are told, and of the gate they come from; 0: there is none
    std::vector<float> embed_norm;          // [hidden]
    std::shared_ptr<const Matrix> place;    // [2 * inner, 2 * hidden] of the row's first place and a guess' own
    std::shared_ptr<const Matrix> known;    // [2 * inner, hidden + size] of the guess before and what that was told
    std::shared_ptr<const Matrix> tell;     // [size, inner]
    std::shared_ptr<const Matrix> written;  // [head_size, size] the head times what is told
};

struct Weights {
    std::shared_ptr<const Matrix> embed, head;  // one and the same where tied
    std::vector<float> final_norm;              // [hidden], or empty: there is none
    std::vector<float> inverse_frequencies;     // [num_ropes, head_dim / 2]
    std::vector<Layer> layers;
    std::shared_ptr<const Matrix> fuse;         // from embedding and feature to what the layers begin with, or null
    std::vector<float> fuse_bias, embed_norm;   // of it and of the embedding it reads, [hidden], or empty
    std::vector<uint32_t> token_ids;            // of the head's rows; empty: they are the rows' numbers
    Relay relay;
};

// Keys and values of some layers, by page. Memory is taken only as pages are written.
class KVStore {
  public:
    KVStore(KVType type, size_t num_layers, size_t num_pages, size_t num_kv_heads, size_t head_dim);
    // Whether the bytes of such a store can be counted: what wraps around would be allocated too small.
    static bool fits(KVType type, size_t num_layers, size_t num_pages, size_t num_kv_heads, size_t head_dim);
    KVStore(KVStore&&) = default;
    KVStore(const KVStore&) = delete;

    size_t num_layers() const { return layers_.size(); }
    size_t num_pages() const { return num_pages_; }
    size_t num_kv_heads() const { return num_kv_heads_; }
    size_t head_dim() const { return head_dim_; }
    size_t padded_dim() const { return round_up(head_dim_, kPageTokens); }
    size_t bytes_per_token() const;
    const KVKernels& kernels() const { return kernels_of(type_); }
    void* keys(size_t layer) const { return layers_[layer].first.get(); }
    void* values(size_t layer) const { return layers_[layer].second.get(); }
    // Bytes from the start of a layer's keys or values to a head's part of a page.
    size_t place(size_t page, size_t kv_head) const {
        return (page * num_kv_heads_ + kv_head) * kernels().page_bytes(padded_dim());
    }

  private:
    static const KVKernels& kernels_of(KVType type);

    KVType type_;
    size_t num_pages_, num_kv_heads_, head_dim_;
    std::vector<std::pair<Lazy, Lazy>> layers_;
};

enum class Kind : uint8_t { argmax = 0, noisy = 1, logits = 2, sampled = 3 };  // the last two hand out their logits

// How a token is chosen, see core/nouns.py.
struct Choose {
    Kind kind;
    double temperature;
    Filters filters;
    Key key;
    Edits edits;  // ids ascending

    bool wants_logits() const { return kind == Kind::logits || kind == Kind::sampled; }
};

// Token rows of one pass, see backend/packed.py. All of it checked at the border.
struct Pass {
    size_t num_tokens, num_rows, max_pages;
    const int64_t *token_ids, *positions, *slots;  // [num_tokens]
    const int64_t* cu_len;                         // [num_rows + 1]
    const int64_t* pages;                          // [num_rows, max_pages]
    const int64_t* first_keys;                     // [num_rows] the first position that a row's tokens see
    const float* features;                         // [num_tokens, hidden], if the first layer reads them
    std::vector<int64_t> wanted;                   // indices of tokens whose successor is chosen
    std::vector<Choose> chooses;                   // [wanted]
    size_t vocab;                                  // token ids to choose among, the first of the head's
    size_t num_layers;
    std::vector<std::pair<size_t, float*>> taps;  // after so many layers, to [num_tokens, hidden]
    int64_t* chosen;                              // [wanted] out: token ids, kBroken, or kUnchosen
    float* logits;                                // [wanted with logits, vocab] out
    float* margins;  // [wanted] out: by how many logits the chosen token was ahead of the next; left alone where it is
                     // not known; null: not asked for
};

// One of the places that some rows' guesses are made at, once a pass has run over all of them. Checked at the border.
struct Place {
    size_t num_rows;
    const int64_t* token_ids;          // [num_rows] the guesses before; null: none, and the first ones are chosen already
    const float* before;               // [num_rows, Relay::size] what those were told
    std::vector<const float*> normed;  // [num_rows] -> [hidden] what the pass made of the place, as the head reads it
    std::vector<const float*> sums;    // [num_rows] -> [2 * Relay::inner] of `Decoder::relay_places`
    std::vector<const float*> logits;  // [num_rows] -> [vocab] the head's; empty: they are still to be computed
    float* told;                       // [num_rows, Relay::size] out
};

constexpr int64_t kUnchosen = -1;  // as core/nouns.py: left to the law

class Decoder {
  public:
    Decoder(const Shape& shape, Weights weights, std::shared_ptr<Team> team);
    Decoder(Decoder&&) = default;
    Decoder(const Decoder&) = delete;

    const Shape& shape() const { return shape_; }
    size_t weight_bytes() const;
    bool maps_ids() const { return !weights_.token_ids.empty(); }
    void set_token_id(size_t index, uint32_t id) { weights_.token_ids[index] = id; }  // of a row of the head
    const Relay& relays() const { return weights_.relay; }
    void forward(const Pass& pass, const KVStore& kv);
    // Begin a pass and return; it is over with `finish`, or when another begins. `kv` and what the pass points to stay.
    void begin(Pass pass, const KVStore& kv);
    void finish();
    // What the places of guesses mean to the relay, [num places, 2 * Relay::inner padded to 32]: first, normed -> [hidden] each.
    void relay_places(const std::vector<const float*>& first, const std::vector<const float*>& normed, Lines<float>& sums);
    // Tell a place's guesses of those before, and choose them: `pass` says how, for as many wanted tokens as there are rows.
    void relay(const Place& place, const Pass& pass);
    void norm_last(float* state) const;  // as the head reads it, [hidden]

  private:
    struct Scratch;
    struct Tile;
    struct Part;

    void run(const Pass& pass, const KVStore& kv, size_t thread);
    void start_token(const Pass& pass, size_t token);
    void next_layer(const Pass& pass, size_t index, size_t token);
    void add_delta(size_t token, const std::vector<float>& norm);
    void read_feature(const Pass& pass, size_t token, float* normed);
    void fuse_features(const Pass& pass, size_t thread);
    void store(const Pass& pass, const KVStore& kv, size_t index, size_t token, size_t kv_head);
    void turn(const float* head, const std::vector<float>& norm, size_t rope, size_t token, float scale, float* to) const;
    void attend(const Pass& pass, const KVStore& kv, size_t index, size_t thread);
    static size_t first_key(const Pass& pass, size_t row, size_t token, size_t window);
    static size_t first_of_tile(const Pass& pass, const Tile& tile, size_t window);
    static size_t num_before(const Pass& pass, const Tile& tile, size_t span);
    void gather_queries(const Pass& pass, const KVStore& kv, size_t index, const Tile& tile, size_t from,
                        size_t thread);
    void attend_span(const Pass& pass, const KVStore& kv, size_t index, const Tile& tile, size_t span, size_t from,
                     size_t thread, float* tops, float* totals, float* mixed);
    void finish_tile(const Tile& tile, const float* totals, const float* mixed);
    void run_relay(const Place& place, const Pass& pass, size_t thread);
    void choose(const Pass& pass, size_t thread);
    void choose_sampled(const Pass& pass, size_t index, size_t thread);
    template <class Fill>
    void choose_tiles(const Pass& pass, size_t thread, const Fill& fill);
    template <class Fill>
    void choose_tile(const Pass& pass, size_t tile, size_t thread, const Fill& fill);
    void plan(const Pass& pass, const KVStore& kv);
    void share_out_tiles(const Pass& pass, size_t num_queries, size_t dim);
    void plan_choices(const Pass& pass);
    void finish_choices(const Pass& pass);

    size_t num_angles() const { return weights_.inverse_frequencies.size(); }  // of a token

    Shape shape_;
    Weights weights_;
    std::shared_ptr<Team> team_;
    std::unique_ptr<Scratch, void (*)(Scratch*)> scratch_;
    std::optional<Pass> begun_;  // and not over
};

}  // namespace paceline
