#include "bind/arrays.h"
#include "host/measure.h"
#include "isa/kernels.h"

#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/vector.h>

namespace paceline {
namespace {

void bind_measures(nb::module_& m) {
    m.def("read_bandwidth", [](ThreadPool& pool, size_t bytes) {
        require(bytes <= size_t{1} << 34, "at most 16 GiB are read");
        nb::gil_scoped_release unlocked;
        return read_bandwidth(pool, bytes);
    }, "pool"_a, "bytes"_a);
    m.def("dot_peak", [](ThreadPool& pool) {
        nb::gil_scoped_release unlocked;
        return dot_peak(pool);
    }, "pool"_a);
    m.def("time_products", [](ThreadPool& pool, const std::vector<std::shared_ptr<Matrix>>& matrices, size_t num_tokens, size_t repeats) {
        require(!matrices.empty() && 0 < num_tokens && num_tokens <= 1 << 16 && repeats <= 1 << 16, "nothing to time");
        nb::gil_scoped_release unlocked;
        return time_products(pool, matrices, num_tokens, repeats);
    }, "pool"_a, "matrices"_a, "num_tokens"_a, "repeats"_a);
}

}  // namespace
}  // namespace paceline

NB_MODULE(_ext, m) {
    m.doc() = "Native kernels of Paceline.";
    nanobind::set_leak_warnings(false);  // caches of a process keep models until it ends
    m.def("isa", [] { return paceline::kernels().name; }, "The instruction set in use.");
    paceline::bind_sampling(m);
    paceline::bind_weights(m);
    paceline::bind_decoder(m);
    paceline::bind_rows(m);
    paceline::bind_rounds(m);
    paceline::bind_lookup(m);
    paceline::bind_acceptance(m);
    paceline::bind_costs(m);
    paceline::bind_measures(m);
}
