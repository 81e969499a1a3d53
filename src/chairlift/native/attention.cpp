// Causal attention over the paged cache: tiles, splits and their joining. Compiled once per ISA level; see isa.h for what such
// a source may use.
#include "attention.h"

#include <math.h>
#include <string.h>

#include "attention_tile.h"

namespace chairlift::CHAIRLIFT_ISA_NS {
namespace {

static_assert(kSplitPositions % kTilePositions == 0);

int lanes_left(int n, int i) { return n - i < kLanes ? n - i : kLanes; }

// The first query of the first row that reads `position`, or one later.
int first_query_at(const AttendTask& task, int position) {
    const int row = position - task.first_position;
    return row > 0 ? row * task.group_size : 0;
}

// The query behind the last that reads anything before `position`: those of later rows have windows that begin there or later.
int end_query_before(const AttendTask& task, int position) {
    const int64_t row = int64_t{position} + task.params.window - 1 - task.first_position;
    return row < task.num_rows ? static_cast<int>(row > 0 ? row : 0) * task.group_size : num_queries(task);
}

// Where a split begins; splits are counted from the first that the task reads.
int split_start(const AttendTask& task, int split) {
    return (first_read(task.params, task.first_position) / kSplitPositions + split) * kSplitPositions;
}

// Levels of a head by one scale: amax / 127; NaN when a lane is not finite.
float round_head(const float* x, int head_dim, int8_t* levels) {
    Vec largest = zero();
    Vec doubt = zero();  // x - x is 0 for a finite x, else NaN
    for (int start = 0; start < head_dim; start += kLanes) {
        const Vec v = load(x + start, lanes_left(head_dim, start));
        largest = max(largest, abs(v));
        doubt = doubt + (v - v);
    }
    const float amax = max_lane(largest) + sum(doubt);
    const float inverse = 127.0F / amax;
    const Vec factor = splat(isfinite(inverse) ? inverse : 0.0F);
    for (int start = 0; start < head_dim; start += kLanes) {
        const Vec v = load(x + start, lanes_left(head_dim, start));
        store_i8(levels + start, isfinite(amax) ? round(v * factor) : zero());
    }
    return amax / 127.0F;
}

static_assert(kMaxHeadDim % kLanes == 0);  // what is rounded past a head's end has room

// A task's queries times its scale / ln 2, rounded, cut into bundles as equal as they can be.
template <class Cell>
struct Queries {
    int num_bundles;
    typename Cell::Query lanes[kMaxTaskQueries * kMaxHeadDim];
    float scales[kMaxTaskQueries];
    int32_t level_sums[kMaxTaskQueries];

    explicit Queries(const AttendTask& task) : num_bundles((num_queries(task) + kMaxBundle - 1) / kMaxBundle) {
        const int head_dim = task.shape->head_dim;
        for (int bundle = 0; bundle < num_bundles; ++bundle) {
            const int first = first_query(task, bundle);
            const int width = first_query(task, bundle + 1) - first;
            for (int i = 0; i < width; ++i) {
                typename Cell::Query rounded[kMaxHeadDim] = {};  // GCC warns else: it does not follow round_query
                round_query(task, first + i, rounded);
                auto* const to = lanes + first * head_dim + i * Cell::kStepLanes;
                for (int lane = 0; lane < head_dim; ++lane) {
                    const int at = lane % Cell::kLineLanes;
                    const int step = lane / Cell::kLineLanes * Cell::kLineSteps + at % Cell::kLineSteps;
                    to[step * width * Cell::kStepLanes + at / Cell::kLineSteps] = rounded[lane];
                }
            }
        }
    }

    int first_query(const AttendTask& task, int bundle) const { return num_queries(task) * bundle / num_bundles; }
    BundleQueries<Cell> bundle(const AttendTask& task, int first) const {
        return {lanes + first * task.shape->head_dim, scales + first, level_sums + first};
    }

private:
    void round_query(const AttendTask& task, int query, typename Cell::Query* rounded) {
        const int head_dim = task.shape->head_dim;
        const int64_t row = query / task.group_size;
        const float* const from = task.queries + row * task.query_stride + query % task.group_size * head_dim;
        const float scale = task.params.scale * kInverseLn2;
        if constexpr (Cell::kScaled) {
            int8_t levels[kMaxHeadDim];
            scales[query] = round_head(from, head_dim, levels) * scale;
            level_sums[query] = 0;
            for (int lane = 0; lane < head_dim; ++lane) {
                rounded[lane] = levels[lane];
                level_sums[query] += levels[lane];
            }
        } else {
            level_sums[query] = 0;
            for (int start = 0; start < head_dim; start += kLanes) {
                store_factors(rounded + start, load(from + start, lanes_left(head_dim, start)) * splat(scale));
            }
        }
    }
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

// Runs `width` queries, at most kBundle.
template <class Cell, int kBundle>
void run_bundle(const AttendTask& task, const Tile& tile, const State<float>& state, const BundleQueries<Cell>& queries,
              int first, int width) {
    if constexpr (kBundle > 1) {
        if (width < kBundle) return run_bundle<Cell, kBundle - 1>(task, tile, state, queries, first, width);
    }
    Bundle<Cell, kBundle>(task, tile, state, first).run(queries);
}

// One of the splits that the task reads, for the queries that read any of it.
template <class Cell>
void run_split(const AttendTask& task, const Queries<Cell>& queries, int split, const State<float>& state) {
    const int begin = split_start(task, split);
    const int last = task.first_position + task.num_rows;
    const int end = last - begin < kSplitPositions ? last : begin + kSplitPositions;
    for (int query = 0; query < num_queries(task); ++query) {
        state.max[query] = -INFINITY;
        state.sum[query] = 0.0F;
    }
    memset(state.values, 0, sizeof(float) * static_cast<size_t>(num_queries(task) * state.dim));
    Tile tile;
    tile.fetch_near = queries.num_bundles == 1;
    // Tiles before every row's window are left out.
    const int first_tile = first_read(task.params, task.first_position) / kTilePositions * kTilePositions;
    for (int position = begin > first_tile ? begin : first_tile; position < end; position += kTilePositions) {
        find_records(task, position, last, tile.records);
        find_records(task, position + kTilePositions, last, tile.next);
        tile.first_position = position;
        tile.num_positions = end - position < kTilePositions ? end - position : kTilePositions;
        const int first_reader = first_query_at(task, position);
        const int end_reader = end_query_before(task, position + kTilePositions);
        for (int bundle = 0; bundle < queries.num_bundles; ++bundle) {
            const int first = queries.first_query(task, bundle);
            const int next = queries.first_query(task, bundle + 1);
            if (next <= first_reader || first >= end_reader) continue;
            tile.fetch_far = bundle + 1 == queries.num_bundles;
            run_bundle<Cell, kMaxBundle>(task, tile, state, queries.bundle(task, first), first, next - first);
        }
    }
}

// Joins a later split's state into the whole's, for the queries that read any of it. The whole of a query that read none yet
// is empty: a maximum of -inf, by whose weight of 0 it is left behind.
void merge(const AttendTask& task, int split, const State<const float>& part, const State<float>& whole) {
    const int start = split_start(task, split);
    const int end = end_query_before(task, start + kSplitPositions);
    for (int query = first_query_at(task, start); query < end; ++query) {
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
        const int head = query % task.group_size;
        float* const out = task.out + query / task.group_size * task.out_stride + head * head_dim;
        float keep = 1.0F;
        float total = whole.sum[query];
        if (task.sinks != nullptr) {
            const float sink = task.sinks[head] * kInverseLn2;
            const float top = sink > whole.max[query] ? sink : whole.max[query];
            keep = exp2_of(whole.max[query] - top);
            total = total * keep + exp2_of(sink - top);
        }
        for (int lane = 0; lane < head_dim; lane += kLanes) {
            const Vec values = load(whole.values + query * whole.dim + lane) * splat(keep);
            store(out + lane, values / splat(total), lanes_left(head_dim, lane));
        }
    }
}

constexpr size_t kMaxPartFloats = static_cast<size_t>(kMaxTaskQueries) * (2 + kMaxHeadDim);

template <class Cell>
void attend(const AttendTask& task) {
    alignas(kLineBytes) float first[kMaxPartFloats];
    alignas(kLineBytes) float later[kMaxPartFloats];
    const Queries<Cell> queries(task);
    const State<float> whole(first, task);
    run_split(task, queries, 0, whole);
    for (int split = 1; split < num_splits(task); ++split) {
        run_split(task, queries, split, State<float>(later, task));
        merge(task, split, State<const float>(later, task), whole);
    }
    write_out(task, whole);
}

void attend(const AttendTask& task) { task.shape->type == KVType::bf16 ? attend<Bf16>(task) : attend<Int8>(task); }

template <class Cell>
void attend_split(const AttendTask& task, int split, float* part) {
    run_split(task, Queries<Cell>(task), split, State<float>(part, task));
}

void attend_split(const AttendTask& task, int split, float* part) {
    task.shape->type == KVType::bf16 ? attend_split<Bf16>(task, split, part) : attend_split<Int8>(task, split, part);
}

void join(const AttendTask& task, const float* parts) {
    alignas(kLineBytes) float first[kMaxPartFloats];
    const size_t floats = part_floats(task.shape->head_dim, num_queries(task));
    memcpy(first, parts, sizeof(float) * floats);
    const State<float> whole(first, task);
    for (int split = 1; split < num_splits(task); ++split) {
        merge(task, split, State<const float>(parts + static_cast<size_t>(split) * floats, task), whole);
    }
    write_out(task, whole);
}

// Where a token's lanes go: `plane` of a record, whose rows they cross or fill.
template <class Cell>
struct Place {
    typename Cell::Element* plane;
    int offset;  // of the token in its block
    int head_dim;
    bool is_key;

    typename Cell::Element& operator[](int lane) const {
        return plane[is_key ? key_index<Cell>(lane, offset) : value_index(offset, head_dim, lane)];
    }
};

void write_lanes(const float* x, const Place<Bf16>& out) {
    for (int start = 0; start < out.head_dim; start += kLanes) {
        uint16_t rounded[kLanes];
        const int left = lanes_left(out.head_dim, start);
        store_bf16(rounded, load(x + start, left));
        for (int i = 0; i < left; ++i) out[start + i] = rounded[i];
    }
}

void write_lanes(const float* x, const Place<Int8>& out, float* scale) {
    int8_t levels[kMaxHeadDim];
    *scale = round_head(x, out.head_dim, levels);
    const int zero = out.is_key ? kKeyZero : 0;
    for (int lane = 0; lane < out.head_dim; ++lane) out[lane] = static_cast<uint8_t>(levels[lane] + zero);
}

void write(const KVWrite& write) {
    const KVShape& shape = *write.shape;
    const int offset = write.slot % kBlockTokens;
    uint8_t* record = write.layer + static_cast<size_t>(write.slot / kBlockTokens) * shape.block_bytes;
    for (int head = 0; head < shape.num_kv_heads; ++head, record += shape.record_bytes) {
        const float* const key = write.keys + head * shape.head_dim;
        const float* const value = write.values + head * shape.head_dim;
        uint8_t* const values = record + shape.value_offset;
        if (shape.type == KVType::bf16) {
            write_lanes(key, Place<Bf16>{reinterpret_cast<uint16_t*>(record), offset, shape.head_dim, true});
            write_lanes(value, Place<Bf16>{reinterpret_cast<uint16_t*>(values), offset, shape.head_dim, false});
        } else {
            float* const scales = reinterpret_cast<float*>(record + shape.scale_offset) + offset;
            write_lanes(key, Place<Int8>{record, offset, shape.head_dim, true}, scales);
            write_lanes(value, Place<Int8>{values, offset, shape.head_dim, false},
                        scales + kBlockTokens);
        }
    }
}

}  // namespace

const AttentionKernels attention_kernels = {write, attend, attend_split, join};

}  // namespace chairlift::CHAIRLIFT_ISA_NS
