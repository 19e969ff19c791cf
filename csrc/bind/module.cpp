#include "bind/arrays.h"
#include "isa/kernels.h"

NB_MODULE(_ext, m) {
    m.doc() = "Native kernels of Paceline.";
    nanobind::set_leak_warnings(false);  // caches of a process keep models until it ends
    m.def("isa", [] { return paceline::kernels().name; }, "The instruction set in use.");
    paceline::bind_sampling(m);
    paceline::bind_weights(m);
    paceline::bind_decoder(m);
    paceline::bind_rows(m);
    paceline::bind_rounds(m);
    paceline::bind_step(m);
    paceline::bind_lookup(m);
    paceline::bind_acceptance(m);
    paceline::bind_costs(m);
}
