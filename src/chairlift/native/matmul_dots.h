// One group of weights times a pass's rows by 8-bit dot products, for the instruction sets that have them.
//
// matmul_<level>.h gives the vectors: Ints, zero_ints, load_pair (weights as unsigned bytes: all that a layout must bring),
// four_of, dot4, in_full, add_bytes, pair_sums, dot2.
#pragma once

#include "matmul_group.h"

namespace chairlift::CHAIRLIFT_ISA_NS {

// Adds a pair of weights to their sums: in bytes where 32 weights of up to 5 bits or 16 of 6 fit them (8 x 31, 4 x 63).
template <LevelShape Shape>
CHAIRLIFT_INLINE Ints add_weights(Ints total, const Pair& w) {
    if constexpr (Shape.bits == 8) return add_words(total, add_words(pair_sums(w.half[0]), pair_sums(w.half[1])));
    return add_bytes(total, add_bytes(w.half[0], w.half[1]));
}

// dots[r][v] = sum over pairs [First, First + Pairs) of the group of w * level, per output, exact.
//
// Inputs outside, rows inside: a pass has rows x vectors x bytes chains of dot products, enough to hide their latency, and
// each activation that is loaded meets all vectors. Offsets of levels of one byte meet the weights' sum.
template <LevelShape Shape, int Bytes, int First, int Pairs, int Rows, int Vectors>
CHAIRLIFT_INLINE void multiply_pairs(const Group& group, const GroupRows& rows, Ints (&dots)[Rows][Vectors]) {
    static_assert(Bytes == 2 || Shape.bits == 8 || 2 * Pairs * ((1 << Shape.bits) - 1) <= 255, "weights' sums pass a byte");
    Ints sums[Rows][Vectors][Bytes];  // of the levels' bytes, high ones first
    Ints totals[Vectors];
    for (int v = 0; v < Vectors; ++v) {
        totals[v] = zero_ints();
        for (int r = 0; r < Rows; ++r) {
            for (Ints& sum : sums[r][v]) sum = zero_ints();
        }
    }
#pragma GCC unroll 4
    for (int j = First; j < First + Pairs; ++j) {
        Pair w[Vectors];
        for (int v = 0; v < Vectors; ++v) {
            w[v] = load_pair<Shape>(levels_of(group, v), j);
            if constexpr (Bytes == 1) totals[v] = add_weights<Shape>(totals[v], w[v]);
        }
#pragma GCC unroll 2
        for (int half = 0; half < 2; ++half) {
            const int8_t* four = rows.q + 4 * (j + half * num_pairs(Shape));
#pragma GCC unroll 8
            for (int r = 0; r < Rows; ++r, four += rows.stride) {
                Ints x[Bytes];
                for (int b = 0; b < Bytes; ++b) x[b] = four_of(four + b * kScaleLanes);
#pragma GCC unroll 4
                for (int v = 0; v < Vectors; ++v) {
                    for (int b = 0; b < Bytes; ++b) sums[r][v][b] = dot4(sums[r][v][b], w[v].half[half], x[b]);
                }
            }
        }
    }
    for (int v = 0; v < Vectors; ++v) {
        const Ints total = Shape.bits == 8 ? totals[v] : pair_sums(totals[v]);
        for (int r = 0; r < Rows; ++r) {
            dots[r][v] = in_full(sums[r][v]);
            if constexpr (Bytes == 1) dots[r][v] = dot2(dots[r][v], total, two_of(rows.offsets + r * rows.offset_stride));
        }
    }
}

}  // namespace chairlift::CHAIRLIFT_ISA_NS
