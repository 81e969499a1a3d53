// The loops of elementwise.h on vectors. Compiled once per ISA level; see isa.h for what such a source may use.
#include "elementwise.h"

#include <math.h>
#include <string.h>

#include "simd.h"

namespace chairlift::CHAIRLIFT_ISA_NS {
namespace {

constexpr int kScaleLanes = 32;
constexpr int kHalfLanes = 16;
constexpr float kZeros[kScaleLanes] = {};

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

// The ranges of some groups' lanes and 0, each as its largest and its negated smallest lane; NaN when a lane is not finite.
void find_ranges(const float* x, int groups, float* tops, float* bottoms) {
    for (int group = 0; group < groups; ++group, x += kScaleLanes) {
        Vec top = zero();
        Vec bottom = zero();
        Vec doubt = zero();  // x - x is 0 for a finite x, else NaN
        for (int i = 0; i < kScaleLanes; i += kLanes) {
            const Vec v = load(x + i);
            top = max(top, v);
            bottom = max(bottom, zero() - v);
            doubt = doubt + (v - v);
        }
        float both[2];
        max_lanes(top, bottom, both);
        const bool finite = at_least(zero(), doubt) == at_least(zero(), zero());
        tops[group] = finite ? both[0] : NAN;
        bottoms[group] = finite ? both[1] : NAN;
    }
}

// One group's levels; see quant.quantise_rows. Sums of levels below 2^24 are exact in floats.
template <int kBytes>
void write_levels(const float* x, float inverse, float offset, const RoundedLanes& out) {
    Vec halves[2] = {zero(), zero()};
    for (int i = 0; i < kScaleLanes; i += kLanes) {
        Vec level = round(load(x + i) * splat(inverse));
        if constexpr (kBytes == 1) {
            const Vec q = max(splat(-127.0F), min(splat(127.0F), level - splat(offset)));
            store_i8(out.q + i, q);
            level = q + splat(offset);
        } else {
            const Vec high = round((level + splat(0.5F)) * splat(1.0F / 256.0F));  // ties go up: low stays within int8
            store_i8(out.q + i, high);
            store_i8(out.q + kScaleLanes + i, level - high * splat(256.0F));
        }
        halves[i / kHalfLanes] = halves[i / kHalfLanes] + level;
    }
    float both[2];
    sums(halves[0], halves[1], both);
    out.offsets[0] = out.offsets[1] = static_cast<int16_t>(offset);
    out.half_sums[0] = static_cast<int32_t>(both[0]);
    out.half_sums[1] = static_cast<int32_t>(both[1]);
    *out.sums = out.half_sums[0] + out.half_sums[1];
}

// Up to kLanes groups, so that scales, which take divisions, are made for all at once.
template <int kBytes>
void quantise_groups(const float* x, int groups, const RoundedLanes& out) {
    constexpr float kSteps = kBytes == 1 ? 254.0F : 127.0F * 256.0F;  // the largest level of two bytes has 127 and 0
    alignas(64) float tops[kLanes];
    alignas(64) float bottoms[kLanes];
    alignas(64) float inverses[kLanes];
    alignas(64) float offsets[kLanes];
    find_ranges(x, groups, tops, bottoms);
    const Vec top = load(tops, groups);
    const Vec bottom = load(bottoms, groups);
    const Vec width = kBytes == 1 ? top + bottom : max(top, bottom);
    const Vec inverse = splat(kSteps) / width;
    store(out.scales, width / splat(kSteps), groups);
    store(inverses, inverse);
    store(offsets, kBytes == 1 ? round((top - bottom) * splat(0.5F) * inverse) : zero());
    for (int b = 0; b < groups; ++b) {
        const RoundedLanes at{out.q + b * kBytes * kScaleLanes, nullptr, out.offsets + 2 * b, out.sums + b, out.half_sums + 2 * b};
        // A group that is all zero, or so small that this overflows, or not finite, has levels of 0.
        const bool usable = isfinite(inverses[b]);
        write_levels<kBytes>(usable ? x + b * kScaleLanes : kZeros, usable ? inverses[b] : 0.0F, usable ? offsets[b] : 0.0F, at);
    }
}

template <int kBytes>
void quantise(const float* x, int n, const RoundedLanes& out) {
    const int groups = n / kScaleLanes;
    for (int first = 0; first < groups; first += kLanes) {
        const RoundedLanes at{out.q + first * kBytes * kScaleLanes, out.scales + first, out.offsets + 2 * first, out.sums + first,
                              out.half_sums + 2 * first};
        quantise_groups<kBytes>(x + first * kScaleLanes, lanes_left(groups, first), at);
    }
}

// gate / (1 + exp(-gate)) * up.
void gate_silu(const float* gate, const float* up, int n, float* out) {
    for (int i = 0; i < n; i += kLanes) {
        const int left = lanes_left(n, i);
        const Vec g = load(gate + i, left);
        const Vec silu = g / (splat(1.0F) + exp(zero() - g));
        store(out + i, silu * load(up + i, left), left);
    }
}

// gate / (1 + exp(-2 sqrt(2 / pi) (gate + 0.044715 gate^3))) * up.
void gate_gelu_tanh(const float* gate, const float* up, int n, float* out) {
    for (int i = 0; i < n; i += kLanes) {
        const int left = lanes_left(n, i);
        const Vec g = load(gate + i, left);
        const Vec cubic = g * fma(g * g, splat(0.044715F), splat(1.0F));
        const Vec gelu = g / (splat(1.0F) + exp(cubic * splat(-1.59576912F)));
        store(out + i, gelu * load(up + i, left), left);
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

static constexpr NamedPairFn pairs[] = {
    {"add", add},
    {"gelu_tanh", gate_gelu_tanh},
    {"silu", gate_silu},
    {nullptr, nullptr},
};

const ElementwiseKernels elementwise_kernels = {inverse_rms, scale, {quantise<1>, quantise<2>}, rope, pairs};

}  // namespace chairlift::CHAIRLIFT_ISA_NS
