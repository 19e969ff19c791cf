// The sizes and weights of a Llama-family decoder.
#pragma once

#include <memory>
#include <vector>

#include "model/experts.h"
#include "model/kv_store.h"
#include "model/matrix.h"

namespace paceline {

enum class Activation { silu, gelu_tanh, clamped_silu };

struct Shape {
    size_t vocab, hidden;
    size_t intermediate;  // of the widest layer, as the next two
    size_t num_layers, num_heads, kv_size, head_dim;  // of one rank
    float norm_eps;
    float query_scale;         // multiplies attention scores
    float embed_scale = 1.0f;  // multiplies embeddings
    Activation activation = Activation::silu;
    float residual_scale = 1.0f;                 // multiplies what a block adds to the residual stream
    float score_cap = 0.0f, logit_cap = 0.0f;    // scores and logits become cap * tanh(x / cap); 0: they stay
    float query_growth = 0.0f, query_context = 1.0f;  // queries are multiplied by 1 + growth * log(1 + floor(position / context))
    size_t head_size = 0;         // rows of the LM head: `vocab`, or a draft vocabulary
    bool reads_features = false;  // a draft head, which reads a feature beside each token
    size_t num_ranks = 1;         // processes that share the layers: each has its rows of every matrix, and its heads
    bool norms_residual = false;  // the residual stream of a draft head starts from the normed feature
    size_t experts_per_token = 0;
    Routing routing{};
    bool reads_rows = false;   // a block head: tokens attend to all of their row, and only context has features
    bool feeds_normed = false;    // the feature of the next draft pass is the last hidden state after `final_norm`
};

struct Layer {
    size_t window = 0;  // tokens that a token attends to, itself included; 0: all
    size_t rope = 0;    // row of `Weights::inverse_frequencies`
    HeadShape heads;
    size_t kv = 0;        // layer of a store whose keys and values it reads; it writes there if it has a matrix `k`
    size_t tiling = 0;    // index of its tiling in the scratch: layers with the same heads share one
    float scale = 1.0f;   // multiplies the residual stream behind the layer
    std::vector<float> v_norm;  // [head_dim], or empty
    std::vector<float> attn_norm, mlp_norm;            // attn_norm empty: the layer reads its input as it is
    std::vector<float> attn_post_norm, mlp_post_norm;  // norms of a block's output, or empty
    std::vector<float> feature_norm;                   // of an EAGLE layer, which reads [normed token, normed feature]; or empty
    std::vector<float> sinks;                          // [num_heads] score of a key without a value, which every token sees; or empty
    std::vector<float> q_norm, k_norm;                 // [head_dim], or empty
    std::vector<float> all_q_norm, all_k_norm;         // of all heads together, or empty
    std::vector<float> q_bias, k_bias, v_bias, o_bias, gate_bias, up_bias, down_bias;  // or empty
    std::shared_ptr<const Matrix> q, k, v, o, gate, up, down;  // with experts the last three are those of the shared one, or null
    std::shared_ptr<const Mixture> mixture;                    // experts, or null
    std::shared_ptr<const Matrix> input_gate, input_out;       // [size, hidden], [hidden, size] of its own input, or null
    std::vector<float> input_post_norm;

    WeightType feed_type() const { return (gate ? gate : mixture->experts[0].gate)->type(); }
};

// Corrects each guess of a block head by the guess before, see `correction` in backend/reference/block_head.py.
struct Corrector {
    size_t rank = 0;                         // numbers of a token's row; 0: nothing is corrected
    size_t state_size = 0;                   // numbers handed from guess to guess: `rank` or 0
    std::shared_ptr<const Matrix> before;    // [vocab, rank] a row of each token before
    std::shared_ptr<const Matrix> mix;       // [rank, hidden + rank], with a state [3 * rank, 2 * rank + hidden], or null
    std::vector<float> mix_bias;
    std::shared_ptr<const Matrix> out;       // [head_size, rank] turns it into logits
    std::vector<float> confidence;           // [hidden], [hidden + rank] with the token's row, or empty
    float confidence_bias = 0.0f;
};

// Makes a token's layer inputs, `size` numbers for each layer, of a table's row and a projection of the token's embedding.
struct LayerInputs {
    std::shared_ptr<const Matrix> embed, project;  // [vocab, num_layers * size], [num_layers * size, hidden], or null
    std::vector<float> norm;                       // [size] of each projection
};

struct Weights {
    std::shared_ptr<const Matrix> embed, head;  // the same object where tied; null at ranks other than 0
    std::vector<float> final_norm;              // [hidden], or empty
    std::vector<float> inverse_frequencies;     // [num_ropes, head_dim / 2], zeros behind those of smaller heads
    std::vector<float> magnitudes;              // [num_ropes, head_dim / 2] factors of cosines and sines
    std::vector<Layer> layers;
    std::shared_ptr<const Matrix> fuse;        // [hidden, 2 * hidden] from embedding and feature to the first layer's input, or null
    std::vector<float> fuse_bias, embed_norm, feature_norm;  // bias of `fuse`, norms of what it reads: [hidden], or empty
    std::vector<uint32_t> token_ids;           // of the head's rows; empty: row numbers are token ids
    Corrector corrector;
    LayerInputs inputs;
};

}  // namespace paceline
