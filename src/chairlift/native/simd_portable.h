// simd.h in plain C++: eight lanes that any compiler can put into its machine's vectors.
#pragma once

namespace chairlift::CHAIRLIFT_ISA_NS {

static constexpr int kLanes = 8;

struct Vec {
    float v[kLanes];
};

template <class Fn>
CHAIRLIFT_INLINE Vec lanes(Fn fn) {
    Vec result;
    for (int i = 0; i < kLanes; ++i) result.v[i] = fn(i);
    return result;
}

CHAIRLIFT_INLINE Vec splat(float x) {
    return lanes([=](int) { return x; });
}
CHAIRLIFT_INLINE Vec zero() { return splat(0.0F); }
CHAIRLIFT_INLINE Vec load(const float* p) {
    return lanes([=](int i) { return p[i]; });
}
CHAIRLIFT_INLINE void store(float* p, Vec a) {
    for (int i = 0; i < kLanes; ++i) p[i] = a.v[i];
}
// The first n <= kLanes lanes; a load fills the others with 0.
CHAIRLIFT_INLINE Vec load(const float* p, int n) {
    return lanes([=](int i) { return i < n ? p[i] : 0.0F; });
}
CHAIRLIFT_INLINE void store(float* p, Vec a, int n) {
    for (int i = 0; i < n; ++i) p[i] = a.v[i];
}

CHAIRLIFT_INLINE Vec operator+(Vec a, Vec b) {
    return lanes([&](int i) { return a.v[i] + b.v[i]; });
}
CHAIRLIFT_INLINE Vec operator-(Vec a, Vec b) {
    return lanes([&](int i) { return a.v[i] - b.v[i]; });
}
CHAIRLIFT_INLINE Vec operator*(Vec a, Vec b) {
    return lanes([&](int i) { return a.v[i] * b.v[i]; });
}
CHAIRLIFT_INLINE Vec operator/(Vec a, Vec b) {
    return lanes([&](int i) { return a.v[i] / b.v[i]; });
}
// a * b + c, rounded twice: a fused one is a slow library call on machines without the instruction.
CHAIRLIFT_INLINE Vec fma(Vec a, Vec b, Vec c) {
    return lanes([&](int i) { return a.v[i] * b.v[i] + c.v[i]; });
}
// A NaN in b stays.
CHAIRLIFT_INLINE Vec max(Vec a, Vec b) {
    return lanes([&](int i) { return a.v[i] > b.v[i] ? a.v[i] : b.v[i]; });
}
CHAIRLIFT_INLINE Vec min(Vec a, Vec b) {
    return lanes([&](int i) { return a.v[i] < b.v[i] ? a.v[i] : b.v[i]; });
}
CHAIRLIFT_INLINE Vec abs(Vec a) {
    return lanes([&](int i) { return bits_to_float(float_to_bits(a.v[i]) & 0x7fffffffU); });
}
// 1.5 * 2^23: adding it to |x| < 2^22 leaves x's nearest integer (ties to even) in the low bits.
static constexpr float kRoundBias = 12582912.0F;
// To the nearest integer, ties to even; |a| < 2^22.
CHAIRLIFT_INLINE Vec round(Vec a) {
    return lanes([&](int i) { return (a.v[i] + kRoundBias) - kRoundBias; });
}
// a * 2^n for integral n within [-126, 127].
CHAIRLIFT_INLINE Vec times_pow2(Vec a, Vec n) {
    return lanes([&](int i) { return a.v[i] * bits_to_float((float_to_bits(n.v[i] + kRoundBias + 127.0F)) << 23); });
}
// 0 where x < limit, else a.
CHAIRLIFT_INLINE Vec zero_below(Vec a, Vec x, Vec limit) {
    return lanes([&](int i) { return x.v[i] < limit.v[i] ? 0.0F : a.v[i]; });
}
// Bit i: a[i] >= b[i].
CHAIRLIFT_INLINE unsigned at_least(Vec a, Vec b) {
    unsigned bits = 0;
    for (int i = 0; i < kLanes; ++i) bits |= static_cast<unsigned>(a.v[i] >= b.v[i]) << i;
    return bits;
}

CHAIRLIFT_INLINE Vec load_f16(const uint16_t* p) {
    return lanes([=](int i) { return f16_to_float(p[i]); });
}
CHAIRLIFT_INLINE Vec load_bf16(const uint16_t* p) {
    return lanes([=](int i) { return bf16_to_float(p[i]); });
}
// Of kLanes pairs of bf16 the first, or the second, of each.
CHAIRLIFT_INLINE Vec load_bf16_first(const uint16_t* p) {
    return lanes([=](int i) { return bf16_to_float(p[2 * i]); });
}
CHAIRLIFT_INLINE Vec load_bf16_second(const uint16_t* p) {
    return lanes([=](int i) { return bf16_to_float(p[2 * i + 1]); });
}
// To the nearest bf16, ties to even; a NaN stays one.
CHAIRLIFT_INLINE Vec round_bf16(Vec a) {
    return lanes([&](int i) { return rounded_to_bf16(a.v[i]); });
}
// Lanes must be integral and within [-128, 127].
CHAIRLIFT_INLINE void store_i8(int8_t* p, Vec a) {
    for (int i = 0; i < kLanes; ++i) p[i] = static_cast<int8_t>(a.v[i]);
}

// Both halve the vector until one lane is left: lane i with lane i + 4, then i + 2, i + 1.
CHAIRLIFT_INLINE float sum(Vec a) {
    return ((a.v[0] + a.v[4]) + (a.v[2] + a.v[6])) + ((a.v[1] + a.v[5]) + (a.v[3] + a.v[7]));
}
CHAIRLIFT_INLINE float max_lane(Vec a) {
    float largest = a.v[0];
    for (int i = 1; i < kLanes; ++i) largest = a.v[i] > largest ? a.v[i] : largest;
    return largest;
}

}  // namespace chairlift::CHAIRLIFT_ISA_NS
