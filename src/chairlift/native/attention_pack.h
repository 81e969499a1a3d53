// Some queries against one tile of the cache: scores, softmax weights, weighted sums. Included by attention.cpp alone.
#pragma once

#include <math.h>
#include <string.h>

#include "attention.h"
#include "simd_bf16.h"

namespace chairlift::CHAIRLIFT_ISA_NS {
namespace {

// A pack of queries meets kWide vectors of K or V at a time. These kMaxPack * kWide sums, with what goes into them, fill the
// level's registers: 32 with AVX-512, 16 else.
constexpr int kWide = CHAIRLIFT_ISA_LEVEL == 2 ? 4 : 2;
constexpr int kMaxPack = CHAIRLIFT_ISA_LEVEL == 0 ? 4 : 6;
constexpr int kBlockVecs = kBlockTokens / kLanes;  // vectors that hold one lane of a block's keys
constexpr int kWideBlocks = kWide / kBlockVecs;
constexpr int kTileBlocks = kTilePositions / kBlockTokens;
constexpr int kLineBytes = 64;
constexpr int kParts = 2 / kJoined;  // that a pair is multiplied in
static_assert(kBlockTokens % kLanes == 0 && kTileBlocks % kWideBlocks == 0 && kTilePositions % (2 * kLanes) == 0);
static_assert(kMaxPack <= kLanes);

// A plane of a record: rows (lanes of K, tokens of V) of `width` values, with what the type needs to find them.
struct Bf16 {
    using Element = uint16_t;
    static constexpr bool kScaled = false;
    CHAIRLIFT_INLINE int index(int row, int width, int column) { return (row / 2 * width + column) * 2 + row % 2; }
    // Terms of row `pair` * 2 + `part` * kJoined at kLanes columns.
    CHAIRLIFT_INLINE Terms terms(const Element* plane, int pair, int part, int width, int column) {
        return load_terms(plane + (pair * width + column) * 2, part);
    }
};
struct Int8 {
    using Element = int8_t;
    static constexpr bool kScaled = true;
    CHAIRLIFT_INLINE int index(int row, int width, int column) { return row * width + column; }
    CHAIRLIFT_INLINE Terms terms(const Element* plane, int pair, int part, int width, int column) {
        return load_terms(plane + (pair * 2 + part) * width + column, width);
    }
};

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
// A processor drops a prefetch when too many are on their way, and the loops of one pack ask faster than memory answers. So
// lines are asked for twice: keys of the next tile with this one's keys and again with its values, values with the last tile's
// values and again with this one's keys. Further packs find the tile in L1; the last of them asks for the next.
struct Tile {
    const uint8_t* records[kTileBlocks];
    const uint8_t* next[kTileBlocks];
    int first_position;
    int num_positions;  // that any row of the task reads
    bool fetch_far;     // the next tile
    bool fetch_near;    // what this one's next loop reads
};

template <class Cell, int kPack>
struct Pack {
    using Element = typename Cell::Element;

    const AttendTask& task;
    const Tile& tile;
    const State<float>& state;
    int first_query;
    alignas(kLineBytes) float scores[kPack][kTilePositions];
    alignas(kLineBytes) Factor weights[kPack][kTilePositions];
    float carry[kLanes];  // what the new maximum leaves of the sums so far

    Pack(const AttendTask& of, const Tile& on, const State<float>& into, int first)
        : task(of), tile(on), state(into), first_query(first) {}

    Vec scales(int position, int which) const {
        const uint8_t* const at = tile.records[position / kBlockTokens] + task.shape->scale_offset;
        return load(reinterpret_cast<const float*>(at) + which * kBlockTokens + position % kBlockTokens);
    }

    // Scores of kWideBlocks blocks from `first` on.
    void score(const Factor* queries, int first) {
        constexpr int kPairs = kLineBytes / (2 * kBlockTokens * static_cast<int>(sizeof(Element)));  // of a cache line
        const Element* keys[kWideBlocks];
        for (int b = 0; b < kWideBlocks; ++b) keys[b] = reinterpret_cast<const Element*>(tile.records[first + b]);
        Vec dots[kPack][kWide];
        for (auto& row : dots) {
            for (Vec& dot : row) dot = zero();
        }
        const bool far = tile.fetch_far;
        const bool near = tile.fetch_near;
        for (int start = 0; start < task.shape->head_dim / 2; start += kPairs) {
            const size_t line = static_cast<size_t>(start / kPairs * kLineBytes);
            if (far) {
                for (int b = 0; b < kWideBlocks; ++b) prefetch(tile.next[first + b] + line);
            }
            if (near) {
                for (int b = 0; b < kWideBlocks; ++b) prefetch(tile.records[first + b] + task.shape->value_offset + line);
            }
#pragma GCC unroll 4
            for (int step = 0; step < kPairs * kParts; ++step, queries += kPack * kJoined) {
                Terms key[kWide];
#pragma GCC unroll 4
                for (int v = 0; v < kWide; ++v) {
                    key[v] = Cell::terms(keys[v / kBlockVecs], start + step / kParts, step % kParts, kBlockTokens,
                                         v % kBlockVecs * kLanes);
                }
#pragma GCC unroll 6
                for (int i = 0; i < kPack; ++i) {
                    const Terms query = splat_terms(queries + i * kJoined);
#pragma GCC unroll 4
                    for (int v = 0; v < kWide; ++v) dots[i][v] = add_products(dots[i][v], query, key[v]);
                }
            }
        }
        for (int v = 0; v < kWide; ++v) {
            const int at = first * kBlockTokens + v * kLanes;
            for (int i = 0; i < kPack; ++i) store(scores[i] + at, Cell::kScaled ? dots[i][v] * scales(at, 0) : dots[i][v]);
        }
    }

    // How many of the tile's positions a query reads, or what is not above 0.
    int num_visible(int query) const {
        const int own = task.first_position + query / task.group_size + 1 - tile.first_position;
        return own < tile.num_positions ? own : tile.num_positions;
    }

    // Turns the scores of one query into weights; those of positions that it does not read into exactly 0. Returns the maximum.
    float soften(int i, int visible, float* total) {
        float* const s = scores[i];
        for (int t = visible; t < kTilePositions; ++t) s[t] = -INFINITY;
        Vec largest = splat(state.max[first_query + i]);
#pragma GCC unroll 8
        for (int t = 0; t < kTilePositions; t += kLanes) largest = max(largest, load(s + t));
        const float top = max_lane(largest);
        Vec sums = zero();
#pragma GCC unroll 8
        for (int t = 0; t < kTilePositions; t += 2 * kLanes) {
            const Vec a = exp2(load(s + t) - splat(top));
            const Vec b = exp2(load(s + t + kLanes) - splat(top));
            if (Cell::kScaled) {
                sums = sums + (a + b);
                store_factors(weights[i] + t, a * scales(t, 1), b * scales(t + kLanes, 1), zero());
            } else {
                sums = store_factors(weights[i] + t, a, b, sums);
            }
        }
        *total = sum(sums);
        return top;
    }

    void soften() {
        float drops[kLanes] = {};
        float totals[kLanes] = {};
        for (int i = 0; i < kPack; ++i) {
            const int visible = num_visible(first_query + i);
            if (visible > 0) {
                const float top = soften(i, visible, &totals[i]);
                drops[i] = state.max[first_query + i] - top;
                state.max[first_query + i] = top;
            } else {
                memset(weights[i], 0, sizeof weights[i]);
            }
            // The last pair may have half a position: 0 even where the scale beyond is not a number.
            if (tile.num_positions % 2 != 0) weights[i][tile.num_positions] = 0;
        }
        const Vec kept = exp2(load(drops));
        store(carry, kept);
        float* const sums = state.sum + first_query;
        store(sums, load(sums, kPack) * kept + load(totals), kPack);
    }

    // sums += weights @ V of a pair of positions, or of its first alone.
    template <int kVecs, int kCount>
    CHAIRLIFT_INLINE void add_pair(const Pack& pack, const Element* plane, int pair, int lane, int t, Vec (&sums)[kPack][kVecs]) {
        const int dim = pack.task.shape->head_dim;
#pragma GCC unroll 2
        for (int part = 0; part < (kCount < kParts ? kCount : kParts); ++part) {
            Terms value[kVecs];
#pragma GCC unroll 4
            for (int v = 0; v < kVecs; ++v) {
                value[v] = Cell::terms(plane, pair, part, dim, lane + v * kLanes);
                if (kCount == 1) value[v] = first_of_pairs(value[v]);
            }
#pragma GCC unroll 6
            for (int i = 0; i < kPack; ++i) {
                const Terms weight = splat_terms(pack.weights[i] + t + part * kJoined);
#pragma GCC unroll 4
                for (int v = 0; v < kVecs; ++v) sums[i][v] = add_products(sums[i][v], weight, value[v]);
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
        Vec sums[kPack][kVecs];
        for (int i = 0; i < kPack; ++i) {
            for (int v = 0; v < kVecs; ++v) sums[i][v] = load(values + i * state.dim + v * kLanes) * splat(carry[i]);
        }
        for (int t = 0; t + 1 < tile.num_positions; t += 2) {
            const int block = t / kBlockTokens;
            const int pair = t % kBlockTokens / 2;
            const auto* const plane = reinterpret_cast<const Element*>(tile.records[block] + offset);
            const uint8_t* const next = tile.next[block] + pair * pair_bytes + 2 * static_cast<size_t>(lane) * sizeof(Element);
#pragma GCC unroll 8
            for (size_t ahead = 0; ahead < 2 * kVecs * kLanes * sizeof(Element); ahead += kLineBytes) {
                if (far) prefetch(next + offset + ahead);
                if (near) prefetch(next + ahead);
            }
            add_pair<kVecs, 2>(*this, plane, pair, lane, t, sums);
        }
        if (tile.num_positions % 2 != 0) {
            const int t = tile.num_positions - 1;
            const auto* const plane = reinterpret_cast<const Element*>(tile.records[t / kBlockTokens] + offset);
            add_pair<kVecs, 1>(*this, plane, t % kBlockTokens / 2, lane, t, sums);
        }
        for (int i = 0; i < kPack; ++i) {
            for (int v = 0; v < kVecs; ++v) store(values + i * state.dim + v * kLanes, sums[i][v]);
        }
    }

    void run(const Factor* queries) {
        for (int block = 0; block * kBlockTokens < tile.num_positions; block += kWideBlocks) score(queries, block);
        soften();
        int lane = 0;
        for (; lane + kWide * kLanes <= state.dim; lane += kWide * kLanes) add_lanes<kWide>(lane);
        for (; lane < state.dim; lane += kLanes) add_lanes<1>(lane);
    }
};

}  // namespace
}  // namespace chairlift::CHAIRLIFT_ISA_NS
