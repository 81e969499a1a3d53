#include "isa.h"

#include <stdexcept>
#include <string>

// The tables that the per-level objects define.
#define CHAIRLIFT_DECLARE_LEVEL(level)                                                                                  \
    namespace chairlift::level {                                                                                        \
    extern const MatmulKernels matmul_kernels;                                                                          \
    extern const MatmulFloatKernels matmul_float_kernels;                                                               \
    extern const SampleKernels sample_kernels;                                                                          \
    extern const ElementwiseKernels elementwise_kernels;                                                                \
    extern const AttentionKernels attention_kernels;                                                                    \
    static constexpr Kernels table{matmul_kernels,      matmul_float_kernels, sample_kernels,                           \
                                   elementwise_kernels, attention_kernels};                                             \
    }

CHAIRLIFT_DECLARE_LEVEL(portable)
#ifdef CHAIRLIFT_X86
CHAIRLIFT_DECLARE_LEVEL(avx2)
CHAIRLIFT_DECLARE_LEVEL(avx2_vnni)
CHAIRLIFT_DECLARE_LEVEL(avx512)
namespace chairlift::avx512_bf16 {
extern const MatmulFloatKernels matmul_float_kernels;
extern const AttentionKernels attention_kernels;
// Nothing else is made of bf16 products.
static constexpr Kernels table{avx512::matmul_kernels, matmul_float_kernels, avx512::sample_kernels,
                               avx512::elementwise_kernels, attention_kernels};
}  // namespace chairlift::avx512_bf16
#endif

namespace chairlift {

namespace {

constexpr Isa kAll[] = {Isa::portable, Isa::avx2, Isa::avx2_vnni, Isa::avx512, Isa::avx512_bf16};

// The builtins ask CPUID and, for the registers that the system must save, XGETBV.
bool available(Isa isa) {
    switch (isa) {
        case Isa::portable: return true;
#ifdef CHAIRLIFT_X86
        case Isa::avx2:
            return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
        case Isa::avx2_vnni: return available(Isa::avx2) && __builtin_cpu_supports("avxvnni");
        case Isa::avx512:
            return available(Isa::avx2) && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                   __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
                   __builtin_cpu_supports("avx512vnni");
        case Isa::avx512_bf16: return available(Isa::avx512) && __builtin_cpu_supports("avx512bf16");
#endif
        default: return false;
    }
}

[[noreturn]] void refuse(std::string_view name) {
    std::string message = "instruction set level '";
    message.append(name).append("' is not available; this machine has:");
    for (const Isa isa : available_isas()) message.append(" ").append(isa_name(isa));
    throw std::invalid_argument(message);
}

}  // namespace

std::string_view isa_name(Isa isa) {
    switch (isa) {
        case Isa::avx2: return "avx2";
        case Isa::avx2_vnni: return "avx2_vnni";
        case Isa::avx512: return "avx512";
        case Isa::avx512_bf16: return "avx512_bf16";
        default: return "portable";
    }
}

std::vector<Isa> available_isas() {
    std::vector<Isa> found;
    for (const Isa isa : kAll) {
        if (available(isa)) found.push_back(isa);
    }
    return found;
}

// Intel's vdpbf16ps (measured on Emerald Rapids, docs/log.md) takes the time of four FMAs, where two do the same work.
Isa best_isa() {
    const Isa highest = available_isas().back();
#ifdef CHAIRLIFT_X86
    if (highest == Isa::avx512_bf16 && __builtin_cpu_is("intel")) return Isa::avx512;
#endif
    return highest;
}

Isa isa_from_name(std::string_view name) {
    for (const Isa isa : available_isas()) {
        if (isa_name(isa) == name) return isa;
    }
    refuse(name);
}

const Kernels& kernels(Isa isa) {
    if (!available(isa)) refuse(isa_name(isa));
#ifdef CHAIRLIFT_X86
    if (isa == Isa::avx2) return avx2::table;
    if (isa == Isa::avx2_vnni) return avx2_vnni::table;
    if (isa == Isa::avx512) return avx512::table;
    if (isa == Isa::avx512_bf16) return avx512_bf16::table;
#endif
    return portable::table;
}

}  // namespace chairlift
