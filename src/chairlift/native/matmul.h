// out = x @ W.T (+ bias) (+ residual) for packed weights.
//
// Each output is one float sum over the groups of inputs that share a scale, in ascending order (float layouts: two
// interleaved sums), by the same operations whatever the number of rows: row i of a batch equals the same row alone, bit for bit.
#pragma once

#include <stdint.h>

#include "layout.h"

namespace chairlift {

// The rows that a matrix multiplies: levels of 8 or 16 bits for layouts of levels, bf16 for bf16, f32 for the others.
//
// A level of one byte is a signed byte plus its group's offset. A level of two is 256 * high + low with both in int8, so that
// 8-bit dot products do the work of 16-bit ones: each group of 32 lanes is 32 high bytes, then 32 low bytes.
struct Activations {
    const float* values = nullptr;      // (rows, stride): f32, or what MatmulFloatKernels::round left
    int64_t stride = 0;                 // lanes from one row of `values` to the next
    int bytes = 0;                      // of a level: 1 or 2
    const int8_t* q = nullptr;          // (rows, cols / 32, bytes, 32)
    const float* scale = nullptr;       // (rows, cols / 32)
    const int16_t* offset = nullptr;    // (rows, cols / 32, 2) twice the same; of levels of one byte
    const int32_t* sum = nullptr;       // (rows, cols / 32) sum of each group's levels
    const int32_t* half_sum = nullptr;  // (rows, cols / 16) sum of each half group's levels
};

struct MatmulArgs {
    MatrixView weights;
    Activations x;
    int num_rows;
    float* out;  // (num_rows, out_stride); the first weights.rows lanes of each row are written
    int64_t out_stride;
    const float* bias;      // (weights.rows,) or null
    const float* residual;  // (num_rows, residual_stride) or null; may be `out`
    int64_t residual_stride;
};

// Computes the outputs of panels [begin, end) for all rows. Calls over disjoint ranges may run at the same time.
using MatmulFn = void (*)(const MatmulArgs& args, int64_t begin, int64_t end);

struct MatmulKernels {
    MatmulFn run;  // for layouts of levels
};

struct MatmulFloatKernels {
    MatmulFn run;  // for the others

    // Rounds n lanes to the nearest bf16, ties to even, and puts them from lane `first` on into a row that a bf16 matrix
    // takes: two bytes each where an instruction multiplies bf16, else widened again. `first` is a multiple of 16, and the
    // row whole 16s of lanes: those up to the next are put to 0.
    void (*round)(const float* x, int first, int n, float* row);
};

#ifdef CHAIRLIFT_ISA_NS
namespace CHAIRLIFT_ISA_NS {
extern const MatmulKernels matmul_kernels;
extern const MatmulFloatKernels matmul_float_kernels;
}
#endif

}  // namespace chairlift
