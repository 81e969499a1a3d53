// Levels times rows in plain loops: 8 outputs at a time.
#pragma once

#include <type_traits>

#include "matmul_group.h"

namespace chairlift::CHAIRLIFT_ISA_NS {

static constexpr int kPassPanels = 1;
static constexpr PassRows kPassRows[] = {{4, 4}, {4, 4}};  // of levels of one byte and of two

// Half of each 64-byte vector of a group: 8 outputs x 4 inputs side by side.
static constexpr int kHalf = 4 * kLanes;

struct Ints {
    int32_t v[kLanes];
};

// One integer in every lane.
CHAIRLIFT_INLINE Ints splat_int(const int32_t* p) {
    Ints result;
    for (int32_t& lane : result.v) lane = *p;
    return result;
}

CHAIRLIFT_INLINE Vec to_float(const Ints& a) {
    return lanes([&](int i) { return static_cast<float>(a.v[i]); });
}

// a - Zero * b.
template <int Zero>
CHAIRLIFT_INLINE Ints less_times(const Ints& a, const Ints& b) {
    Ints result;
    for (int i = 0; i < kLanes; ++i) result.v[i] = a.v[i] - Zero * b.v[i];
    return result;
}

// Four activations, repeated for each output.
struct Repeated {
    int8_t q[kHalf];
};

CHAIRLIFT_INLINE Repeated repeat(const int8_t* q) {
    uint32_t four;
    memcpy(&four, q, sizeof four);
    uint32_t copies[kLanes];
    for (uint32_t& copy : copies) copy = four;
    Repeated repeated;
    memcpy(repeated.q, copies, sizeof copies);
    return repeated;
}

// Vectors j and j + num_pairs of a group, from nibbles and the bits above them.
template <LevelShape Shape>
CHAIRLIFT_INLINE void add_nibbles(const uint8_t* levels, int j, const int8_t* q, int16_t* total) {
    constexpr int upper = Shape.bits - 4;
    constexpr int mask = (1 << upper) - 1;
    const int later = j + num_pairs(Shape);
    const uint8_t* both = levels + 64 * j;
    const uint8_t* fields = levels + 64 * num_pairs(Shape);
    const Repeated low = repeat(q + 4 * j);
    const Repeated high = repeat(q + 4 * later);
    for (int i = 0; i < kHalf; ++i) {
        int first = both[i] & 15;
        int second = both[i] >> 4;
        if constexpr (upper != 0) {
            first |= (fields[i] >> upper * j & mask) << 4;
            second |= (fields[i] >> upper * later & mask) << 4;
        }
        total[i] = static_cast<int16_t>(total[i] + first * low.q[i] + second * high.q[i]);
    }
}

CHAIRLIFT_INLINE void add_bytes(const uint8_t* levels, int j, const int8_t* q, int32_t* total) {
    const uint8_t* bytes = levels + 64 * j;
    const Repeated four = repeat(q + 4 * j);
    for (int i = 0; i < kHalf; ++i) total[i] += bytes[i] * four.q[i];
}

// Sum of w * q over the group, per output. Bytes stay where they are, and every four products are added last: 16 bits hold the
// others where 32 weights have 5 bits (8 x 31 x 128 = 31,744) or 16 have 6 (4 x 63 x 128 = 32,256).
template <LevelShape Shape>
CHAIRLIFT_INLINE Ints dot(const uint8_t* levels, const int8_t* q) {
    using Total = std::conditional_t<Shape.bits == 8, int32_t, int16_t>;
    Total total[kHalf] = {};
    if constexpr (Shape.bits == 8) {
        for (int j = 0; j < 2 * num_pairs(Shape); ++j) add_bytes(levels, j, q, total);
    } else {
        for (int j = 0; j < num_pairs(Shape); ++j) add_nibbles<Shape>(levels, j, q, total);
    }
    Ints result;
    for (int i = 0; i < kLanes; ++i) result.v[i] = total[4 * i] + total[4 * i + 1] + total[4 * i + 2] + total[4 * i + 3];
    return result;
}

// dots[r][v] = sum over the group of w * level, per output, exact.
template <LevelShape Shape, int Bytes, int Rows, int Vectors>
CHAIRLIFT_INLINE void multiply_group(const Group& group, const GroupRows& rows, Ints (&dots)[Rows][Vectors]) {
    int8_t ones[kScaleLanes];
    memset(ones, 1, sizeof ones);
    for (int v = 0; v < Vectors; ++v) {
        const uint8_t* const levels = levels_of(group, v);
        const Ints total = Bytes == 1 ? dot<Shape>(levels, ones) : Ints{};
        for (int r = 0; r < Rows; ++r) {
            const int8_t* const q = rows.q + r * rows.stride;
            const Ints high = dot<Shape>(levels, q);
            const Ints low = Bytes == 2 ? dot<Shape>(levels, q + kScaleLanes) : Ints{};
            for (int i = 0; i < kLanes; ++i) {
                dots[r][v].v[i] = Bytes == 2 ? 256 * high.v[i] + low.v[i]
                                             : high.v[i] + rows.offsets[r * rows.offset_stride] * total.v[i];
            }
        }
    }
}

}  // namespace chairlift::CHAIRLIFT_ISA_NS
