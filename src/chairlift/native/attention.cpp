// Compiled once per ISA level; see isa.h for what such a source may use.
#include "attention.h"

#include <math.h>
#include <string.h>

#include "simd.h"

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
constexpr float kInverseLn2 = 1.44269504F;
static_assert(kBlockTokens % kLanes == 0 && kTileBlocks % kWideBlocks == 0 && kSplitPositions % kTilePositions == 0);

struct F16 {
    using Element = uint16_t;
    CHAIRLIFT_INLINE Vec load_vec(const Element* p) { return load_f16(p); }
};
struct Int8 {
    using Element = int8_t;
    CHAIRLIFT_INLINE Vec load_vec(const Element* p) { return load_i8(p); }
};

float exp2_of(float x) {
    float lanes[kLanes];
    store(lanes, exp2(splat(x)));
    return lanes[0];
}

int lanes_left(int n, int i) { return n - i < kLanes ? n - i : kLanes; }

int padded_dim(const KVShape& shape) { return (shape.head_dim + kLanes - 1) / kLanes * kLanes; }

int num_queries(const AttendTask& task) { return task.num_rows * task.group_size; }

// The first query of the first row that reads `position`, or one later.
int first_query_at(const AttendTask& task, int position) {
    const int row = position - task.first_position;
    return row > 0 ? row * task.group_size : 0;
}

// The online softmax of each of a task's queries over the positions of a split seen so far: a view of part_floats().
// Scores are in units of ln 2, so that 2^x takes the place of e^x.
template <class Float>
struct State {
    Float* max;
    Float* sum;
    Float* values;  // (query, dim), the lanes beyond head_dim without meaning
    int dim;

    State(Float* part, const AttendTask& task)
        : max(part), sum(max + num_queries(task)), values(sum + num_queries(task)), dim(padded_dim(*task.shape)) {}
};

// A task's queries times its scale, cut into packs as equal as they can be: (pack, lane, query of the pack), so that a lane
// of all queries of a pack lies side by side.
struct Queries {
    int num_packs;
    float lanes[kMaxTaskQueries * kMaxHeadDim];

    explicit Queries(const AttendTask& task) : num_packs((num_queries(task) + kMaxPack - 1) / kMaxPack) {
        const int head_dim = task.shape->head_dim;
        for (int pack = 0; pack < num_packs; ++pack) {
            const int first = first_query(task, pack);
            const int width = first_query(task, pack + 1) - first;
            for (int i = 0; i < width; ++i) {
                const int query = first + i;
                const float* const from =
                    task.queries + query / task.group_size * task.query_stride + query % task.group_size * head_dim;
                float* const to = lanes + first * head_dim + i;
                for (int lane = 0; lane < head_dim; ++lane) to[lane * width] = from[lane] * (task.scale * kInverseLn2);
            }
        }
    }

    int first_query(const AttendTask& task, int pack) const { return num_queries(task) * pack / num_packs; }
};

// A tile's records, one per block, and those of the next tile, fetched meanwhile.
struct Tile {
    const uint8_t* records[kTileBlocks];
    const uint8_t* next[kTileBlocks];
    int first_position;
    int num_positions;  // that any row of the task reads
};

// The records of the kTileBlocks blocks from `position` on; the last one before `end` stands in for those beyond it.
void find_records(const AttendTask& task, int position, int end, const uint8_t** records) {
    const int last = (end - 1) / kBlockTokens;
    for (int i = 0; i < kTileBlocks; ++i) {
        const int at = position / kBlockTokens + i;
        const size_t block = static_cast<size_t>(task.blocks[at < last ? at : last]);
        records[i] = task.layer + block * task.shape->block_bytes +
                     static_cast<size_t>(task.kv_head) * task.shape->record_bytes;
    }
}

// Some queries of a task against one tile.
template <class Cell, int kPack>
struct Pack {
    using Element = typename Cell::Element;

    const AttendTask& task;
    const Tile& tile;
    const State<float>& state;
    int first_query;
    float weights[kPack][kTilePositions];  // scores, then softmax weights
    float carry[kPack];                    // what the new maximum leaves of the sums so far

    Pack(const AttendTask& of, const Tile& on, const State<float>& into, int first)
        : task(of), tile(on), state(into), first_query(first) {}

    const float* scales(int block, int which) const {
        const uint8_t* const at = tile.records[block] + task.shape->scale_offset;
        return reinterpret_cast<const float*>(at) + which * kBlockTokens;
    }

    // Scores of kWideBlocks blocks from `first` on.
    void score(const float* queries, int first) {
        constexpr int kStep = kLineBytes / (kBlockTokens * static_cast<int>(sizeof(Element)));  // lanes of a cache line
        const Element* keys[kWideBlocks];
        for (int b = 0; b < kWideBlocks; ++b) keys[b] = reinterpret_cast<const Element*>(tile.records[first + b]);
        Vec dots[kPack][kWide];
        for (auto& row : dots) {
            for (Vec& dot : row) dot = zero();
        }
        for (int start = 0; start < task.shape->head_dim; start += kStep) {
            for (int b = 0; b < kWideBlocks; ++b) prefetch(tile.next[first + b] + start / kStep * kLineBytes);
#pragma GCC unroll 4
            for (int lane = start; lane < start + kStep; ++lane, queries += kPack) {
                Vec key[kWide];
#pragma GCC unroll 4
                for (int v = 0; v < kWide; ++v) {
                    key[v] = Cell::load_vec(keys[v / kBlockVecs] + lane * kBlockTokens + v % kBlockVecs * kLanes);
                }
#pragma GCC unroll 6
                for (int i = 0; i < kPack; ++i) {
                    const Vec query = splat(queries[i]);
#pragma GCC unroll 4
                    for (int v = 0; v < kWide; ++v) dots[i][v] = fma(query, key[v], dots[i][v]);
                }
            }
        }
        for (int v = 0; v < kWide; ++v) {
            const int at = first * kBlockTokens + v * kLanes;
            for (int i = 0; i < kPack; ++i) {
                Vec scores = dots[i][v];
                if (sizeof(Element) == 1) scores = scores * load(scales(at / kBlockTokens, 0) + at % kBlockTokens);
                store(weights[i] + at, scores);
            }
        }
    }

    // Turns the scores of one query into weights; positions after its own get exactly 0.
    void soften(int i) {
        const int query = first_query + i;
        float* const w = weights[i];
        const int visible = task.first_position + query / task.group_size + 1 - tile.first_position;
        if (visible <= 0) {
            memset(w, 0, sizeof weights[i]);
            carry[i] = 1.0F;
            return;
        }
        for (int t = visible < tile.num_positions ? visible : tile.num_positions; t < kTilePositions; ++t) w[t] = -INFINITY;
        Vec largest = splat(state.max[query]);
#pragma GCC unroll 8
        for (int t = 0; t < kTilePositions; t += kLanes) largest = max(largest, load(w + t));
        const float top = max_lane(largest);
        Vec total = zero();
#pragma GCC unroll 8
        for (int t = 0; t < kTilePositions; t += kLanes) {
            Vec weight = exp2(load(w + t) - splat(top));
            total = total + weight;
            if (sizeof(Element) == 1) weight = weight * load(scales(t / kBlockTokens, 1) + t % kBlockTokens);
            store(w + t, weight);
        }
        carry[i] = exp2_of(state.max[query] - top);
        state.sum[query] = state.sum[query] * carry[i] + sum(total);
        state.max[query] = top;
    }

    // state.values = state.values * carry + weights @ V in kVecs vectors from `lane` on, positions in ascending order.
    template <int kVecs>
    void add_lanes(int lane) {
        const size_t row = static_cast<size_t>(task.shape->head_dim) * sizeof(Element);  // bytes of a position
        const size_t offset = task.shape->value_offset + static_cast<size_t>(lane) * sizeof(Element);
        float* const values = state.values + first_query * state.dim + lane;
        Vec sums[kPack][kVecs];
        for (int i = 0; i < kPack; ++i) {
            for (int v = 0; v < kVecs; ++v) sums[i][v] = load(values + i * state.dim + v * kLanes) * splat(carry[i]);
        }
        for (int t = 0; t < tile.num_positions; ++t) {
            const size_t at = offset + static_cast<size_t>(t % kBlockTokens) * row;
            const auto* const from = reinterpret_cast<const Element*>(tile.records[t / kBlockTokens] + at);
            Vec value[kVecs];
#pragma GCC unroll 4
            for (int v = 0; v < kVecs; ++v) value[v] = Cell::load_vec(from + v * kLanes);
#pragma GCC unroll 4
            for (size_t ahead = 0; ahead < kVecs * kLanes * sizeof(Element); ahead += kLineBytes) {
                prefetch(tile.next[t / kBlockTokens] + at + ahead);
            }
#pragma GCC unroll 6
            for (int i = 0; i < kPack; ++i) {
                const Vec weight = splat(weights[i][t]);
#pragma GCC unroll 4
                for (int v = 0; v < kVecs; ++v) sums[i][v] = fma(weight, value[v], sums[i][v]);
            }
        }
        for (int i = 0; i < kPack; ++i) {
            for (int v = 0; v < kVecs; ++v) store(values + i * state.dim + v * kLanes, sums[i][v]);
        }
    }

    void run(const float* queries) {
        for (int block = 0; block * kBlockTokens < tile.num_positions; block += kWideBlocks) score(queries, block);
        for (int i = 0; i < kPack; ++i) soften(i);
        int lane = 0;
        for (; lane + kWide * kLanes <= state.dim; lane += kWide * kLanes) add_lanes<kWide>(lane);
        for (; lane < state.dim; lane += kLanes) add_lanes<1>(lane);
    }
};

// Runs `width` queries, at most kPack.
template <class Cell, int kPack>
void run_pack(const AttendTask& task, const Tile& tile, const State<float>& state, const float* queries, int first, int width) {
    if constexpr (kPack > 1) {
        if (width < kPack) return run_pack<Cell, kPack - 1>(task, tile, state, queries, first, width);
    }
    Pack<Cell, kPack>(task, tile, state, first).run(queries);
}

// One split, for the queries that read any of it.
template <class Cell>
void run_split(const AttendTask& task, const Queries& queries, int split, const State<float>& state) {
    const int begin = split * kSplitPositions;
    const int last = task.first_position + task.num_rows;
    const int end = last - begin < kSplitPositions ? last : begin + kSplitPositions;
    for (int query = 0; query < num_queries(task); ++query) {
        state.max[query] = -INFINITY;
        state.sum[query] = 0.0F;
    }
    memset(state.values, 0, sizeof(float) * static_cast<size_t>(num_queries(task) * state.dim));
    Tile tile;
    find_records(task, begin, end, tile.next);
    for (int position = begin; position < end; position += kTilePositions) {
        memcpy(tile.records, tile.next, sizeof tile.records);
        find_records(task, position + kTilePositions, last, tile.next);
        tile.first_position = position;
        tile.num_positions = end - position < kTilePositions ? end - position : kTilePositions;
        const int first_reader = first_query_at(task, position);
        for (int pack = 0; pack < queries.num_packs; ++pack) {
            const int first = queries.first_query(task, pack);
            const int next = queries.first_query(task, pack + 1);
            if (next <= first_reader) continue;
            const float* const lanes = queries.lanes + first * task.shape->head_dim;
            run_pack<Cell, kMaxPack>(task, tile, state, lanes, first, next - first);
        }
    }
}

void run_split(const AttendTask& task, const Queries& queries, int split, const State<float>& state) {
    if (task.shape->type == KVType::f16) {
        run_split<F16>(task, queries, split, state);
    } else {
        run_split<Int8>(task, queries, split, state);
    }
}

// Joins a later split's state into the whole's.
void merge(const AttendTask& task, int split, const State<const float>& part, const State<float>& whole) {
    for (int query = first_query_at(task, split * kSplitPositions); query < num_queries(task); ++query) {
        const float top = part.max[query] > whole.max[query] ? part.max[query] : whole.max[query];
        const float keep = exp2_of(whole.max[query] - top);
        const float take = exp2_of(part.max[query] - top);
        whole.max[query] = top;
        whole.sum[query] = whole.sum[query] * keep + part.sum[query] * take;
        for (int lane = 0; lane < whole.dim; lane += kLanes) {
            float* const values = whole.values + query * whole.dim + lane;
            store(values, load(values) * splat(keep) + load(part.values + query * whole.dim + lane) * splat(take));
        }
    }
}

void write_out(const AttendTask& task, const State<float>& whole) {
    const int head_dim = task.shape->head_dim;
    for (int query = 0; query < num_queries(task); ++query) {
        float* const out = task.out + query / task.group_size * task.out_stride + query % task.group_size * head_dim;
        const Vec sum = splat(whole.sum[query]);
        for (int lane = 0; lane < head_dim; lane += kLanes) {
            store(out + lane, load(whole.values + query * whole.dim + lane) / sum, lanes_left(head_dim, lane));
        }
    }
}

constexpr size_t kMaxPartFloats = static_cast<size_t>(kMaxTaskQueries) * (2 + kMaxHeadDim);

void attend(const AttendTask& task) {
    alignas(kLineBytes) float first[kMaxPartFloats];
    alignas(kLineBytes) float later[kMaxPartFloats];
    const Queries queries(task);
    const State<float> whole(first, task);
    run_split(task, queries, 0, whole);
    for (int split = 1; split < num_splits(task); ++split) {
        run_split(task, queries, split, State<float>(later, task));
        merge(task, split, State<const float>(later, task), whole);
    }
    write_out(task, whole);
}

void attend_split(const AttendTask& task, int split, float* part) {
    const Queries queries(task);
    run_split(task, queries, split, State<float>(part, task));
}

void join(const AttendTask& task, const float* parts) {
    alignas(kLineBytes) float first[kMaxPartFloats];
    const size_t floats = part_floats(*task.shape, num_queries(task));
    memcpy(first, parts, sizeof(float) * floats);
    const State<float> whole(first, task);
    for (int split = 1; split < num_splits(task); ++split) {
        merge(task, split, State<const float>(parts + static_cast<size_t>(split) * floats, task), whole);
    }
    write_out(task, whole);
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

const AttentionKernels attention_kernels = {write, attend, attend_split, join};

}  // namespace chairlift::CHAIRLIFT_ISA_NS
