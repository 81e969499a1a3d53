// The most that a level's arithmetic units can do: `chairlift bench kernels` compares the kernels with it.
#pragma once

#include <stdint.h>

#ifndef CHAIRLIFT_ISA_NS
#include "isa.h"
#endif

namespace chairlift {

// Each runs `rounds` times through a loop of products that need neither memory nor each other, and returns how many
// multiplications and additions that were.
struct PeakKernels {
    // 8-bit products summed in 32 bits, with the best instruction of the level.
    int64_t (*dot)(int64_t rounds);
    // f32 multiply-adds.
    int64_t (*fma)(int64_t rounds);
    // Products of bf16 values summed in f32, as attention makes them: the unit's where there is one, else widened.
    int64_t (*bf16)(int64_t rounds);
};

#ifdef CHAIRLIFT_ISA_NS
namespace CHAIRLIFT_ISA_NS {
extern const PeakKernels peaks;
}
#else
// Throws std::invalid_argument when the level is not available here.
const PeakKernels& peak_kernels(Isa isa);
#endif

}  // namespace chairlift
