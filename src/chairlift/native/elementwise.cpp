// Compiled once per ISA level; see isa.h for what such a source may use.
#include "elementwise.h"

#include <math.h>
#include <string.h>

#include "simd.h"

namespace chairlift::CHAIRLIFT_ISA_NS {
namespace {

constexpr int kQuantBlock = 32;
constexpr int kHalfBlock = 16;
constexpr float kLargest = 127.0F * 256.0F;  // the level of a block's largest lane: its high byte is 127, its low byte 0

int lanes_left(int n, int i) { return n - i < kLanes ? n - i : kLanes; }

float inverse_rms(const float* x, int n, float eps) {
    Vec squares = zero();
    for (int i = 0; i < n; i += kLanes) {
        const Vec v = load(x + i, lanes_left(n, i));
        squares = fma(v, v, squares);
    }
    return 1.0F / sqrtf(sum(squares) / static_cast<float>(n) + eps);
}

void scale(const float* x, const float* weight, float factor, int n, float* out) {
    const Vec f = splat(factor);
    for (int i = 0; i < n; i += kLanes) {
        const int left = lanes_left(n, i);
        store(out + i, load(x + i, left) * f * load(weight + i, left), left);
    }
}

void quantise_block(const float* x, int8_t* q, float* scale, int32_t* total, int32_t* halves) {
    Vec largest = zero();
    Vec doubt = zero();  // x - x is 0 for a finite x, else NaN
    for (int i = 0; i < kQuantBlock; i += kLanes) {
        const Vec v = load(x + i);
        largest = max(largest, abs(v));
        doubt = doubt + (v - v);
    }
    const float amax = max_lane(largest) + sum(doubt);
    *scale = amax / kLargest;
    const float inverse = kLargest / amax;
    if (!isfinite(inverse)) {  // all zero, so small that kLargest / amax overflows, or not finite
        memset(q, 0, 2 * kQuantBlock);
        *total = halves[0] = halves[1] = 0;
        return;
    }
    Vec level_sums[2] = {zero(), zero()};  // of integers below 2^24: exact
    for (int i = 0; i < kQuantBlock; i += kLanes) {
        const Vec level = round(load(x + i) * splat(inverse));
        const Vec high = round((level + splat(0.5F)) * splat(1.0F / 256.0F));  // ties go up: low stays within int8
        store_i8(q + i, high);
        store_i8(q + kQuantBlock + i, level - high * splat(256.0F));
        level_sums[i / kHalfBlock] = level_sums[i / kHalfBlock] + level;
    }
    for (int half = 0; half < 2; ++half) halves[half] = static_cast<int32_t>(sum(level_sums[half]));
    *total = halves[0] + halves[1];
}

void quantise(const float* x, int n, int8_t* q, float* scales, int32_t* sums, int32_t* half_sums) {
    for (int block = 0; block < n / kQuantBlock; ++block) {
        const int i = block * kQuantBlock;
        quantise_block(x + i, q + 2 * i, scales + block, sums + block, half_sums + 2 * block);
    }
}

void swiglu(const float* gate, const float* up, int n, float* out) {
    for (int i = 0; i < n; i += kLanes) {
        const int left = lanes_left(n, i);
        const Vec g = load(gate + i, left);
        const Vec silu = g / (splat(1.0F) + exp(zero() - g));
        store(out + i, silu * load(up + i, left), left);
    }
}

void add(const float* a, const float* b, int n, float* out) {
    for (int i = 0; i < n; i += kLanes) {
        const int left = lanes_left(n, i);
        store(out + i, load(a + i, left) + load(b + i, left), left);
    }
}

void rotate_interleaved(const float* x, const RopeRow& rope, float* out) {
    for (int i = 0; i < rope.num_pairs; ++i) {
        const float a = x[2 * i];
        const float b = x[2 * i + 1];
        out[2 * i] = a * rope.cosines[i] - b * rope.sines[i];
        out[2 * i + 1] = a * rope.sines[i] + b * rope.cosines[i];
    }
}

void rotate_halves(const float* x, const RopeRow& rope, float* out) {
    const int half = rope.num_pairs;
    for (int i = 0; i < half; i += kLanes) {
        const int left = lanes_left(half, i);
        const Vec a = load(x + i, left);
        const Vec b = load(x + half + i, left);
        const Vec cosine = load(rope.cosines + i, left);
        const Vec sine = load(rope.sines + i, left);
        store(out + i, a * cosine - b * sine, left);
        store(out + half + i, a * sine + b * cosine, left);
    }
}

void rope(const float* x, const RopeRow& rope, float* out) {
    const int turned = 2 * rope.num_pairs;
    for (int head = 0; head < rope.num_heads; ++head, x += rope.head_dim, out += rope.head_dim) {
        if (rope.interleaved) {
            rotate_interleaved(x, rope, out);
        } else {
            rotate_halves(x, rope, out);
        }
        if (out != x) memcpy(out + turned, x + turned, sizeof(float) * static_cast<size_t>(rope.head_dim - turned));
    }
}

}  // namespace

const ElementwiseKernels elementwise_kernels = {inverse_rms, scale, quantise, swiglu, add, rope};

}  // namespace chairlift::CHAIRLIFT_ISA_NS
