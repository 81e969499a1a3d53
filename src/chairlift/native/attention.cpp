// Compiled once per ISA level; see isa.h for what such a source may use.
#include "attention.h"

#include <math.h>
#include <string.h>

#include "simd.h"

namespace chairlift::CHAIRLIFT_ISA_NS {
namespace {

constexpr int kTokenVecs = kBlockTokens / kLanes;  // vectors that hold one lane of a block's keys
constexpr int kTileBlocks = kTilePositions / kBlockTokens;
constexpr int kMaxPack = kLanes == 16 ? 8 : 4;  // queries that share a load of K or V: as many as there are registers for
static_assert(kBlockTokens % kLanes == 0 && kTilePositions % kBlockTokens == 0 && kSplitPositions % kTilePositions == 0);

struct F16 {
    using Element = uint16_t;
    CHAIRLIFT_INLINE Vec load_vec(const Element* p) { return load_f16(p); }
};
struct Int8 {
    using Element = int8_t;
    CHAIRLIFT_INLINE Vec load_vec(const Element* p) { return load_i8(p); }
};

float exp_of(float x) {
    float lanes[kLanes];
    store(lanes, exp(splat(x)));
    return lanes[0];
}

int lanes_left(int n, int i) { return n - i < kLanes ? n - i : kLanes; }

// The online softmax of each of a task's queries over the positions seen so far.
struct State {
    float max[kMaxTaskQueries];
    float sum[kMaxTaskQueries];
    float values[kMaxTaskQueries][kMaxHeadDim];

    void clear(const AttendTask& task, int first_query, int num_queries) {
        for (int query = first_query; query < num_queries; ++query) {
            max[query] = -INFINITY;
            sum[query] = 0.0F;
            // Whole vectors: the kernel reads and writes past an odd head_dim.
            const int padded = (task.shape->head_dim + kLanes - 1) / kLanes * kLanes;
            memset(values[query], 0, sizeof(float) * static_cast<size_t>(padded));
        }
    }
};

// A tile's records, one per block.
struct Tile {
    const uint8_t* records[kTileBlocks];
    int first_position;
    int num_positions;  // that any row of the task reads
};

const float* query_of(const AttendTask& task, int query) {
    return task.queries + query / task.group_size * task.query_stride + query % task.group_size * task.shape->head_dim;
}

Tile tile_at(const AttendTask& task, int first_position, int end) {
    Tile tile;
    tile.first_position = first_position;
    tile.num_positions = end - first_position < kTilePositions ? end - first_position : kTilePositions;
    const int num_blocks = (tile.num_positions + kBlockTokens - 1) / kBlockTokens;
    for (int i = 0; i < num_blocks; ++i) {
        const size_t block = static_cast<size_t>(task.blocks[first_position / kBlockTokens + i]);
        tile.records[i] = task.layer + block * task.shape->block_bytes +
                          static_cast<size_t>(task.kv_head) * task.shape->record_bytes;
    }
    return tile;
}

// A few queries (a pack) of a task against one tile.
template <class Cell, int kPack>
struct Pack {
    using Element = typename Cell::Element;

    const AttendTask& task;
    const Tile& tile;
    State& state;
    int first_query;
    float weights[kPack][kTilePositions];  // scores, then softmax weights
    float carry[kPack];                    // what the new maximum leaves of the sums so far

    Pack(const AttendTask& t, const Tile& where, State& s, int first) : task(t), tile(where), state(s), first_query(first) {}

    int num_blocks() const { return (tile.num_positions + kBlockTokens - 1) / kBlockTokens; }
    const float* scales(int block, int which) const {
        const uint8_t* const at = tile.records[block] + task.shape->scale_offset;
        return reinterpret_cast<const float*>(at) + which * kBlockTokens;
    }

    void score_block(int block) {
        const Element* keys = reinterpret_cast<const Element*>(tile.records[block]);
        const float* queries[kPack];
        for (int i = 0; i < kPack; ++i) queries[i] = query_of(task, first_query + i);
        Vec dots[kPack][kTokenVecs];
        for (auto& row : dots) {
            for (Vec& dot : row) dot = zero();
        }
        for (int lane = 0; lane < task.shape->head_dim; ++lane, keys += kBlockTokens) {
            for (int v = 0; v < kTokenVecs; ++v) {
                const Vec key = Cell::load_vec(keys + v * kLanes);
                for (int i = 0; i < kPack; ++i) dots[i][v] = fma(splat(queries[i][lane]), key, dots[i][v]);
            }
        }
        for (int v = 0; v < kTokenVecs; ++v) {
            Vec factor = splat(task.scale);
            if (sizeof(Element) == 1) factor = factor * load(scales(block, 0) + v * kLanes);
            for (int i = 0; i < kPack; ++i) store(weights[i] + block * kBlockTokens + v * kLanes, dots[i][v] * factor);
        }
    }

    // Turns the scores of one query into weights; positions after its own get exactly 0.
    void soften(int i) {
        const int query = first_query + i;
        float* const w = weights[i];
        const int width = num_blocks() * kBlockTokens;
        const int visible = task.first_position + query / task.group_size + 1 - tile.first_position;
        for (int t = visible; t < width; ++t) w[t] = -INFINITY;
        Vec largest = splat(state.max[query]);
        for (int t = 0; t < width; t += kLanes) largest = max(largest, load(w + t));
        const float top = max_lane(largest);
        Vec total = zero();
        for (int t = 0; t < width; t += kLanes) {
            const Vec weight = exp(load(w + t) - splat(top));
            store(w + t, weight);
            total = total + weight;
        }
        carry[i] = exp_of(state.max[query] - top);
        state.sum[query] = state.sum[query] * carry[i] + sum(total);
        state.max[query] = top;
        if (sizeof(Element) == 1) {
            for (int t = 0; t < width; t += kLanes) {
                store(w + t, load(w + t) * load(scales(t / kBlockTokens, 1) + t % kBlockTokens));
            }
        }
    }

    // state.values = state.values * carry + weights @ V, positions in ascending order.
    void add_values() {
        const int head_dim = task.shape->head_dim;
        for (int lane = 0; lane < head_dim; lane += kLanes) {
            Vec sums[kPack];
            for (int i = 0; i < kPack; ++i) sums[i] = load(state.values[first_query + i] + lane) * splat(carry[i]);
            for (int t = 0; t < tile.num_positions; ++t) {
                const uint8_t* const plane = tile.records[t / kBlockTokens] + task.shape->value_offset;
                const Element* const values = reinterpret_cast<const Element*>(plane) + t % kBlockTokens * head_dim;
                const Vec value = Cell::load_vec(values + lane);
                for (int i = 0; i < kPack; ++i) sums[i] = fma(splat(weights[i][t]), value, sums[i]);
            }
            for (int i = 0; i < kPack; ++i) store(state.values[first_query + i] + lane, sums[i]);
        }
    }

    void run() {
        for (int block = 0; block < num_blocks(); ++block) score_block(block);
        for (int i = 0; i < kPack; ++i) soften(i);
        add_values();
    }
};

// Runs queries [first, end) in packs of kPack, and what is left in smaller ones.
template <class Cell, int kPack>
void run_packs(const AttendTask& task, const Tile& tile, State& state, int first, int end) {
    for (; first + kPack <= end; first += kPack) Pack<Cell, kPack>(task, tile, state, first).run();
    if constexpr (kPack > 1) {
        if (first < end) run_packs<Cell, kPack - 1>(task, tile, state, first, end);
    }
}

int first_query_at(const AttendTask& task, int position) {
    const int row = position - task.first_position;
    return row > 0 ? row * task.group_size : 0;
}

// Positions [begin, end), all within one split, for the queries that read any of them.
template <class Cell>
void attend_split(const AttendTask& task, int begin, int end, State& state) {
    const int num_queries = task.num_rows * task.group_size;
    state.clear(task, first_query_at(task, begin), num_queries);
    for (int position = begin; position < end; position += kTilePositions) {
        const Tile tile = tile_at(task, position, end);
        run_packs<Cell, kMaxPack>(task, tile, state, first_query_at(task, position), num_queries);
    }
}

// Joins a later split's state into the whole's.
void merge(const AttendTask& task, int first_query, const State& part, State& whole) {
    for (int query = first_query; query < task.num_rows * task.group_size; ++query) {
        const float top = part.max[query] > whole.max[query] ? part.max[query] : whole.max[query];
        const float keep = exp_of(whole.max[query] - top);
        const float take = exp_of(part.max[query] - top);
        whole.max[query] = top;
        whole.sum[query] = whole.sum[query] * keep + part.sum[query] * take;
        for (int lane = 0; lane < task.shape->head_dim; lane += kLanes) {
            float* const values = whole.values[query] + lane;
            store(values, load(values) * splat(keep) + load(part.values[query] + lane) * splat(take));
        }
    }
}

template <class Cell>
void attend_cells(const AttendTask& task) {
    State whole;
    const int end = task.first_position + task.num_rows;
    attend_split<Cell>(task, 0, end < kSplitPositions ? end : kSplitPositions, whole);
    for (int begin = kSplitPositions; begin < end; begin += kSplitPositions) {
        State part;
        attend_split<Cell>(task, begin, end - begin < kSplitPositions ? end : begin + kSplitPositions, part);
        merge(task, first_query_at(task, begin), part, whole);
    }
    for (int query = 0; query < task.num_rows * task.group_size; ++query) {
        float* const out = task.out + query / task.group_size * task.out_stride +
                           query % task.group_size * task.shape->head_dim;
        for (int lane = 0; lane < task.shape->head_dim; lane += kLanes) {
            const int left = lanes_left(task.shape->head_dim, lane);
            store(out + lane, load(whole.values[query] + lane) / splat(whole.sum[query]), left);
        }
    }
}

void attend(const AttendTask& task) {
    if (task.shape->type == KVType::f16) {
        attend_cells<F16>(task);
    } else {
        attend_cells<Int8>(task);
    }
}

void write_f16(const float* x, int head_dim, uint16_t* out, int stride) {
    for (int lane = 0; lane < head_dim; lane += kLanes) {
        uint16_t halves[kLanes];
        const int left = lanes_left(head_dim, lane);
        store_f16(halves, load(x + lane, left));
        for (int i = 0; i < left; ++i) out[(lane + i) * stride] = halves[i];
    }
}

// One scale for the head: amax / 127; NaN when a lane is not finite.
void write_int8(const float* x, int head_dim, int8_t* out, int stride, float* scale) {
    Vec largest = zero();
    Vec doubt = zero();  // x - x is 0 for a finite x, else NaN
    for (int lane = 0; lane < head_dim; lane += kLanes) {
        const Vec v = load(x + lane, lanes_left(head_dim, lane));
        largest = max(largest, abs(v));
        doubt = doubt + (v - v);
    }
    const float amax = max_lane(largest) + sum(doubt);
    *scale = amax / 127.0F;
    const float inverse = 127.0F / amax;
    const Vec factor = splat(isfinite(inverse) ? inverse : 0.0F);
    for (int lane = 0; lane < head_dim; lane += kLanes) {
        int8_t rounded[kLanes];
        const int left = lanes_left(head_dim, lane);
        const Vec v = load(x + lane, left);
        store_i8(rounded, isfinite(amax) ? round(v * factor) : zero());
        for (int i = 0; i < left; ++i) out[(lane + i) * stride] = rounded[i];
    }
}

void write(const KVWrite& write) {
    const KVShape& shape = *write.shape;
    const int offset = write.slot % kBlockTokens;
    uint8_t* record = write.layer + static_cast<size_t>(write.slot / kBlockTokens) * shape.block_bytes;
    for (int head = 0; head < shape.num_kv_heads; ++head, record += shape.record_bytes) {
        const float* const key = write.keys + head * shape.head_dim;
        const float* const value = write.values + head * shape.head_dim;
        uint8_t* const values = record + shape.value_offset;
        if (shape.type == KVType::f16) {
            write_f16(key, shape.head_dim, reinterpret_cast<uint16_t*>(record) + offset, kBlockTokens);
            write_f16(value, shape.head_dim, reinterpret_cast<uint16_t*>(values) + offset * shape.head_dim, 1);
        } else {
            float* const scales = reinterpret_cast<float*>(record + shape.scale_offset);
            write_int8(key, shape.head_dim, reinterpret_cast<int8_t*>(record) + offset, kBlockTokens, scales + offset);
            write_int8(value, shape.head_dim, reinterpret_cast<int8_t*>(values) + offset * shape.head_dim, 1,
                       scales + kBlockTokens + offset);
        }
    }
}

}  // namespace

const AttentionKernels attention_kernels = {write, attend};

}  // namespace chairlift::CHAIRLIFT_ISA_NS
