// The loops of peak.h. Sums are as many as hide an instruction's latency on two ports; a barrier after each round keeps the
// compiler from seeing that every round is the same.
#include "testing/peak.h"

#include "simd_bf16.h"

namespace chairlift::CHAIRLIFT_ISA_NS {

namespace {

constexpr int kSums = 12;

// What the compiler must believe to be read and changed.
template <class T>
CHAIRLIFT_INLINE void touch(T& value) {
#if CHAIRLIFT_ISA_LEVEL == 0
    asm volatile("" : "+m"(value));
#else
    asm volatile("" : "+v"(value));
#endif
}

// Bytes of a register, and one instruction's sum of products of u8 and s8.
#if defined(__AVX512VNNI__)
using Bytes = __m512i;
CHAIRLIFT_INLINE Bytes bytes() { return _mm512_set1_epi8(1); }
CHAIRLIFT_INLINE Bytes add_products(Bytes sum, Bytes a, Bytes b) { return _mm512_dpbusd_epi32(sum, a, b); }
#elif defined(__AVXVNNI__)
using Bytes = __m256i;
CHAIRLIFT_INLINE Bytes bytes() { return _mm256_set1_epi8(1); }
CHAIRLIFT_INLINE Bytes add_products(Bytes sum, Bytes a, Bytes b) { return _mm256_dpbusd_avx_epi32(sum, a, b); }
#elif defined(__AVX2__)
using Bytes = __m256i;
CHAIRLIFT_INLINE Bytes bytes() { return _mm256_set1_epi8(1); }
CHAIRLIFT_INLINE Bytes add_products(Bytes sum, Bytes a, Bytes b) {
    return _mm256_add_epi16(sum, _mm256_maddubs_epi16(a, b));  // widening them to 32 bits can wait for a group's end
}
#else
struct Bytes {
    int16_t v[16];
};
CHAIRLIFT_INLINE Bytes bytes() {
    Bytes result;
    for (int i = 0; i < 16; ++i) result.v[i] = 1;
    return result;
}
CHAIRLIFT_INLINE Bytes add_products(Bytes sum, Bytes a, Bytes b) {
    for (int i = 0; i < 16; ++i) sum.v[i] = static_cast<int16_t>(sum.v[i] + a.v[i] * b.v[i]);
    return sum;
}
#endif

int64_t dot(int64_t rounds) {
    Bytes a = bytes();
    Bytes b = bytes();
    Bytes sums[kSums];
    for (Bytes& sum : sums) sum = bytes();
    for (int64_t round = 0; round < rounds; ++round) {
        touch(a);
        touch(b);
        for (Bytes& sum : sums) sum = add_products(sum, a, b);
    }
    for (Bytes& sum : sums) touch(sum);
    const int64_t products = CHAIRLIFT_ISA_LEVEL == 0 ? sizeof(Bytes) / 2 : sizeof(Bytes);
    return rounds * kSums * products * 2;
}

#if CHAIRLIFT_ISA_LEVEL == 0
using Floats = Vec;
CHAIRLIFT_INLINE Floats& inner(Vec& vec) { return vec; }
#else
using Floats = decltype(Vec::v);
CHAIRLIFT_INLINE Floats& inner(Vec& vec) { return vec.v; }
#ifdef __AVX512BF16__
CHAIRLIFT_INLINE __m512i& inner(Terms& terms) { return terms.v; }
#endif
#endif

int64_t multiply_add(int64_t rounds) {
    Vec a = splat(0.5F);
    Vec b = splat(0.25F);
    Vec sums[kSums];
    for (Vec& sum : sums) sum = zero();
    for (int64_t round = 0; round < rounds; ++round) {
        touch(inner(a));
        touch(inner(b));
        for (Vec& sum : sums) sum = fma(a, sum, b);  // tends to 0.5: never subnormal
    }
    for (Vec& sum : sums) touch(inner(sum));
    return rounds * kSums * kLanes * 2;
}

int64_t multiply_bf16(int64_t rounds) {
    const uint16_t zeros[2 * kLanes] = {};
    Terms a = load_terms(zeros, 0);
    Terms b = load_terms(zeros, 0);
    constexpr int kNumSums = kJoined == 2 ? 2 * kSums : kSums;  // the unit takes longer than an FMA
    Vec sums[kNumSums];
#pragma GCC unroll 24
    for (Vec& sum : sums) {
        sum = zero();
        touch(inner(sum));  // else all are one to the compiler
    }
    for (int64_t round = 0; round < rounds; ++round) {
        touch(inner(a));
        touch(inner(b));
#pragma GCC unroll 24
        for (Vec& sum : sums) sum = add_products(sum, a, b);
    }
#pragma GCC unroll 24
    for (Vec& sum : sums) touch(inner(sum));
    return rounds * kNumSums * kLanes * kJoined * 2;
}

}  // namespace

const PeakKernels peaks{dot, multiply_add, multiply_bf16};

}  // namespace chairlift::CHAIRLIFT_ISA_NS
