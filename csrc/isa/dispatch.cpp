// The choice of an instruction set, at first use.
#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <string>

#ifdef PACELINE_X86
#include <cpuid.h>
#endif
#if defined(PACELINE_X86) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include "kernels.h"

namespace paceline {

#define PACELINE_DECLARE(isa)                          \
    namespace isa {                                    \
    extern const VocabularyKernels vocabulary_kernels; \
    extern const GemmKernels gemm_kernels;             \
    extern const BlockKernels block_kernels;           \
    extern const LayerKernels layer_kernels;           \
    extern const AttentionKernels attention_kernels;   \
    extern const LimitKernels limit_kernels;           \
    }
#define PACELINE_TABLE(isa)                                                                                            \
    Kernels {                                                                                                          \
        #isa, isa::vocabulary_kernels, isa::gemm_kernels, isa::block_kernels, isa::layer_kernels, isa::attention_kernels, \
            isa::limit_kernels                                                                                         \
    }

PACELINE_DECLARE(portable)
#ifdef PACELINE_X86
PACELINE_DECLARE(avx2)
PACELINE_DECLARE(avx2vnni)
PACELINE_DECLARE(avx512)
namespace amx {
extern const GemmKernels gemm_kernels;
extern const LimitKernels limit_kernels;
}
#endif

namespace {

struct Candidate {
    Kernels table;
    bool runs;
};

#ifdef PACELINE_X86

// A process must ask the system for tile registers, as they make every switch of threads more expensive.
bool may_use_tiles() {
#if defined(__linux__)
    constexpr long kAsk = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
    return __builtin_cpu_supports("amx-int8") && __builtin_cpu_supports("amx-tile") && syscall(SYS_arch_prctl, kAsk, kTileData) == 0;
#else
    return false;
#endif
}

// The flags of CMakeLists.txt: a processor that lacks one would raise an illegal instruction.
bool has_avx2() {
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c") &&
           __builtin_cpu_supports("bmi2");
}

bool has_avx512() {
    return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vnni");
}

// AVX-512, with tiles for matrix products.
Kernels with_tiles() {
    Kernels table = PACELINE_TABLE(avx512);
    table.name = "amx", table.gemm = amx::gemm_kernels, table.limits = amx::limit_kernels;
    return table;
}

// AMD family 1Ah and later.
bool is_zen5_or_newer() {
    unsigned signature, b, c, d;
    if (!__builtin_cpu_is("amd") || !__get_cpuid(1, &signature, &b, &c, &d)) return false;
    const unsigned family = (signature >> 8 & 0xF) + (signature >> 20 & 0xFF);
    return family >= 0x1A;
}

#else

bool is_zen5_or_newer() { return false; }

#endif

Kernels choose() {
    const Candidate best_first[] = {
#ifdef PACELINE_X86
        {with_tiles(), has_avx512() && may_use_tiles()},
        {PACELINE_TABLE(avx512), has_avx512()},
        {PACELINE_TABLE(avx2vnni), has_avx2() && __builtin_cpu_supports("avxvnni")},
        {PACELINE_TABLE(avx2), has_avx2()},
#endif
        {PACELINE_TABLE(portable), true},
    };
    const char* wanted = std::getenv("PACELINE_ISA");
    std::string runs;
    for (const Candidate& c : best_first) {
        if (!c.runs) continue;
        if (!wanted || std::strcmp(wanted, c.table.name) == 0) return c.table;
        runs += std::string(runs.empty() ? "" : ", ") + c.table.name;
    }
    throw std::invalid_argument("PACELINE_ISA names no instruction set of this machine; it has " + runs);
}

}  // namespace

const bool kFetchesPastCaches = is_zen5_or_newer();
Prefetching prefetching[kMostInPiece + 1];
constinit thread_local PagesAhead pages_ahead;

const Kernels& kernels() {
    static const Kernels chosen = choose();
    return chosen;
}

}  // namespace paceline
