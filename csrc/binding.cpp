// The border to Python. Everything that comes in is checked here; nothing behind it checks again.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <cmath>
#include <stdexcept>

#include "isa/kernels.h"
#include "sampling.h"

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
    row.load(logits.data(), vocab, 1.0, {});
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
    m.def("keep", &keep<T>, "z"_a.noconvert(), "top_k"_a, "top_p"_a, "min_p"_a);
    m.def("logprobs", &logprobs<T>, "logits"_a.noconvert(), "token_id"_a, "num_top"_a);
}

}  // namespace
}  // namespace paceline

NB_MODULE(_ext, m) {
    m.doc() = "Native kernels of Paceline.";
    paceline::bind_sampling<float>(m);
    paceline::bind_sampling<double>(m);
    m.def("gumbel", [](uint32_t k0, uint32_t k1, uint32_t id) { return paceline::gumbel({k0, k1}, id); }, "k0"_a,
          "k1"_a, "id"_a);
    m.def("isa", [] { return paceline::kernels().name; }, "The instruction set in use.");
}
