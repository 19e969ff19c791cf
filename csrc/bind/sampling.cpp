// The choice of tokens from rows of logits, and the specs that say how.
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <cmath>

#include "bind/arrays.h"
#include "model/sampling.h"

namespace paceline {
namespace {

template <class T>
Sampler<T>& sampler() {
    thread_local Sampler<T> own;  // scratch memory of a few vocabulary rows, kept
    return own;
}

template <class T>
size_t checked_size(const Array<T>& logits) {
    require(logits.size() > 0 && logits.size() < kMaxIds, "a row needs 1 to 2**31 logits");
    return logits.size();
}

Edits checked_edits(const Ids& ids, const Array<float>& scale, const Array<float>& add, size_t vocab) {
    require(ids.size() == scale.size() && ids.size() == add.size(), "edits need as many scales and sums as ids");
    for (size_t i = 0; i < ids.size(); ++i)
        if (ids.data()[i] < 0 || static_cast<size_t>(ids.data()[i]) >= vocab)
            throw std::out_of_range("an edit's token id lies outside the vocabulary");
    return {ids.data(), scale.data(), add.data(), ids.size()};
}

// A bit for each token that may be chosen; null where all may.
const uint32_t* checked_mask(const Array<int32_t>& mask, size_t vocab) {
    if (!mask.size()) return nullptr;
    require(mask.size() * 32 >= vocab, "a mask needs a bit for each logit");
    return reinterpret_cast<const uint32_t*>(mask.data());
}

template <class T>
int64_t choose(const Array<T>& logits, double temperature, int64_t top_k, double top_p, double min_p, const Ids& ids,
               const Array<float>& scale, const Array<float>& add, uint32_t k0, uint32_t k1, const Array<int32_t>& mask) {
    const size_t vocab = checked_size(logits);
    const Edits edits = checked_edits(ids, scale, add, vocab);
    const uint32_t* allowed = checked_mask(mask, vocab);
    nb::gil_scoped_release unlocked;
    Sampler<T>& row = sampler<T>();
    row.load(logits.data(), vocab, temperature, edits, allowed);
    return temperature > 0.0 ? row.choose({top_k, top_p, min_p}, {k0, k1}) : row.argmax();
}

// The token, and by how many logits it was ahead of the second.
template <class T>
std::tuple<int64_t, double> choose_with_margin(const Array<T>& logits, double temperature, int64_t top_k, double top_p, double min_p,
                                               const Ids& ids, const Array<float>& scale, const Array<float>& add, uint32_t k0, uint32_t k1,
                                               const Array<int32_t>& mask) {
    const size_t vocab = checked_size(logits);
    const Edits edits = checked_edits(ids, scale, add, vocab);
    const uint32_t* allowed = checked_mask(mask, vocab);
    nb::gil_scoped_release unlocked;
    Sampler<T>& row = sampler<T>();
    row.load(logits.data(), vocab, temperature, edits, allowed);
    if (!(temperature > 0.0)) return {row.argmax(), row.lead()};
    double ahead = 0.0;
    const int64_t id = row.choose({top_k, top_p, min_p}, {k0, k1}, &ahead);
    return {id, margin(ahead, temperature)};
}

template <class T>
std::vector<int64_t> filtered_ids(const Array<T>& z, int64_t top_k, double top_p, double min_p) {
    Sampler<T>& row = sampler<T>();
    row.load(z.data(), checked_size(z), 1.0, {});
    std::vector<int64_t> ids;
    for (const auto& c : row.filter({top_k, top_p, min_p})) ids.push_back(c.id);
    return ids;
}

template <class T>
std::tuple<double, std::vector<int64_t>, std::vector<double>> logprobs(const Array<T>& logits, int64_t token_id, size_t num_top) {
    const size_t vocab = checked_size(logits);
    if (token_id < 0 || static_cast<size_t>(token_id) >= vocab) throw std::out_of_range("the token id lies outside the vocabulary");
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
void bind_rows_of(nb::module_& m) {
    m.def("choose", &choose<T>, "logits"_a.noconvert(), "temperature"_a, "top_k"_a, "top_p"_a, "min_p"_a, "edit_ids"_a, "edit_scale"_a,
          "edit_add"_a, "k0"_a, "k1"_a, "mask"_a);
    m.def("choose_with_margin", &choose_with_margin<T>, "logits"_a.noconvert(), "temperature"_a, "top_k"_a, "top_p"_a, "min_p"_a,
          "edit_ids"_a, "edit_scale"_a, "edit_add"_a, "k0"_a, "k1"_a, "mask"_a);
    m.def("filtered_ids", &filtered_ids<T>, "z"_a.noconvert(), "top_k"_a, "top_p"_a, "min_p"_a);
    m.def("logprobs", &logprobs<T>, "logits"_a.noconvert(), "token_id"_a, "num_top"_a);
}

// Make specs from arrays with one entry for each wanted token; the edits of all tokens lie one after another.
void make_specs(SamplingSpecs* self, const Array<uint8_t>& kinds, const Array<double>& temperatures, const Table<double>& filters,
                const Table<uint32_t>& keys, const Ids& edit_offsets, const Ids& edit_ids, const Array<float>& edit_scale,
                const Array<float>& edit_add) {
    const size_t num_wanted = kinds.size();
    require(temperatures.size() == num_wanted && filters.shape(0) == num_wanted && filters.shape(1) == 3 && keys.shape(0) == num_wanted &&
                keys.shape(1) == 2 && edit_offsets.size() == num_wanted + 1,
            "every wanted token needs a kind, a temperature, filters, a key and edits");
    checked_edits(edit_ids, edit_scale, edit_add, kMaxIds);
    const int64_t* offsets = edit_offsets.data();
    const auto num_edits = static_cast<int64_t>(edit_ids.size());
    SamplingSpecs specs;
    for (size_t i = 0; i < num_wanted; ++i) {
        require(kinds.data()[i] <= 3, "a kind is 0, 1, 2 or 3");
        require(0 <= offsets[i] && offsets[i] <= offsets[i + 1] && offsets[i + 1] <= num_edits, "edit offsets must rise");
        const Edits edits{edit_ids.data() + offsets[i], edit_scale.data() + offsets[i], edit_add.data() + offsets[i],
                          static_cast<size_t>(offsets[i + 1] - offsets[i])};
        const double* filter = filters.data() + 3 * i;
        require(0 <= filter[0] && filter[0] < kMaxIds, "top_k lies out of bounds");
        specs.all.push_back({static_cast<SamplingKind>(kinds.data()[i]), temperatures.data()[i],
                             {static_cast<int64_t>(filter[0]), filter[1], filter[2]}, {keys.data()[2 * i], keys.data()[2 * i + 1]}, edits});
    }
    specs.edit_arrays = {nb::ndarray<>(edit_ids), nb::ndarray<>(edit_scale), nb::ndarray<>(edit_add)};
    new (self) SamplingSpecs(std::move(specs));
}

// Reads `SamplingSpec` objects of core/nouns.py.
class SpecReader {
  public:
    SamplingSpecs read(const nb::list& specs, int64_t vocab) {
        SamplingSpecs found;
        for (nb::handle spec : specs) found.all.push_back(read_one(spec, vocab, found.edit_arrays));
        return found;
    }

  private:
    template <class T>
    T number(const nb::handle& object, const nb::object& name) {
        return nb::cast<T>(object.attr(name));
    }

    SamplingSpec read_one(const nb::handle& spec, int64_t vocab, std::vector<nb::ndarray<>>& edit_arrays) {
        const nb::object params = spec.attr(params_);
        const SamplingKind kind = kind_of(spec.attr(kind_));
        const auto top_k = number<int64_t>(params, top_k_);
        require(0 <= top_k && top_k < static_cast<int64_t>(kMaxIds), "top_k lies out of bounds");
        SamplingSpec found{kind, number<double>(params, temperature_),
                           {top_k, number<double>(params, top_p_), number<double>(params, min_p_)}, {0, 0}, {}};
        if (kind != SamplingKind::argmax)
            found.key = choice_key(number<uint64_t>(spec, seed_), number<uint32_t>(spec, choice_), number<uint32_t>(spec, position_));
        const nb::object edits = spec.attr(edits_);
        if (!edits.is_none()) found.edits = edits_of(edits, vocab, edit_arrays);
        return found;
    }

    // The edits of ids below `vocab`; others change nothing.
    Edits edits_of(const nb::object& edits, int64_t vocab, std::vector<nb::ndarray<>>& edit_arrays) {
        const auto ids = number<Ids>(edits, ids_);
        const auto scale = number<Array<float>>(edits, scale_), add = number<Array<float>>(edits, add_);
        require(ids.size() == scale.size() && ids.size() == add.size(), "edits need as many scales and sums as ids");
        for (const auto& array : {nb::ndarray<>(ids), nb::ndarray<>(scale), nb::ndarray<>(add)}) edit_arrays.push_back(array);
        const auto end = std::lower_bound(ids.data(), ids.data() + ids.size(), vocab);
        return {ids.data(), scale.data(), add.data(), static_cast<size_t>(end - ids.data())};
    }

    static SamplingKind kind_of(const nb::object& kind) {
        using enum SamplingKind;
        return named<SamplingKind>(nb::cast<const char*>(kind), {{"argmax", argmax}, {"noisy", noisy}, {"logits", logits}, {"sampled", sampled}},
                                   "a kind is argmax, noisy, logits or sampled");
    }

    const nb::object kind_ = attribute("kind"), params_ = attribute("params"), seed_ = attribute("seed"), choice_ = attribute("choice"),
                     position_ = attribute("position"), edits_ = attribute("edits"), temperature_ = attribute("temperature"),
                     top_k_ = attribute("top_k"), top_p_ = attribute("top_p"), min_p_ = attribute("min_p"), ids_ = attribute("ids"),
                     scale_ = attribute("scale"), add_ = attribute("add");
};

// All numbers of every spec, for tests.
std::vector<std::vector<double>> as_lists(const SamplingSpecs& specs) {
    std::vector<std::vector<double>> all;
    for (const SamplingSpec& s : specs.all) {
        std::vector<double> one{double(s.kind), s.temperature, double(s.filters.top_k), s.filters.top_p, s.filters.min_p,
                                double(s.key.k0), double(s.key.k1)};
        for (size_t i = 0; i < s.edits.count; ++i)
            for (double number : {double(s.edits.ids[i]), double(s.edits.scale[i]), double(s.edits.add[i])}) one.push_back(number);
        all.push_back(std::move(one));
    }
    return all;
}

}  // namespace

size_t SamplingSpecs::num_logit_rows() const {
    return static_cast<size_t>(std::count_if(all.begin(), all.end(), [](const SamplingSpec& s) { return s.wants_logits(); }));
}

const std::vector<SamplingSpec>& SamplingSpecs::checked(size_t num_wanted, size_t vocab) const {
    require(all.size() == num_wanted, "every wanted token needs to know how it is chosen");
    for (const SamplingSpec& s : all) {
        const int64_t* end = s.edits.ids + s.edits.count;
        require(std::is_sorted(s.edits.ids, end), "edits must be in the order of their ids");
        if (s.edits.count && (s.edits.ids[0] < 0 || static_cast<size_t>(end[-1]) >= vocab))
            throw std::out_of_range("an edit's token id lies outside the vocabulary");
    }
    return all;
}

void bind_sampling(nb::module_& m) {
    bind_rows_of<float>(m);
    bind_rows_of<double>(m);
    m.def("gumbel", [](uint32_t k0, uint32_t k1, uint32_t id) { return gumbel({k0, k1}, id); }, "k0"_a, "k1"_a, "id"_a);
    nb::class_<SamplingSpecs>(m, "SamplingSpecs")
        .def_prop_ro("num_logit_rows", &SamplingSpecs::num_logit_rows)
        .def("as_lists", &as_lists)
        .def("__init__", &make_specs, "kinds"_a, "temperatures"_a, "filters"_a, "keys"_a, "edit_offsets"_a, "edit_ids"_a, "edit_scale"_a,
             "edit_add"_a);
    m.def("read_specs", [](const nb::list& specs, int64_t vocab) {
        static SpecReader* reader = new SpecReader;  // never freed: its strings are needed until the process ends
        return reader->read(specs, vocab);
    }, "specs"_a, "vocab"_a);
}

}  // namespace paceline
