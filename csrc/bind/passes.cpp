// Passes of a decoder: their inputs and outputs, checked.
#include <nanobind/stl/vector.h>

#include <cmath>

#include "bind/arrays.h"
#include "model/multistep.h"

namespace paceline {
namespace {

// See `Pass`.
struct PassInputs {
    Ids token_ids, positions, slots, cu_len;
    Table<int64_t> pages;
    Ids first_keys;
    Table<float> features;
    Ids wanted;
    Table<int64_t> copies;
    bool branched;
};

// See `Masks`.
struct MaskInputs {
    std::atomic_flag gate;  // set: open
    Table<int32_t> words;
    Array<uint8_t> masked;

    MaskInputs(Table<int32_t> words, Array<uint8_t> masked) : words(std::move(words)), masked(std::move(masked)) {}
    void open() {
        gate.test_and_set(std::memory_order_release);
        gate.notify_all();
    }
};

struct PassOutputs {
    Out<float> taps;
    Out<int64_t> chosen;
    Out<float> logits, margins;
};

size_t num_ids(const Decoder& decoder, size_t vocab) { return decoder.maps_ids() ? decoder.shape().vocab : vocab; }

void check_kv(const Decoder& decoder, const KVStore& kv, size_t num_layers) {
    require(num_layers <= decoder.shape().num_layers, "the model has fewer layers");
    for (size_t i = 0; i < num_layers; ++i) {
        const Layer& layer = decoder.layers()[i];
        require(layer.kv < kv.num_layers(), "the store has too few layers");
        require(kv.heads(layer.kv) == layer.heads, "the KV store belongs to another model");
    }
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
                "cu_len must not fall");  // both ends are bounded before a position is read: it starts from 0
        const bool empty = pass.cu_len[row] == pass.cu_len[row + 1];
        require(pass.first_keys[row] >= 0 && (empty || pass.first_keys[row] <= pass.positions[pass.cu_len[row]]),
                "a row's first key must not lie behind its tokens");
        for (int64_t t = pass.cu_len[row] + 1; t < pass.cu_len[row + 1]; ++t)
            require(pass.positions[t] == pass.positions[t - 1] + 1, "a row's tokens must have consecutive positions");
    }
    for (size_t i = 0; i < pass.num_rows * pass.max_pages; ++i)
        require(below(pass.pages[i], kv.num_pages()), "a page lies outside the KV store");
    for (int64_t token : pass.wanted) require(below(token, pass.num_tokens), "a wanted token is not in the pass");
    for (size_t i = 0; i < pass.num_copies; ++i)
        require(below(pass.copies[2 * i], pass.num_tokens) && below(pass.copies[2 * i + 1], kv.num_pages() * kPageTokens),
                "a copy is of no token, or outside the KV store");
}

// A pass without specs and outputs. reads_features: it has a feature for each token.
Pass checked_inputs(const Decoder& decoder, const KVStore& kv, const PassInputs& in, size_t vocab, size_t num_layers, bool reads_features) {
    const Shape& shape = decoder.shape();
    check_kv(decoder, kv, num_layers);
    const size_t num_tokens = in.token_ids.size(), num_rows = in.pages.shape(0);
    require(0 < vocab && vocab <= shape.head_size, "the model has fewer token ids");
    require(in.positions.size() == num_tokens && in.slots.size() == num_tokens, "every token needs a position and a slot");
    require(in.cu_len.size() >= 1 && num_rows == in.cu_len.size() - 1, "every row needs its pages");
    require(in.first_keys.size() == num_rows, "every row needs its first key");
    require(in.features.shape(0) == (reads_features ? num_tokens : 0) && in.features.shape(1) == shape.hidden,
            "features have the wrong shape: one for every token of a model that reads them, none of another");
    Pass pass{num_tokens, num_rows, in.pages.shape(1), in.token_ids.data(), in.positions.data(), in.slots.data(),
              in.cu_len.data(), in.pages.data(), in.first_keys.data(), in.features.data(),
              {in.wanted.data(), in.wanted.data() + in.wanted.size()}, {}, vocab, num_layers, {}, nullptr, nullptr, nullptr};
    pass.reads_rows = shape.reads_rows;
    require(in.copies.shape(1) == 2, "a copy is a token and a slot");
    pass.copies = in.copies.data(), pass.num_copies = in.copies.shape(0), pass.branched = in.branched;
    require(pass.branched || !pass.num_copies, "copies are for the rows of branches");
    check_tokens(shape, kv, pass);
    int64_t newest = 0;  // highest slot of rows' first tokens: branches and guesses may have pages behind all others
    for (size_t row = 0; row < num_rows; ++row)
        if (pass.cu_len[row] < pass.cu_len[row + 1]) newest = std::max(newest, pass.slots[pass.cu_len[row]]);
    kv.expect(static_cast<size_t>(newest) / kPageTokens + 1);
    return pass;
}

Masks checked_masks(const Decoder& decoder, const MaskInputs& masks, size_t num_wanted, size_t vocab) {
    require(!decoder.maps_ids(), "a draft vocabulary has no masks");
    require(masks.masked.size() == num_wanted && masks.words.shape(0) == num_wanted, "every wanted token has its place among the masks");
    require(masks.words.shape(1) * 32 >= vocab, "a mask needs a bit for each logit");
    return {&masks.gate, reinterpret_cast<const uint32_t*>(masks.words.data()), masks.masked.data(), masks.words.shape(1)};
}

Pass checked_pass(const Decoder& decoder, const KVStore& kv, const PassInputs& in, const SamplingSpecs& specs, size_t vocab,
                  size_t num_layers, const std::vector<size_t>& tap_layers, const PassOutputs& out, const MaskInputs* masks) {
    const size_t hidden = decoder.shape().hidden;
    require(!decoder.follows(), "rank 0 leads");
    Pass pass = checked_inputs(decoder, kv, in, vocab, num_layers, decoder.shape().reads_features);
    const size_t num_wanted = pass.wanted.size(), num_tokens = pass.num_tokens;
    pass.specs = specs.checked(num_wanted, num_ids(decoder, vocab));
    require(out.chosen.size() == num_wanted && out.logits.size() == specs.num_logit_rows() * vocab, "the outputs have the wrong size");
    require(out.margins.size() == 0 || out.margins.size() == num_wanted, "a margin for every wanted token, or none");
    require(out.taps.size() == tap_layers.size() * num_tokens * hidden, "the taps have the wrong size");
    for (size_t i = 0; i < tap_layers.size(); ++i) {
        require(tap_layers[i] <= num_layers, "a tap beyond the layers that run");
        pass.taps.emplace_back(tap_layers[i], out.taps.data() + i * num_tokens * hidden);
    }
    std::fill_n(out.margins.data(), out.margins.size(), NAN);
    pass.chosen = out.chosen.data(), pass.logits = out.logits.data();
    pass.margins = out.margins.size() ? out.margins.data() : nullptr;
    if (masks) pass.masks = checked_masks(decoder, *masks, num_wanted, vocab);
    return pass;
}

void forward(Decoder& decoder, const KVStore& kv, const PassInputs& inputs, const SamplingSpecs& specs, size_t vocab, size_t num_layers,
             const std::vector<size_t>& tap_layers, const Out<float>& taps, const Out<int64_t>& chosen, const Out<float>& logits,
             const Out<float>& margins, const MaskInputs* masks) {
    const Pass pass = checked_pass(decoder, kv, inputs, specs, vocab, num_layers, tap_layers, {taps, chosen, logits, margins}, masks);
    nb::gil_scoped_release unlocked;
    if (pass.num_tokens > 0) decoder.forward(pass, kv);
}

// What a rank other than 0 does while rank 0 runs a pass over the same tokens.
void follow(Decoder& decoder, const KVStore& kv, const PassInputs& inputs, size_t num_layers) {
    require(decoder.follows() && inputs.wanted.size() == 0, "rank 0 leads, and only it knows which tokens are wanted");
    const Pass pass = checked_inputs(decoder, kv, inputs, decoder.shape().vocab, num_layers, decoder.shape().reads_features);
    nb::gil_scoped_release unlocked;
    decoder.forward(pass, kv);
}

// A pass that has begun, with everything that it reads and writes: its destructor waits for its end.
struct PendingPass {
    nb::object decoder, kv, inputs, specs, masks;
    PassOutputs out;

    PendingPass(nb::object decoder, nb::object kv, nb::object inputs, nb::object specs, nb::object masks, PassOutputs out)
        : decoder(std::move(decoder)), kv(std::move(kv)), inputs(std::move(inputs)), specs(std::move(specs)), masks(std::move(masks)),
          out(std::move(out)) {}
    PendingPass(PendingPass&&) = default;
    ~PendingPass() {
        if (!decoder.is_valid()) return;
        if (!masks.is_none()) nb::cast<MaskInputs&>(masks).open();  // otherwise the pass would wait for ever
        nb::cast<Decoder&>(decoder).finish();
    }
};

PendingPass begin(nb::object self, nb::object kv, nb::object inputs, nb::object specs, size_t vocab, size_t num_layers,
                  const std::vector<size_t>& tap_layers, const Out<float>& taps, const Out<int64_t>& chosen, const Out<float>& logits,
                  const Out<float>& margins, nb::object masks) {
    const MaskInputs* masked = masks.is_none() ? nullptr : &nb::cast<const MaskInputs&>(masks);
    PendingPass pending(std::move(self), std::move(kv), std::move(inputs), std::move(specs), std::move(masks),
                        {taps, chosen, logits, margins});
    auto& decoder = nb::cast<Decoder&>(pending.decoder);
    const auto& store = nb::cast<const KVStore&>(pending.kv);
    Pass pass = checked_pass(decoder, store, nb::cast<const PassInputs&>(pending.inputs), nb::cast<const SamplingSpecs&>(pending.specs),
                             vocab, num_layers, tap_layers, pending.out, masked);
    nb::gil_scoped_release unlocked;
    if (pass.num_tokens > 0) decoder.begin(std::move(pass), store);
    return pending;
}

// The wanted tokens of a block lie side by side, one for each guess.
void check_block_steps(const Pass& pass, const DraftSteps& steps) {
    size_t at = 0;
    for (size_t row = 0; row < pass.num_rows; ++row)
        for (int64_t i = 0; i < steps.depths[row]; ++i, ++at) {
            require(at < pass.wanted.size(), "a block wants a token for each guess");
            const int64_t token = pass.wanted[at];
            require(pass.cu_len[row] <= token && token < pass.cu_len[row + 1] && (i == 0 || token == pass.wanted[at - 1] + 1),
                    "the wanted tokens of a row lie side by side in its block");
        }
    require(at == pass.wanted.size(), "every wanted token is a row's");
}

void check_steps(const Pass& pass, const DraftSteps& steps) {
    require(steps.depths.size() == pass.num_rows, "every row needs its depth");
    require(steps.hints.size() == pass.num_rows, "every row needs its hints, or none in their place");
    const auto leaves_choice = [](const SamplingSpec& spec) { return spec.kind == SamplingKind::logits; };
    require(std::none_of(steps.specs.begin(), steps.specs.end(), leaves_choice), "draft steps choose every token themselves");
    require(std::all_of(steps.depths.begin(), steps.depths.end(), [](int64_t depth) { return depth >= 1; }), "a row is one deep at least");
    if (pass.reads_rows) return check_block_steps(pass, steps);
    require(pass.wanted.size() == pass.num_rows, "a row wants one token, its last");
    for (size_t row = 0; row < pass.num_rows; ++row) {
        const int64_t last = pass.cu_len[row + 1] - 1;
        require(pass.cu_len[row] <= last && pass.wanted[row] == last, "a row wants one token, its last");
        const auto reach = static_cast<int64_t>(pass.max_pages * kPageTokens) - pass.positions[last];
        require(steps.depths[row] <= reach, "a row drafts beyond its pages");
    }
}

void forward_steps(Decoder& decoder, const KVStore& kv, const PassInputs& inputs, const SamplingSpecs& specs, size_t vocab,
                   size_t num_layers, const std::vector<int64_t>& depths, const Table<double>& stops,
                   const std::vector<const TokenHints*>& hints, const Out<int64_t>& chosen, const Out<float>& margins,
                   const Out<int64_t>& second_ids) {
    const Pass pass = checked_inputs(decoder, kv, inputs, vocab, num_layers, decoder.shape().reads_features);
    const size_t ids = num_ids(decoder, vocab);
    const DraftSteps steps{depths, stops.shape(0) ? stops.data() : nullptr, specs.checked(chosen.size(), ids), hints, ids,
                           chosen.data(), margins.data(), second_ids.size() ? second_ids.data() : nullptr};
    require(!pass.branched, "draft steps have no branches");
    require(decoder.shape().num_ranks == 1, "ranks run one pass at a time");
    check_steps(pass, steps);
    size_t num_chosen = 0;
    for (int64_t depth : depths) num_chosen += static_cast<size_t>(depth);
    require(stops.shape(1) == 3 && (!stops.shape(0) || stops.shape(0) == num_chosen), "the stops have the wrong shape");
    require(chosen.size() == num_chosen && margins.size() == num_chosen, "the outputs have the wrong size");
    require(second_ids.size() == 0 || second_ids.size() == num_chosen, "a second token for every choice, or none");
    std::fill_n(chosen.data(), num_chosen, kUnchosen);
    std::fill_n(second_ids.data(), second_ids.size(), kUnchosen);
    std::fill_n(margins.data(), num_chosen, NAN);
    nb::gil_scoped_release unlocked;
    pass.reads_rows ? run_block_steps(decoder, pass, steps, kv) : run_steps(decoder, pass, steps, kv);
}

// For a block head: store keys and values of known tokens, made of their features.
void store_context(Decoder& decoder, const KVStore& kv, const PassInputs& inputs) {
    require(decoder.shape().reads_rows, "this decoder has no context");
    const Pass pass = checked_inputs(decoder, kv, inputs, 1, decoder.shape().num_layers, true);
    nb::gil_scoped_release unlocked;
    if (pass.num_tokens > 0) decoder.store_context(pass, kv);
}

// The next guesses of blocks, see `BlockStep`.
void correct(Decoder& decoder, const Table<float>& states, const Ids& previous_ids, const Table<float>& previous_state,
             const SamplingSpecs& specs, size_t vocab, const Out<int64_t>& chosen, const Out<float>& logits, const Out<float>& margins,
             const Out<float>& state) {
    const Shape& shape = decoder.shape();
    const size_t n = states.shape(0), size = decoder.corrector().state_size;
    require(shape.reads_rows, "this decoder has no blocks");
    require(n > 0 && states.shape(1) == shape.hidden, "states have the wrong shape");
    require(previous_ids.size() == n, "every guess has a token before it");
    require(previous_state.shape(0) == n && previous_state.shape(1) == size && state.size() == n * size, "the states of the corrector have the wrong shape");
    require(0 < vocab && vocab <= shape.head_size, "the model has fewer token ids");
    Pass pass{};
    pass.vocab = vocab;
    pass.specs = specs.checked(n, num_ids(decoder, vocab));
    require(chosen.size() == n && margins.size() == n && logits.size() == specs.num_logit_rows() * vocab, "the outputs have the wrong size");
    std::vector<float> log_odds(n);
    BlockStep step{n, previous_ids.data(), previous_state.data(), {}, {}, state.data(),
                   decoder.corrector().confidence.empty() ? nullptr : log_odds.data()};
    for (size_t i = 0; i < n; ++i) {
        const int64_t token = previous_ids.data()[i];
        require(0 <= token && static_cast<size_t>(token) < shape.vocab, "a token id lies outside the vocabulary");
        step.states.push_back(states.data() + i * shape.hidden);
        pass.wanted.push_back(static_cast<int64_t>(i));
    }
    std::fill_n(margins.data(), n, NAN);
    pass.chosen = chosen.data(), pass.logits = logits.data(), pass.margins = margins.data();
    nb::gil_scoped_release unlocked;
    decoder.correct_step(step, pass);
}

}  // namespace

void bind_passes(nb::module_& m, nb::class_<Decoder>& decoder) {
    nb::class_<PassInputs>(m, "PassInputs")
        .def(nb::init<Ids, Ids, Ids, Ids, Table<int64_t>, Ids, Table<float>, Ids, Table<int64_t>, bool>(), "token_ids"_a.noconvert(), "positions"_a.noconvert(),
             "slots"_a.noconvert(), "cu_len"_a.noconvert(), "pages"_a.noconvert(), "first_keys"_a.noconvert(), "features"_a.noconvert(),
             "wanted"_a.noconvert(), "copies"_a.noconvert(), "branched"_a);
    nb::class_<MaskInputs>(m, "Masks")
        .def(nb::init<Table<int32_t>, Array<uint8_t>>(), "words"_a.noconvert(), "masked"_a.noconvert())
        .def("open", &MaskInputs::open);
    nb::class_<PendingPass>(m, "PendingPass");
    decoder
        .def("forward", &forward, "kv"_a, "inputs"_a, "specs"_a, "vocab"_a, "num_layers"_a, "tap_layers"_a, "taps"_a.noconvert(),
             "chosen"_a.noconvert(), "logits"_a.noconvert(), "margins"_a.noconvert(), "masks"_a.none() = nb::none())
        .def("begin", &begin, "kv"_a, "inputs"_a, "specs"_a, "vocab"_a, "num_layers"_a, "tap_layers"_a, "taps"_a.noconvert(),
             "chosen"_a.noconvert(), "logits"_a.noconvert(), "margins"_a.noconvert(), "masks"_a.none() = nb::none())
        .def("follow", &follow, "kv"_a, "inputs"_a, "num_layers"_a)
        .def("finish", &Decoder::finish, nb::call_guard<nb::gil_scoped_release>())
        .def("forward_steps", &forward_steps, "kv"_a, "inputs"_a, "specs"_a, "vocab"_a, "num_layers"_a, "depths"_a, "stops"_a.noconvert(),
             "hints"_a, "chosen"_a.noconvert(), "margins"_a.noconvert(), "second_ids"_a.noconvert())
        .def("store_context", &store_context, "kv"_a, "inputs"_a)
        .def("correct", &correct, "states"_a.noconvert(), "previous_ids"_a.noconvert(), "previous_state"_a.noconvert(), "specs"_a, "vocab"_a,
             "chosen"_a.noconvert(), "logits"_a.noconvert(), "margins"_a.noconvert(), "state"_a.noconvert());
}

}  // namespace paceline
