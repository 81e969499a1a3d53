#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>
#include <vector>

#include "check.h"
#include "half.h"
#include "isa.h"
#include "kv.h"
#include "pack.h"

namespace chairlift {

namespace {

constexpr SourceType kTypes[] = {SourceType::f32,  SourceType::f16,  SourceType::bf16, SourceType::q8_0,
                                 SourceType::q4_0, SourceType::q4_1, SourceType::q5_0, SourceType::q5_1,
                                 SourceType::q4_k, SourceType::q5_k, SourceType::q6_k};

// File bytes of random weights; 16-bit scales are small and finite.
std::vector<uint8_t> random_weights(SourceType type, int64_t rows, int64_t cols, Random& random) {
    std::vector<uint8_t> bytes(static_cast<size_t>(rows * source_row_bytes(type, cols)));
    for (uint8_t& byte : bytes) byte = static_cast<uint8_t>(random.bits());
    const auto set = [&](size_t at, float value, bool wide) {
        uint32_t bits;
        std::memcpy(&bits, &value, sizeof bits);
        const auto half = static_cast<uint16_t>(type == SourceType::bf16 ? bits >> 16 : 0x2000 + random.below(0x400));
        std::memcpy(&bytes[at], wide ? static_cast<const void*>(&bits) : &half, wide ? 4 : 2);
    };
    const int64_t block_bytes = source_row_bytes(type, source_block(type));
    if (!takes_levels(layout_of(type))) {
        const size_t size = type == SourceType::f32 ? 4 : 2;
        for (size_t at = 0; at < bytes.size(); at += size) set(at, random.real(), size == 4);
    } else {
        for (size_t at = 0; at < bytes.size(); at += static_cast<size_t>(block_bytes)) {
            set(type == SourceType::q6_k ? at + 208 : at, 0.0F, false);
            if (level_shape(layout_of(type)).has_min) set(at + 2, 0.0F, false);
        }
    }
    return bytes;
}

PackedMatrix pack_random(SourceType type, int64_t rows, int64_t cols, Random& random) {
    const int64_t first = rows / 3;
    const std::vector<uint8_t> a = random_weights(type, first, cols, random);
    const std::vector<uint8_t> b = random_weights(type, rows - first, cols, random);
    std::vector<Source> sources;
    if (first > 0) sources.push_back({type, a.data(), first});
    sources.push_back({type, b.data(), rows - first});
    const ParallelFor in_turn = [](int n, const std::function<void(int)>& body) {
        for (int i = n; i-- > 0;) body(i);
    };
    return pack(sources, cols, in_turn, false);
}

// The level that lane i of rounded rows stands for, in one byte or two.
int level_of(const std::vector<int8_t>& q, size_t bytes, size_t i) {
    const size_t at = i / kScaleLanes * bytes * kScaleLanes + i % kScaleLanes;
    return bytes == 1 ? q[at] : 256 * q[at] + q[at + kScaleLanes];
}

// Rounded rows as the quantiser leaves them, or the same numbers as floats: of bf16 for a matrix of bf16.
struct RandomRows {
    RandomRows(const Kernels& kernels, Layout layout, int rows, int64_t cols, Random& random)
        : bytes(1 + static_cast<size_t>(random.below(2))),
          values(static_cast<size_t>(rows * cols)),
          sum(values.size() / kScaleLanes),
          half_sum(2 * sum.size()),
          offset(2 * sum.size()),
          scale(random.reals(sum.size())) {
        for (size_t i = 0; i < sum.size() && bytes == 1; ++i) {
            offset[2 * i] = offset[2 * i + 1] = static_cast<int16_t>(random.below(255) - 127);
        }
        q.resize(bytes * values.size());
        for (int8_t& byte : q) byte = static_cast<int8_t>(random.below(255) - 127);
        for (size_t i = 0; i < values.size(); ++i) {
            if (i / kScaleLanes >= sum.size()) {
                values[i] = random.real();
                continue;
            }
            const int level = level_of(q, bytes, i) + offset[2 * (i / kScaleLanes)];
            sum[i / kScaleLanes] += level;
            half_sum[2 * i / kScaleLanes] += level;
            values[i] = static_cast<float>(level) * scale[i / kScaleLanes];
        }
        if (layout == Layout::bf16) {
            for (float& value : values) value = rounded_to_bf16(value);
        }
        make_floats(kernels, layout, rows, cols);
    }

    // As the kernels take them, in rows of whole 16s.
    void make_floats(const Kernels& kernels, Layout layout, int rows, int64_t cols) {
        stride = (cols + 15) / 16 * 16;
        floats.resize(static_cast<size_t>(rows * stride));
        for (int r = 0; r < rows; ++r) {
            const float* const from = values.data() + r * cols;
            float* const to = floats.data() + r * stride;
            if (layout == Layout::bf16) {
                kernels.matmul_float.round(from, 0, static_cast<int>(cols), to);
            } else {
                std::copy_n(from, cols, to);
            }
        }
    }

    size_t bytes;
    std::vector<float> values;
    std::vector<float> floats;
    int64_t stride = 0;
    std::vector<int32_t> sum;
    std::vector<int32_t> half_sum;
    std::vector<int16_t> offset;
    std::vector<float> scale;
    std::vector<int8_t> q;
};

std::vector<float> product(const Kernels& kernels, const PackedMatrix& matrix, const RandomRows& x, int first, int rows) {
    const int64_t cols = matrix.cols();
    std::vector<float> out(static_cast<size_t>(rows * matrix.rows()));
    MatmulArgs args{};
    args.weights = matrix.view();
    const int64_t block = first * (cols / kScaleLanes);
    const int bytes = static_cast<int>(x.bytes);
    args.x = {x.floats.data() + first * x.stride, x.stride, bytes, x.q.data() + bytes * first * cols, x.scale.data() + block,
              x.offset.data() + 2 * block, x.sum.data() + block, x.half_sum.data() + 2 * block};
    args.num_rows = rows;
    args.out = out.data();
    args.out_stride = matrix.rows();
    const int64_t middle = matrix.num_panels() / 2;
    const MatmulFn run = kernels.product(matrix.layout());
    run(args, middle, matrix.num_panels());
    run(args, 0, middle);
    return out;
}

// Against the embedding decoder in f64, and row by row.
void check_product(const Kernels& kernels, const PackedMatrix& matrix, int rows, Random& random) {
    const RandomRows x(kernels, matrix.layout(), rows, matrix.cols(), random);
    const std::vector<float> out = product(kernels, matrix, x, 0, rows);
    std::vector<float> weights(static_cast<size_t>(matrix.cols()));
    for (int64_t n = 0; n < matrix.rows(); ++n) {
        embed_row(matrix.view(), n, weights.data());
        for (int r = 0; r < rows; ++r) {
            double expected = 0.0;
            double size = 1e-30;
            for (size_t k = 0; k < weights.size(); ++k) {
                const double term = double{x.values[static_cast<size_t>(r) * weights.size() + k]} * double{weights[k]};
                expected += term;
                size += std::fabs(term);
            }
            CHECK(std::fabs(double{out[static_cast<size_t>(r * matrix.rows() + n)]} - expected) <= 1e-5 * size);
        }
    }
    for (int r = 0; r < rows; ++r) {
        const std::vector<float> alone = product(kernels, matrix, x, r, 1);
        CHECK(std::equal(alone.begin(), alone.end(), out.begin() + r * matrix.rows()));
    }
}

SampleParams random_params(int vocab, Random& random) {
    SampleParams params{};
    params.temperature = random.below(4) == 0 ? 0.0F : 0.05F + 2.0F * std::fabs(random.real());
    params.top_p = random.below(2) == 0 ? 1.0F : std::fabs(random.real());
    params.min_p = random.below(2) == 0 ? 0.0F : std::fabs(random.real());
    params.repetition_penalty = 1.2F;
    params.presence_penalty = random.real();
    params.frequency_penalty = random.real();
    params.top_k = random.below(vocab + 5);
    params.num_top = random.below(kMaxTop + 2) - 1;
    params.target = random.below(3) == 0 ? random.below(vocab) : -1;
    params.seed = random.bits();
    return params;
}

void sample_once(const SampleKernels& kernels, Random& random) {
    const int vocab = 1 + random.below(700);
    std::vector<float> logits = random.reals(static_cast<size_t>(vocab));
    const float spread = static_cast<float>(random.below(4) * 10);
    for (float& logit : logits) logit = std::round(logit * 64.0F) / 64.0F * spread;
    const SampleParams params = random_params(vocab, random);
    std::vector<int32_t> seen(static_cast<size_t>(random.below(vocab + 1)));
    std::iota(seen.begin(), seen.end(), 0);
    const std::vector<int32_t> counts(seen.size(), random.below(3));
    const std::vector<float> bias(seen.size(), random.below(2) == 0 ? -INFINITY : 0.5F);
    const auto count = static_cast<int32_t>(seen.size());
    const bool spare = count == vocab;  // a row with every token banned has no answer
    const Adjustments adjustments{seen.data(), bias.data(), spare ? 0 : count, seen.data(), counts.data(), count};
    std::vector<float> scratch(2 * logits.size());
    const SampleResult result = reduce_logits(kernels, logits.data(), vocab, params, adjustments, scratch.data());
    CHECK(result.finite && result.token >= 0 && result.token < vocab);
    if (params.target < 0 && !spare && count > 0 && std::isinf(bias[0])) CHECK(result.token >= count);
    for (int i = 1; i < std::min(params.num_top, vocab); ++i) CHECK(result.top_logprobs[i] <= result.top_logprobs[i - 1]);
}

struct Sequence {
    KVShape shape;
    std::vector<uint8_t> layer;
    std::vector<int32_t> blocks;
};

// A cache that holds `length` random tokens in scattered blocks, no byte larger than readers may touch; what was never
// written is not a number.
Sequence random_sequence(const Kernels& kernels, const KVShape& shape, int length, Random& random) {
    const int num_blocks = (length + kBlockTokens - 1) / kBlockTokens;
    Sequence sequence{shape, {}, std::vector<int32_t>(static_cast<size_t>(num_blocks))};
    sequence.layer.resize(static_cast<size_t>(num_blocks) * shape.block_bytes + kCacheSlackBytes, 0xFF);
    for (int b = 0; b < num_blocks; ++b) sequence.blocks[static_cast<size_t>(b)] = num_blocks - 1 - b;
    const auto width = static_cast<size_t>(shape.num_kv_heads * shape.head_dim);
    for (int position = 0; position < length; ++position) {
        const std::vector<float> keys = random.reals(width);
        const std::vector<float> values = random.reals(width);
        const int32_t block = sequence.blocks[static_cast<size_t>(position / kBlockTokens)];
        kernels.attention.write({&sequence.shape, sequence.layer.data(), keys.data(), values.data(),
                                 block * kBlockTokens + position % kBlockTokens});
    }
    return sequence;
}

// A task in splits, the last first, each into memory of its own size.
std::vector<float> attend_in_splits(const AttentionKernels& kernels, AttendTask task, size_t num_floats) {
    std::vector<float> out(num_floats);
    task.out = out.data();
    const size_t floats = part_floats(task.shape->head_dim, task.num_rows * task.group_size);
    std::vector<float> parts;
    for (int split = num_splits(task); split-- > 0;) {
        std::vector<float> part(floats);
        kernels.attend_split(task, split, part.data());
        parts.insert(parts.begin(), part.begin(), part.end());
    }
    kernels.join(task, parts.data());
    return out;
}

// The last `rows` positions of a sequence: together, one by one, and in splits.
void attend_once(const Kernels& kernels, KVType type, int longest, Random& random) {
    const int head_dim = 8 * (1 + random.below(16));
    const int group = 1 + random.below(8);
    const int rows = 1 + random.below(kMaxTaskQueries / group);
    const int length = rows + random.below(longest);
    AttendParams params{.scale = 1.0F / std::sqrt(static_cast<float>(head_dim))};
    if (random.below(2) == 0) params.window = 1 + random.below(longest);
    if (random.below(4) == 0) params.softcap = 2.0F;
    const std::vector<float> sinks = random.reals(static_cast<size_t>(group));
    const bool with_sinks = random.below(4) == 0;
    const KVShape shape = kv_shape(type, 1 + random.below(3), head_dim);
    Sequence sequence = random_sequence(kernels, shape, length, random);
    const int stride = group * head_dim;
    const std::vector<float> queries = random.reals(static_cast<size_t>(rows * stride));
    const auto attend = [&](int first, int count) {
        std::vector<float> out(static_cast<size_t>(count * stride));
        const AttendTask task{&sequence.shape, sequence.layer.data(), sequence.blocks.data(), shape.num_kv_heads - 1,
                              group, count, length - rows + first, queries.data() + first * stride, stride, out.data(),
                              stride, params, with_sinks ? sinks.data() : nullptr};
        kernels.attention.attend(task);
        const std::vector<float> split = attend_in_splits(kernels.attention, task, out.size());
        CHECK(std::memcmp(split.data(), out.data(), sizeof(float) * out.size()) == 0);
        return out;
    };
    const std::vector<float> together = attend(0, rows);
    for (const float value : together) CHECK(std::fabs(value) <= 1.01F);  // a mean of values in [-1, 1)
    for (int row = 0; row < rows; ++row) {
        const std::vector<float> alone = attend(row, 1);
        CHECK(std::equal(alone.begin(), alone.end(), together.begin() + row * stride));
    }
    if (type == KVType::int8) {  // a last token that is not finite is its own row's matter
        const std::vector<float> bad(static_cast<size_t>(shape.num_kv_heads * head_dim), INFINITY);
        kernels.attention.write({&sequence.shape, sequence.layer.data(), bad.data(), bad.data(),
                                 sequence.blocks.back() * kBlockTokens + (length - 1) % kBlockTokens});
        const std::vector<float> poisoned = attend(0, rows);
        CHECK(std::equal(poisoned.begin(), poisoned.end() - stride, together.begin()));
        for (int lane = 0; lane < stride; ++lane) CHECK(std::isnan(poisoned.end()[lane - stride]));
    }
}

// Where the levels of an int8 token lie, and its scales.
void check_int8_record(const Kernels& kernels, int head_dim, Random& random) {
    const KVShape shape = kv_shape(KVType::int8, 1, head_dim);
    std::vector<uint8_t> layer(shape.block_bytes + kCacheSlackBytes);
    std::vector<float> key(static_cast<size_t>(head_dim));
    std::vector<float> value(key.size());
    for (float& level : key) level = static_cast<float>(random.below(255) - 127);
    for (float& level : value) level = static_cast<float>(random.below(255) - 127);
    key.back() = 127.0F;
    value[0] = -127.0F;
    const int token = random.below(kBlockTokens);
    kernels.attention.write({&shape, layer.data(), key.data(), value.data(), token});
    for (int lane = 0; lane < head_dim; ++lane) {
        const uint8_t kept_key = layer[static_cast<size_t>((lane / 4 * kBlockTokens + token) * 4 + lane % 4)];
        const int at = (token / 2 * head_dim + lane) * 2 + token % 2;
        const uint8_t kept_value = layer[shape.value_offset + static_cast<size_t>(at)];
        CHECK(static_cast<float>(kept_key - 128) == key[static_cast<size_t>(lane)]);
        CHECK(static_cast<float>(static_cast<int8_t>(kept_value)) == value[static_cast<size_t>(lane)]);
    }
    const auto* const scales = reinterpret_cast<const float*>(layer.data() + shape.scale_offset);
    CHECK(scales[token] == 1.0F && scales[kBlockTokens + token] == 1.0F);
}

void rows_once(const ElementwiseKernels& kernels, Random& random) {
    const int n = 1 + random.below(300);
    const auto size = static_cast<size_t>(n);
    const std::vector<float> x = random.reals(size);
    const std::vector<float> y = random.reals(size);
    std::vector<float> out(size);
    kernels.scale(x.data(), y.data(), kernels.inverse_rms(x.data(), n, 1e-5F), n, out.data());
    pair_by_name(kernels, "silu")(x.data(), y.data(), n, out.data());
    for (size_t i = 0; i < size; ++i) {
        const double gate = x[i];
        CHECK(std::fabs(double{out[i]} - gate / (1.0 + std::exp(-gate)) * double{y[i]}) <= 1e-6);
    }
    pair_by_name(kernels, "gelu_tanh")(x.data(), y.data(), n, out.data());
    for (size_t i = 0; i < size; ++i) {
        const double gate = x[i];
        const double inner = std::sqrt(2.0 / std::acos(-1.0)) * (gate + 0.044715 * gate * gate * gate);
        CHECK(std::fabs(double{out[i]} - gate / 2.0 * (1.0 + std::tanh(inner)) * double{y[i]}) <= 1e-6);
    }
    pair_by_name(kernels, "add")(x.data(), y.data(), n, out.data());
    for (size_t i = 0; i < size; ++i) CHECK(out[i] == x[i] + y[i]);
}

void quantise_once(const ElementwiseKernels& kernels, Random& random) {
    const size_t bytes = 1 + static_cast<size_t>(random.below(2));
    const size_t blocks = 1 + static_cast<size_t>(random.below(40));
    std::vector<float> x = random.reals(blocks * kScaleLanes);
    if (random.below(4) == 0) x[0] = std::nanf("");
    if (random.below(4) == 0) std::fill(x.begin(), x.begin() + kScaleLanes, 0.0F);
    std::vector<int8_t> q(bytes * x.size());
    std::vector<float> scales(blocks);
    std::vector<int16_t> offsets(2 * blocks);
    std::vector<int32_t> sums(blocks);
    std::vector<int32_t> half_sums(2 * blocks);
    kernels.quantise[bytes - 1](x.data(), static_cast<int>(x.size()), {q.data(), scales.data(), offsets.data(), sums.data(), half_sums.data()});
    std::vector<int32_t> expected(blocks);
    std::vector<int32_t> expected_halves(2 * blocks);
    for (size_t i = 0; i < x.size(); ++i) {
        const int offset = bytes == 1 ? offsets[2 * (i / kScaleLanes)] : 0;
        expected[i / kScaleLanes] += level_of(q, bytes, i) + offset;
        expected_halves[2 * i / kScaleLanes] += level_of(q, bytes, i) + offset;
        CHECK(std::abs(level_of(q, bytes, i)) <= (bytes == 1 ? 127 : 127 * 256));
    }
    CHECK(sums == expected);
    CHECK(half_sums == expected_halves);
}

void rope_once(const ElementwiseKernels& kernels, Random& random) {
    const int head_dim = 8 * (1 + random.below(12));
    const int pairs = 1 + random.below(head_dim / 2);
    const int heads = 1 + random.below(4);
    const std::vector<float> x = random.reals(static_cast<size_t>(heads * head_dim));
    const std::vector<float> cosines = random.reals(static_cast<size_t>(pairs));
    const std::vector<float> sines = random.reals(static_cast<size_t>(pairs));
    const RopeRow rope{cosines.data(), sines.data(), pairs, heads, head_dim, random.below(2) == 0};
    std::vector<float> out(x.size());
    kernels.rope(x.data(), rope, out.data());
    std::vector<float> in_place = x;
    kernels.rope(in_place.data(), rope, in_place.data());
    CHECK(in_place == out);
}

}  // namespace

void check_matmul() {
    for (const Isa isa : available_isas()) {
        Random random(2);
        for (const SourceType type : kTypes) {
            for (int i = 0; i < 12; ++i) {
                const bool blocks = takes_levels(layout_of(type));
                const int block = source_block(type);
                const int64_t cols = blocks ? block * (1 + random.below(192 / block + 1)) : 1 + random.below(150);
                const PackedMatrix matrix = pack_random(type, 1 + random.below(60), cols, random);
                check_product(kernels(isa), matrix, 1 + random.below(19), random);
            }
        }
    }
}

void check_sampling() {
    for (const Isa isa : available_isas()) {
        Random random(3);
        for (int i = 0; i < 400; ++i) sample_once(kernels(isa).sample, random);
    }
}

void check_rows() {
    for (const Isa isa : available_isas()) {
        Random random(4);
        for (int i = 0; i < 200; ++i) {
            rows_once(kernels(isa).elementwise, random);
            quantise_once(kernels(isa).elementwise, random);
            rope_once(kernels(isa).elementwise, random);
        }
    }
}

void check_attention() {
    for (const Isa isa : available_isas()) {
        Random random(5);
        for (int i = 0; i < 64; ++i) {
            const int longest = i < 60 ? 200 : 3 * kSplitPositions;
            attend_once(kernels(isa), i % 2 == 0 ? KVType::bf16 : KVType::int8, longest, random);
        }
        for (int head_dim = 8; head_dim <= kMaxHeadDim; head_dim += 8) check_int8_record(kernels(isa), head_dim, random);
    }
}

}  // namespace chairlift
