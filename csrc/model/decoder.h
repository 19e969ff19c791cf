// A Llama-family decoder over paged keys and values: one call per forward pass, the choice of tokens included.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "base/aligned_vector.h"
#include "base/rank_memory.h"
#include "base/thread_pool.h"
#include "model/kv_store.h"
#include "model/model.h"
#include "model/pass.h"

namespace paceline {

class Decoder {
  public:
    // ranks: memory of the processes that share the layers, or null.
    Decoder(const Shape& shape, Weights weights, std::shared_ptr<ThreadPool> pool, std::shared_ptr<RankMemory> ranks = nullptr);
    Decoder(Decoder&&) = default;
    Decoder(const Decoder&) = delete;

    const Shape& shape() const { return shape_; }
    const Corrector& corrector() const { return weights_.corrector; }
    const std::vector<Layer>& layers() const { return weights_.layers; }
    size_t weight_bytes() const;
    bool follows() const { return ranks_ && ranks_->rank() > 0; }  // only rank 0 knows the tables, and which tokens are wanted
    bool maps_ids() const { return !weights_.token_ids.empty(); }
    void set_token_id(size_t row, uint32_t id) { weights_.token_ids[row] = id; }  // row: of the LM head

    void forward(const Pass& pass, const KVStore& kv);
    // Start a pass and return. It ends with `finish`, or when another pass starts. `kv` and the arrays of the pass must stay.
    void begin(Pass pass, const KVStore& kv);
    void finish();
    // Experts of the last pass that has ended, summed over layers: distinct experts of all tokens, then the mean number of distinct experts
    // of one token, of 2 neighbours, of 4, and so on. Layers that did not run count as the mean of those that did.
    std::vector<double> touched_experts() const;
    void norm_last(float* state) const;  // apply `final_norm` in place, [hidden]

    // For a block head: store keys and values of known tokens, made of the pass's features.
    void store_context(const Pass& pass, const KVStore& kv);
    // Choose the next guesses. `pass` holds the specs and outputs of its rows.
    void correct_step(const BlockStep& step, const Pass& pass);

  private:
    struct Scratch;
    struct Tile;
    struct Part;
    struct Tiling;
    // Write the logits of panels [panel, panel + num_panels) of the LM head, of wanted tokens first..end, to a tile.
    using FillTile = std::function<void(size_t panel, size_t num_panels, size_t first, size_t end, float* tile)>;

    // decoder.cpp
    void plan(const Pass& pass);
    void plan_pages(const Pass& pass);
    void expect_pages(const Pass& pass, const KVStore& kv, size_t layer, size_t thread);
    void run(const Pass& pass, const KVStore& kv, size_t thread);
    void gather(AlignedVector<float>& rows, size_t stride, size_t part, size_t count, size_t num_parts);
    bool run_attention(const Pass& pass, const KVStore& kv, size_t layer, size_t thread);
    void run_ffn(const Pass& pass, size_t layer, size_t thread);
    void run_dense(const Layer& layer, size_t num_tokens);
    void activate(float* gate, const float* up, size_t size, size_t stride) const;
    void start_token(const Pass& pass, size_t token);
    void turn(const Pass& pass, size_t token);
    void begin_layer(const Pass& pass, size_t layer, size_t token);
    void add_delta(size_t token, const std::vector<float>& norm);
    void read_feature(const Pass& pass, size_t token, float* normed);
    void fuse_features(const Pass& pass, size_t thread);
    void apply_rope(const Layer& layer, const float* head, const std::vector<float>& norm, size_t token, float scale, float* to) const;
    float query_scale(int64_t position) const;
    void store(const Pass& pass, const KVStore& kv, size_t layer, size_t token, size_t kv_head);
    void store_all(const Pass& pass, const KVStore& kv, size_t layer);
    bool only_stores(const Pass& pass, size_t layer) const;
    size_t num_angles() const { return weights_.inverse_frequencies.size(); }  // angles of a token
    // layer_inputs.cpp
    void plan_inputs(const Pass& pass);
    void make_inputs(const Pass& pass, size_t thread);
    void run_input(const Pass& pass, size_t layer, size_t thread);
    // experts.cpp
    void plan_experts(const Pass& pass);
    void route_token(const Mixture& mixture, size_t token, const float* normed);
    void run_experts(const Pass& pass, size_t layer);
    // tiling.cpp
    void plan_tiles(const Pass& pass);
    void plan_tiling(const Pass& pass, Tiling& tiling);
    void balance_tiles(const Pass& pass, Tiling& tiling, size_t num_queries);
    static size_t first_key(const Pass& pass, size_t row, size_t token, size_t window);
    static size_t first_of_tile(const Pass& pass, const Tile& tile, size_t window);
    static size_t num_before(const Pass& pass, const Tile& tile, size_t span);
    // attention.cpp
    void attend(const Pass& pass, const KVStore& kv, size_t layer, size_t thread);
    void attend_tiles(const Pass& pass, const KVStore& kv, size_t layer, size_t thread);
    void attend_parts(const Pass& pass, const KVStore& kv, size_t layer, size_t thread);
    template <class ResultOf>
    void merge_spans(const Pass& pass, const KVStore& kv, size_t layer, const Tile& tile, size_t thread, const ResultOf& result_of);
    void gather_queries(const Pass& pass, const KVStore& kv, size_t layer, const Tile& tile, size_t from, size_t thread);
    void attend_span(const Pass& pass, const KVStore& kv, size_t layer, const Tile& tile, size_t span, size_t from, size_t thread,
                     float* tops, float* totals, float* mixed);
    void finish_tile(const Tile& tile, const Layer& layer, const float* tops, const float* totals, const float* mixed);
    // lm_head.cpp
    void plan_choices(const Pass& pass);
    void choose(const Pass& pass, size_t thread);
    void choose_in_tiles(const Pass& pass, size_t thread, const FillTile& fill);
    void choose_in_tile(const Pass& pass, size_t tile, size_t thread, const FillTile& fill);
    void choose_sampled(const Pass& pass, size_t index, size_t thread);
    void finish_choices(const Pass& pass);
    // block.cpp
    void run_corrector(const BlockStep& step, const Pass& pass, size_t thread);
    void read_previous(const BlockStep& step, size_t index, float* row);
    void mix_previous(const BlockStep& step, size_t index, float* row);

    Shape shape_;
    Weights weights_;
    std::shared_ptr<ThreadPool> pool_;
    std::shared_ptr<RankMemory> ranks_;
    std::unique_ptr<Scratch, void (*)(Scratch*)> scratch_;
    std::optional<Pass> begun_;  // the pass that was begun and not finished
};

}  // namespace paceline
