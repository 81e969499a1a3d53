// Which instruction sets this binary carries, which of them this machine has, and each level's table of hot functions.
//
// Hot code is compiled once per level from the same sources. Rules that keep one level's instructions out of another:
//   - such a source defines everything in `namespace chairlift::CHAIRLIFT_ISA_NS`, its helpers in an anonymous namespace
//     there, and exports one constant table that its header declares;
//   - it calls no std:: function or template and no inline function of a shared header unless that is static: of inline
//     functions the linker keeps a single copy, perhaps the AVX-512 one.
// scripts/check-native refuses such functions in these objects.
#pragma once

#include <string_view>
#include <vector>

#include "attention.h"
#include "elementwise.h"
#include "matmul.h"
#include "sample.h"

namespace chairlift {

enum class Isa { portable, avx2, avx2_vnni, avx512, avx512_bf16 };

// One level's functions.
struct Kernels {
    const MatmulKernels& matmul;
    const MatmulFloatKernels& matmul_float;
    const SampleKernels& sample;
    const ElementwiseKernels& elementwise;
    const AttentionKernels& attention;

    MatmulFn product(Layout layout) const { return level_shape(layout).bits != 0 ? matmul.run : matmul_float.run; }
};

// "portable", "avx2" (with FMA and F16C), "avx2_vnni" (AVX-VNNI too), "avx512" (F, BW, DQ, VL, VNNI) or "avx512_bf16".
std::string_view isa_name(Isa isa);

// Levels that this binary carries and that processor and operating system support, lowest first.
std::vector<Isa> available_isas();

// The fastest available level: the highest, but where its extra instructions are slow.
Isa best_isa();

// Throws std::invalid_argument when the name is unknown or the level is not available here.
Isa isa_from_name(std::string_view name);

// Throws std::invalid_argument when the level is not available here.
const Kernels& kernels(Isa isa);

}  // namespace chairlift
