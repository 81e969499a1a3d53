#include "formats.h"

#include <string.h>

#include <iterator>
#include <stdexcept>
#include <string>

#include "half.h"

namespace chairlift {

namespace {

uint16_t half_at(const uint8_t* p) {
    uint16_t value;
    memcpy(&value, p, sizeof value);
    return value;
}

// A 16-bit float times a small integer, rounded to 16 bits.
uint16_t scaled(uint16_t half, float factor) { return float_to_f16(f16_to_float(half) * factor); }

// Lane j of 32 is the low half of byte j, lane j + 16 its high half.
void read_nibbles(const uint8_t* packed, uint8_t* q) {
    for (int j = 0; j < 16; ++j) {
        q[j] = packed[j] & 15;
        q[j + 16] = packed[j] >> 4;
    }
}

// Bit j of four bytes is the fifth of lane j.
void add_fifth_bits(const uint8_t* packed, uint8_t* q) {
    uint32_t bits;
    memcpy(&bits, packed, sizeof bits);
    for (int j = 0; j < kScaleLanes; ++j) q[j] = static_cast<uint8_t>(q[j] | ((bits >> j & 1U) << 4));
}

void q8_0(const uint8_t* block, Levels* out) {
    out->scales[0] = half_at(block);
    for (int j = 0; j < kScaleLanes; ++j) out->q[j] = block[2 + j] ^ 0x80;  // q + 128
}

void q4_0(const uint8_t* block, Levels* out) {
    out->scales[0] = half_at(block);
    read_nibbles(block + 2, out->q);
}

void q4_1(const uint8_t* block, Levels* out) {
    out->scales[0] = half_at(block);
    out->min = half_at(block + 2);
    read_nibbles(block + 4, out->q);
}

void q5_0(const uint8_t* block, Levels* out) {
    out->scales[0] = half_at(block);
    read_nibbles(block + 6, out->q);
    add_fifth_bits(block + 2, out->q);
}

void q5_1(const uint8_t* block, Levels* out) {
    out->scales[0] = half_at(block);
    out->min = half_at(block + 2);
    read_nibbles(block + 8, out->q);
    add_fifth_bits(block + 4, out->q);
}

// The scales and minima of Q4_K and Q5_K: two floats, then 6 bits of each for eight sub-blocks (quant.py has the picture).
void read_k_scales(const uint8_t* block, Levels* out) {
    const uint16_t d = half_at(block);
    const uint16_t dmin = half_at(block + 2);
    const uint8_t* const low = block + 4;
    const uint8_t* const high = block + 8;
    const uint8_t* const rest = block + 12;
    const auto set = [&](Levels& levels, int scale, int min) {
        levels.scales[0] = scaled(d, static_cast<float>(scale));
        levels.min = scaled(dmin, -static_cast<float>(min));
    };
    for (int s = 0; s < 4; ++s) {
        set(out[s], low[s] & 63, high[s] & 63);
        set(out[s + 4], (rest[s] & 15) | (low[s] >> 2 & 0x30), rest[s] >> 4 | (high[s] >> 2 & 0x30));
    }
}

// Sub-blocks 2p and 2p + 1 are the low and the high halves of the same 32 bytes.
void read_k_nibbles(const uint8_t* packed, Levels* out) {
    for (int s = 0; s < 8; ++s) {
        for (int j = 0; j < kScaleLanes; ++j) out[s].q[j] = packed[s / 2 * kScaleLanes + j] >> 4 * (s % 2) & 15;
    }
}

void q4_k(const uint8_t* block, Levels* out) {
    read_k_scales(block, out);
    read_k_nibbles(block + 16, out);
}

void q5_k(const uint8_t* block, Levels* out) {
    read_k_scales(block, out);
    read_k_nibbles(block + 48, out);
    const uint8_t* const fifth = block + 16;  // bit s of byte j is that of lane j in sub-block s
    for (int s = 0; s < 8; ++s) {
        for (int j = 0; j < kScaleLanes; ++j) out[s].q[j] = static_cast<uint8_t>(out[s].q[j] | (fifth[j] >> s & 1) << 4);
    }
}

// Two halves of 128 weights: 64 bytes of nibbles and 32 bytes of upper pairs of bits each; a signed scale per 16 weights.
void q6_k(const uint8_t* block, Levels* out) {
    const uint8_t* const scales = block + 192;
    const uint16_t d = half_at(block + 208);
    for (int s = 0; s < 8; ++s) {
        const uint8_t* const nibbles = block + s / 4 * 64 + s % 2 * kScaleLanes;
        const uint8_t* const pairs = block + 128 + s / 4 * kScaleLanes;
        const int nibble_shift = s % 4 / 2 * 4;
        const int pair_shift = s % 4 * 2;
        for (int j = 0; j < kScaleLanes; ++j) {
            out[s].q[j] = static_cast<uint8_t>((nibbles[j] >> nibble_shift & 15) | (pairs[j] >> pair_shift & 3) << 4);
        }
        for (int i = 0; i < 2; ++i) out[s].scales[i] = scaled(d, static_cast<float>(static_cast<int8_t>(scales[2 * s + i])));
    }
}

// GGML's formats (ggml-common.h).
struct Format {
    std::string_view name;
    Layout layout;
    int block;        // weights per block
    int block_bytes;
    void (*decode)(const uint8_t* block, Levels* out);  // null for float types
};

constexpr Format kFormats[] = {
    {"F32", Layout::f32, 1, 4, nullptr},       {"F16", Layout::f16, 1, 2, nullptr},
    {"BF16", Layout::bf16, 1, 2, nullptr},     {"Q8_0", Layout::w8, 32, 34, q8_0},
    {"Q4_0", Layout::w4, 32, 18, q4_0},        {"Q4_1", Layout::w4_min, 32, 20, q4_1},
    {"Q5_0", Layout::w5, 32, 22, q5_0},        {"Q5_1", Layout::w5_min, 32, 24, q5_1},
    {"Q4_K", Layout::w4_min, 256, 144, q4_k},  {"Q5_K", Layout::w5_min, 256, 176, q5_k},
    {"Q6_K", Layout::w6, 256, 210, q6_k},
};

const Format& format_of(SourceType type) { return kFormats[static_cast<size_t>(type)]; }

}  // namespace

SourceType source_type(std::string_view name) {
    for (size_t i = 0; i < std::size(kFormats); ++i) {
        if (kFormats[i].name == name) return static_cast<SourceType>(i);
    }
    throw std::invalid_argument("weight type " + std::string(name) + " cannot be packed");
}

Layout layout_of(SourceType type) { return format_of(type).layout; }

int source_block(SourceType type) { return format_of(type).block; }

int64_t source_row_bytes(SourceType type, int64_t cols) {
    const Format& format = format_of(type);
    return cols / format.block * format.block_bytes;
}

void decode_block(SourceType type, const uint8_t* block, Levels* out) { format_of(type).decode(block, out); }

}  // namespace chairlift
