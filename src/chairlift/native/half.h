// Scalar conversions of 16-bit floats. `static`, so that every object has its own copy (see isa.h).
#pragma once

#include <stdint.h>
#include <string.h>

namespace chairlift {

static inline float bits_to_float(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static inline uint32_t float_to_bits(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

static inline float bf16_to_float(uint16_t half) { return bits_to_float(static_cast<uint32_t>(half) << 16); }

static inline float f16_to_float(uint16_t half) {
    const uint32_t sign = static_cast<uint32_t>(half & 0x8000U) << 16;
    const uint32_t rest = half & 0x7fffU;
    if (rest < 0x0400U) {  // zero and subnormals: multiples of 2^-24
        return bits_to_float(sign | float_to_bits(static_cast<float>(rest) * 0x1p-24F));
    }
    const uint32_t rebias = rest >= 0x7c00U ? 0x70000000U : 0x38000000U;  // 255 - 31, 127 - 15
    return bits_to_float(sign | ((rest << 13) + rebias));
}

// Rounds to nearest, ties to even, as the F16C instructions do.
static inline uint16_t float_to_f16(float value) {
    const uint32_t sign = (float_to_bits(value) >> 16) & 0x8000U;
    uint32_t rest = float_to_bits(value) & 0x7fffffffU;
    if (rest >= 0x47800000U) {  // 65536 and up, infinity, NaN
        return static_cast<uint16_t>(sign | (rest > 0x7f800000U ? 0x7e00U : 0x7c00U));
    }
    if (rest < 0x38800000U) {  // below 2^-14: the unit of 0.5F is 2^-24, so this addition rounds as f16 subnormals do
        return static_cast<uint16_t>(sign | (float_to_bits(bits_to_float(rest) + 0.5F) - float_to_bits(0.5F)));
    }
    rest += 0xfffU + ((rest >> 13) & 1U);
    return static_cast<uint16_t>(sign | ((rest - 0x38000000U) >> 13));
}

// Rounded to bf16 and widened again: to nearest, ties to even; a NaN stays one.
static inline float rounded_to_bf16(float value) {
    const uint32_t bits = float_to_bits(value);
    const uint32_t rounded = value == value ? bits + 0x7fffU + ((bits >> 16) & 1U) : bits | 0x400000U;
    return bits_to_float(rounded & 0xffff0000U);
}

}  // namespace chairlift
