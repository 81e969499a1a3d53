// One group of weights times a tile of rows by 8-bit dot products, for the instruction sets that have them.
//
// matmul_<level>.h gives the vectors: Ints, zero_ints, load_pair (weights as unsigned bytes: all that a layout must bring),
// four_of, dot4, combine.
#pragma once

#include "matmul_group.h"

namespace chairlift::CHAIRLIFT_ISA_NS {

// dots[r][v] = sum over pairs [First, First + Pairs) of the group of w * level, per output, exact. Rows of `q` are `stride`
// bytes apart.
//
// Inputs outside, rows inside: a tile has rows x vectors x 2 chains of dot products, enough to hide their latency, and each
// activation that is loaded meets all vectors.
template <LevelShape Shape, int First, int Pairs, int Rows, int Vectors>
CHAIRLIFT_INLINE void multiply_pairs(const Group& group, const int8_t* q, int64_t stride, Ints (&dots)[Rows][Vectors]) {
    Ints high[Rows][Vectors];
    Ints low[Rows][Vectors];
    for (int r = 0; r < Rows; ++r) {
        for (int v = 0; v < Vectors; ++v) high[r][v] = low[r][v] = zero_ints();
    }
#pragma GCC unroll 4
    for (int j = First; j < First + Pairs; ++j) {
        Pair w[Vectors];
        for (int v = 0; v < Vectors; ++v) w[v] = load_pair<Shape>(levels_of(group, v), j);
#pragma GCC unroll 2
        for (int half = 0; half < 2; ++half) {
            const int8_t* four = q + 4 * (j + half * num_pairs(Shape));
#pragma GCC unroll 8
            for (int r = 0; r < Rows; ++r, four += stride) {
                const Ints x_high = four_of(four);
                const Ints x_low = four_of(four + kBlock);
#pragma GCC unroll 4
                for (int v = 0; v < Vectors; ++v) {
                    high[r][v] = dot4(high[r][v], w[v].half[half], x_high);
                    low[r][v] = dot4(low[r][v], w[v].half[half], x_low);
                }
            }
        }
    }
    for (int r = 0; r < Rows; ++r) {
        for (int v = 0; v < Vectors; ++v) dots[r][v] = combine(high[r][v], low[r][v]);
    }
}

}  // namespace chairlift::CHAIRLIFT_ISA_NS
