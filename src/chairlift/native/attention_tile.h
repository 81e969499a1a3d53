// Some queries against one tile of the cache: scores, softmax weights, weighted sums. Included by attention.cpp alone.
#pragma once

#include <math.h>
#include <string.h>

#include "attention.h"
#include "simd_bf16.h"
#include "simd_i8.h"

namespace chairlift::CHAIRLIFT_ISA_NS {
namespace {

// A bundle of queries meets kWide vectors of K or V at a time. Its kMaxBundle * kWide sums and their inputs fill the level's
// registers: 32 with AVX-512, 16 elsewhere.
constexpr int kWide = CHAIRLIFT_ISA_LEVEL == 2 ? 4 : 2;
constexpr int kMaxBundle = CHAIRLIFT_ISA_LEVEL == 0 ? 4 : 6;
constexpr int kBlockVecs = kBlockTokens / kLanes;  // vectors that hold one lane of a block's keys
constexpr int kWideBlocks = kWide / kBlockVecs;
constexpr int kTileBlocks = kTilePositions / kBlockTokens;
constexpr int kLineBytes = 64;
constexpr int kParts = 2 / kJoined;  // steps that multiply a pair
constexpr int kKeyZero = 128;        // of int8 keys: the instructions multiply unsigned bytes by signed ones
constexpr float kInverseLn2 = 1.44269504F;
constexpr float kMostWord = 32767.0F;
constexpr float kLeastWeight = 1.17549435e-38F;  // the least that exp2 gives above 0
static_assert(kBlockTokens % kLanes == 0 && kTileBlocks % kWideBlocks == 0 && kTilePositions % (2 * kLanes) == 0);
static_assert(kMaxBundle <= kLanes);

// Where a lane of a token's values lies in their plane: two tokens side by side.
int value_index(int token, int width, int lane) { return (token / 2 * width + lane) * 2 + token % 2; }

// How a type is kept and multiplied. Keys are lines of 64 bytes, kLineLanes lanes of a block's 16 tokens; they meet the same
// lanes of a query in kLineSteps steps of kStepLanes. Values are pairs of tokens; they meet two weights in kPairSteps steps.
struct Bf16 {
    using Element = uint16_t;
    using Query = Factor;
    using Weight = Factor;
    using Keys = Terms;
    using Values = Terms;
    using Sums = Vec;
    static constexpr bool kScaled = false;
    static constexpr int kLineLanes = 2;
    static constexpr int kLineSteps = kParts;
    static constexpr int kStepLanes = kJoined;
    static constexpr int kPairSteps = kParts;

    CHAIRLIFT_INLINE Vec start(int32_t) { return zero(); }
    // A step's lanes of the kLanes tokens from kLanes * `part` on.
    CHAIRLIFT_INLINE Terms keys(const uint8_t* line, int step, int part) {
        return load_terms(reinterpret_cast<const Element*>(line) + part * kLanes * 2, step);
    }
    CHAIRLIFT_INLINE Terms values(const Element* pairs, int step) { return load_terms(pairs, step); }
    CHAIRLIFT_INLINE Vec add_keys(Vec sums, Terms keys, const Query* query) {
        return add_products(sums, splat_terms(query), keys);
    }
    CHAIRLIFT_INLINE Vec add_values(Vec sums, Terms values, const Weight* weights) {
        return add_products(sums, splat_terms(weights), values);
    }
};
struct Int8 {
    using Element = uint8_t;
    using Query = Level;
    using Weight = Word;
    using Keys = Quads;
    using Values = Words;
    using Sums = Ints;
    static constexpr bool kScaled = true;
    static constexpr int kLineLanes = kQuadLanes;
    static constexpr int kLineSteps = kQuadSteps;
    static constexpr int kStepLanes = kQuadLanes / kQuadSteps;
    static constexpr int kPairSteps = kWordSteps;

    // Keys are kept with kKeyZero added: this takes it off again.
    CHAIRLIFT_INLINE Ints start(int32_t level_sum) { return splat_int(-kKeyZero * level_sum); }
    CHAIRLIFT_INLINE Quads keys(const uint8_t* line, int step, int part) {
        return load_quads(line + part * kLanes * kQuadLanes, step);
    }
    CHAIRLIFT_INLINE Words values(const Element* pairs, int step) {
        return load_words(reinterpret_cast<const int8_t*>(pairs), step);
    }
    CHAIRLIFT_INLINE Ints add_keys(Ints sums, Quads keys, const Query* query) { return add_quads(sums, keys, query); }
    CHAIRLIFT_INLINE Ints add_values(Ints sums, Words values, const Weight* weights) {
        return add_words(sums, values, weights);
    }
};

// Where a lane of a token's key lies in their plane.
template <class Cell>
int key_index(int lane, int token) {
    return (lane / Cell::kLineLanes * kBlockTokens + token) * Cell::kLineLanes + lane % Cell::kLineLanes;
}

float exp2_of(float x) {
    float lanes[kLanes];
    store(lanes, exp2(splat(x)));
    return lanes[0];
}

int num_queries(const AttendTask& task) { return task.num_rows * task.group_size; }

// The online softmax of each of a task's queries over the positions of a split seen so far: a view of part_floats().
// Scores are in units of ln 2, so that 2^x takes the place of e^x.
template <class Float>
struct State {
    Float* max;
    Float* sum;
    Float* values;  // (query, dim), the lanes beyond head_dim without meaning
    int dim;

    State(Float* part, const AttendTask& task)
        : max(part),
          sum(max + num_queries(task)),
          values(sum + num_queries(task)),
          dim((task.shape->head_dim + kLanes - 1) / kLanes * kLanes) {}
};

// A tile's records, one per block, and those of the next tile.
//
// A processor drops a prefetch when too many are on their way, and the loops of one bundle ask faster than memory answers. So
// each line is asked for twice: keys of the next tile with this tile's keys, and again with its values; values with the last
// tile's values, and again with this tile's keys. Later bundles find the tile in L1, and the last of them asks for the next tile.
struct Tile {
    const uint8_t* records[kTileBlocks];
    const uint8_t* next[kTileBlocks];
    int first_position;
    int num_positions;  // that any row of the task reads
    bool fetch_far;     // the next tile
    bool fetch_near;    // what this one's next loop reads
};

// A bundle's queries, rounded: (step of a line, query, lane of the step), so that what meets a vector of keys lies side by side.
template <class Cell>
struct BundleQueries {
    const typename Cell::Query* lanes;
    const float* scales;  // of int8, as the sums of their levels
    const int32_t* level_sums;
};

template <class Cell, int kBundle>
struct Bundle {
    using Element = typename Cell::Element;

    const AttendTask& task;
    const Tile& tile;
    const State<float>& state;
    int first_query;
    alignas(kLineBytes) float scores[kBundle][kTilePositions];
    alignas(kLineBytes) typename Cell::Weight weights[kBundle][kTilePositions];
    float weight_scales[kBundle];  // of int8
    float carry[kLanes];  // what the new maximum leaves of the sums so far

    Bundle(const AttendTask& of, const Tile& on, const State<float>& into, int first)
        : task(of), tile(on), state(into), first_query(first) {}

    Vec scales(int position, int which) const {
        const uint8_t* const at = tile.records[position / kBlockTokens] + task.shape->scale_offset;
        return load(reinterpret_cast<const float*>(at) + which * kBlockTokens + position % kBlockTokens);
    }

    // Scores of kWideBlocks blocks from `first` on.
    void score(const BundleQueries<Cell>& queries, int first) {
        typename Cell::Sums dots[kBundle][kWide];
        for (int i = 0; i < kBundle; ++i) {
            for (auto& dot : dots[i]) dot = Cell::start(queries.level_sums[i]);
        }
        const auto* query = queries.lanes;
        const bool far = tile.fetch_far;
        const bool near = tile.fetch_near;
        const size_t num_bytes = static_cast<size_t>(task.shape->head_dim) * (kLineBytes / Cell::kLineLanes);
        for (size_t line = 0; line < num_bytes; line += kLineBytes) {
            if (far) {
                for (int b = 0; b < kWideBlocks; ++b) prefetch(tile.next[first + b] + line);
            }
            if (near) {
                for (int b = 0; b < kWideBlocks; ++b) prefetch(tile.records[first + b] + task.shape->value_offset + line);
            }
#pragma GCC unroll 4
            for (int step = 0; step < Cell::kLineSteps; ++step, query += kBundle * Cell::kStepLanes) {
                typename Cell::Keys keys[kWide];
#pragma GCC unroll 4
                for (int v = 0; v < kWide; ++v) {
                    keys[v] = Cell::keys(tile.records[first + v / kBlockVecs] + line, step, v % kBlockVecs);
                }
#pragma GCC unroll 6
                for (int i = 0; i < kBundle; ++i) {
#pragma GCC unroll 4
                    for (int v = 0; v < kWide; ++v) {
                        dots[i][v] = Cell::add_keys(dots[i][v], keys[v], query + i * Cell::kStepLanes);
                    }
                }
            }
        }
        for (int v = 0; v < kWide; ++v) {
            const int at = first * kBlockTokens + v * kLanes;
            for (int i = 0; i < kBundle; ++i) {
                if constexpr (Cell::kScaled) {
                    store(scores[i] + at, to_float(dots[i][v]) * (scales(at, 0) * splat(queries.scales[i])));
                } else {
                    store(scores[i] + at, dots[i][v]);
                }
            }
        }
    }

    // The tile's positions [first, end) that a query reads; none where end is not above first.
    struct Visible {
        int first;
        int end;
    };

    Visible visible(int query) const {
        const int position = task.first_position + query / task.group_size;
        const int first = first_read(task.params, position) - tile.first_position;
        const int end = position + 1 - tile.first_position;
        return {first > 0 ? first : 0, end < tile.num_positions ? end : tile.num_positions};
    }

    // softcap * tanh(score / softcap), of a tile's scores in units of ln 2: tanh(x) is (e^2x - 1) / (e^2x + 1).
    void cap(float* s) const {
        const float softcap = task.params.softcap * kInverseLn2;
        const Vec factor = splat(2.0F / softcap);
        for (int t = 0; t < kTilePositions; t += kLanes) {
            const Vec power = exp(load(s + t) * factor);
            store(s + t, splat(softcap) * ((power - splat(1.0F)) / (power + splat(1.0F))));
        }
    }

    // Turns the scores of one query into weights; those of positions that it does not read into exactly 0. Returns the maximum.
    float soften(int i, Visible visible, float* total) {
        float* const s = scores[i];
        if (task.params.softcap > 0.0F) cap(s);
        for (int t = 0; t < visible.first; ++t) s[t] = -INFINITY;
        for (int t = visible.end; t < kTilePositions; ++t) s[t] = -INFINITY;
        Vec largest = splat(state.max[first_query + i]);
#pragma GCC unroll 8
        for (int t = 0; t < kTilePositions; t += kLanes) largest = max(largest, load(s + t));
        const float top = max_lane(largest);
        if constexpr (Cell::kScaled) {
            *total = weigh_levels(i, top);
        } else {
            Vec sums = zero();
#pragma GCC unroll 8
            for (int t = 0; t < kTilePositions; t += 2 * kLanes) {
                const Vec a = exp2(load(s + t) - splat(top));
                const Vec b = exp2(load(s + t + kLanes) - splat(top));
                sums = store_factors(weights[i] + t, a, b, sums);
            }
            *total = sum(sums);
        }
        return top;
    }

    // Weights times their values' scales, in levels of 16 bits by one scale for the tile. Returns the weights' sum, NaN where a
    // scale is, unless its weight is 0: what a query does not read does not touch it.
    float weigh_levels(int i, float top) {
        float* const s = scores[i];
        Vec sums = zero();
        Vec largest = zero();
#pragma GCC unroll 8
        for (int t = 0; t < kTilePositions; t += kLanes) {
            const Vec weight = exp2(load(s + t) - splat(top));
            const Vec scaled = zero_below(weight * scales(t, 1), weight, splat(kLeastWeight));
            store(s + t, scaled);
            largest = max(largest, scaled);
            sums = fma(scaled, zero(), sums + weight);  // max loses a NaN, this does not
        }
        const float most = max_lane(largest);
        const float inverse = kMostWord / most;
        const Vec factor = splat(isfinite(inverse) ? inverse : 0.0F);
        weight_scales[i] = most / kMostWord;
#pragma GCC unroll 8
        for (int t = 0; t < kTilePositions; t += 2 * kLanes) {
            store_words(weights[i] + t, load(s + t) * factor, load(s + t + kLanes) * factor);
        }
        return sum(sums);
    }

    void soften() {
        float drops[kLanes] = {};
        float totals[kLanes] = {};
        for (int i = 0; i < kBundle; ++i) {
            const Visible seen = visible(first_query + i);
            if (seen.end > seen.first) {
                const float top = soften(i, seen, &totals[i]);
                drops[i] = state.max[first_query + i] - top;
                state.max[first_query + i] = top;
            } else {
                memset(weights[i], 0, sizeof weights[i]);
                weight_scales[i] = 0.0F;
            }
            // The last pair may have half a position: 0 even where the scale beyond is not a number.
            if (tile.num_positions % 2 != 0) weights[i][tile.num_positions] = 0;
        }
        const Vec kept = exp2(load(drops));
        store(carry, kept);
        float* const sums = state.sum + first_query;
        store(sums, load(sums, kBundle) * kept + load(totals), kBundle);
    }

    // sums += weights @ V of a pair of positions, or of its first alone.
    template <int kVecs, int kCount>
    CHAIRLIFT_INLINE void add_pair(const Bundle& bundle, const Element* pairs, int t, typename Cell::Sums (&sums)[kBundle][kVecs]) {
        constexpr int kStepTokens = 2 / Cell::kPairSteps;
#pragma GCC unroll 2
        for (int step = 0; step < (kCount < Cell::kPairSteps ? kCount : Cell::kPairSteps); ++step) {
            typename Cell::Values values[kVecs];
#pragma GCC unroll 4
            for (int v = 0; v < kVecs; ++v) {
                values[v] = Cell::values(pairs + v * kLanes * 2, step);
                // The other's weight is 0, but it may be memory that was never written: levels are finite, bf16 may not be.
                if constexpr (kCount == 1 && !Cell::kScaled) values[v] = first_of_pairs(values[v]);
            }
#pragma GCC unroll 6
            for (int i = 0; i < kBundle; ++i) {
#pragma GCC unroll 4
                for (int v = 0; v < kVecs; ++v) {
                    sums[i][v] = Cell::add_values(sums[i][v], values[v], bundle.weights[i] + t + step * kStepTokens);
                }
            }
        }
    }

    // state.values = state.values * carry + weights @ V in kVecs vectors from `lane` on, positions in ascending order.
    template <int kVecs>
    void add_lanes(int lane) {
        const size_t pair_bytes = 2 * static_cast<size_t>(task.shape->head_dim) * sizeof(Element);
        const size_t offset = task.shape->value_offset;
        const bool far = tile.fetch_far;
        const bool near = tile.fetch_near;
        float* const values = state.values + first_query * state.dim + lane;
        typename Cell::Sums sums[kBundle][kVecs];
        for (int i = 0; i < kBundle; ++i) {
            for (int v = 0; v < kVecs; ++v) {
                if constexpr (Cell::kScaled) {
                    sums[i][v] = splat_int(0);
                } else {
                    sums[i][v] = load(values + i * state.dim + v * kLanes) * splat(carry[i]);
                }
            }
        }
        for (int t = 0; t + 1 < tile.num_positions; t += 2) {
            const int block = t / kBlockTokens;
            const int pair = t % kBlockTokens / 2;
            const uint8_t* const pairs = tile.records[block] + offset + pair * pair_bytes;
            const uint8_t* const next = tile.next[block] + pair * pair_bytes + 2 * static_cast<size_t>(lane) * sizeof(Element);
#pragma GCC unroll 8
            for (size_t ahead = 0; ahead < 2 * kVecs * kLanes * sizeof(Element); ahead += kLineBytes) {
                if (far) prefetch(next + offset + ahead);
                if (near) prefetch(next + ahead);
            }
            add_pair<kVecs, 2>(*this, reinterpret_cast<const Element*>(pairs) + lane * 2, t, sums);
        }
        if (tile.num_positions % 2 != 0) {
            const int t = tile.num_positions - 1;
            const uint8_t* const pairs = tile.records[t / kBlockTokens] + offset + t % kBlockTokens / 2 * pair_bytes;
            add_pair<kVecs, 1>(*this, reinterpret_cast<const Element*>(pairs) + lane * 2, t, sums);
        }
        for (int i = 0; i < kBundle; ++i) {
            for (int v = 0; v < kVecs; ++v) {
                float* const to = values + i * state.dim + v * kLanes;
                if constexpr (Cell::kScaled) {
                    store(to, load(to) * splat(carry[i]) + to_float(sums[i][v]) * splat(weight_scales[i]));
                } else {
                    store(to, sums[i][v]);
                }
            }
        }
    }

    void run(const BundleQueries<Cell>& queries) {
        for (int block = 0; block * kBlockTokens < tile.num_positions; block += kWideBlocks) score(queries, block);
        soften();
        int lane = 0;
        for (; lane + kWide * kLanes <= state.dim; lane += kWide * kLanes) add_lanes<kWide>(lane);
        for (; lane < state.dim; lane += kLanes) add_lanes<1>(lane);
    }
};

}  // namespace
}  // namespace chairlift::CHAIRLIFT_ISA_NS
