// Loops over the lanes of one row: what stands between the matrix products and is not attention.
//
// Each is compiled once per ISA level. All sums run in one fixed order, so that a row's result depends on the row alone.
#pragma once

#include <stdint.h>
#include <string.h>

namespace chairlift {

// How the heads of one row turn at its position. The first 2 * num_pairs lanes of a head turn, the rest are copied.
// Pair i is lanes (2i, 2i + 1) when interleaved, else (i, i + num_pairs).
struct RopeRow {
    const float* cosines;  // (num_pairs,)
    const float* sines;
    int num_pairs;
    int num_heads;
    int head_dim;
    bool interleaved;
};

// Where rounded lanes go; see Activations.
struct RoundedLanes {
    int8_t* q;
    float* scales;       // (n / 32,)
    int16_t* offsets;    // (n / 32, 2)
    int32_t* sums;       // (n / 32,)
    int32_t* half_sums;  // (n / 16,)
};

// out[i] from a[i] and b[i] for n lanes. `out` may be `a` or `b`.
using PairFn = void (*)(const float* a, const float* b, int n, float* out);

struct NamedPairFn {
    const char* name;
    PairFn run;
};

struct ElementwiseKernels {
    // 1 / sqrt(mean(x^2) + eps) over n lanes.
    float (*inverse_rms)(const float* x, int n, float eps);

    // out[i] = x[i] * factor * weight[i]: the rest of an RMS norm. `out` may be `x`.
    void (*scale)(const float* x, const float* weight, float factor, int n, float* out);

    // Rounds n lanes, a multiple of 32, to levels of one byte and of two, as quant.quantise_rows defines it. A group that holds
    // a NaN or an infinity gets a scale that is not finite, so that it shows in the logits.
    void (*quantise[2])(const float* x, int n, const RoundedLanes& out);

    // Rotates num_heads heads of head_dim lanes. `out` may be `x`.
    void (*rope)(const float* x, const RopeRow& rope, float* out);

    // Loops over two inputs, by name; the last has none. A new one is a function and a line in elementwise.cpp.
    const NamedPairFn* pairs;
};

// Null when there is none of this name.
static inline PairFn pair_by_name(const ElementwiseKernels& kernels, const char* name) {
    for (const NamedPairFn* pair = kernels.pairs; pair->name != nullptr; ++pair) {
        if (strcmp(pair->name, name) == 0) return pair->run;
    }
    return nullptr;
}

#ifdef CHAIRLIFT_ISA_NS
namespace CHAIRLIFT_ISA_NS {
extern const ElementwiseKernels elementwise_kernels;
}
#endif

}  // namespace chairlift
