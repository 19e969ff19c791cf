// The choice of an instruction set, once, at first use.
#include <cstdlib>
#include <cstring>

#include "kernels.h"

namespace paceline {

#define PACELINE_DECLARE(isa)                          \
    namespace isa {                                    \
    extern const VocabularyKernels vocabulary_kernels; \
    extern const GemmKernels gemm_kernels;             \
    extern const LayerKernels layer_kernels;           \
    extern const AttentionKernels attention_kernels;   \
    extern const LimitKernels limit_kernels;           \
    }
#define PACELINE_TABLE(isa)                                                                         \
    Kernels {                                                                                       \
        #isa, isa::vocabulary_kernels, isa::gemm_kernels, isa::layer_kernels, isa::attention_kernels, \
            isa::limit_kernels                                                                      \
    }

PACELINE_DECLARE(portable)
#ifdef PACELINE_X86
PACELINE_DECLARE(avx2)
PACELINE_DECLARE(avx2vnni)
PACELINE_DECLARE(avx512)
#endif

namespace {

struct Candidate {
    Kernels table;
    bool runs;
};

Kernels choose() {
    const Candidate best_first[] = {
#ifdef PACELINE_X86
        {PACELINE_TABLE(avx512), __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                                     __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
                                     __builtin_cpu_supports("avx512vnni")},
        {PACELINE_TABLE(avx2vnni), __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                                       __builtin_cpu_supports("f16c") && __builtin_cpu_supports("avxvnni")},
        {PACELINE_TABLE(avx2), __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                                   __builtin_cpu_supports("f16c")},
#endif
        {PACELINE_TABLE(portable), true},
    };
    const char* wanted = std::getenv("PACELINE_ISA");
    for (const Candidate& c : best_first)
        if (c.runs && (!wanted || std::strcmp(wanted, c.table.name) == 0)) return c.table;
    return PACELINE_TABLE(portable);
}

}  // namespace

const Kernels& kernels() {
    static const Kernels chosen = choose();
    return chosen;
}

}  // namespace paceline
