// The paged KV cache of one layer, and causal attention over it; plain data, safe to include from per-ISA sources.
//
// Owns the layout of a block and the order of the sums; knows nothing of threads.
//
//   layer:  [block][kv_head] -> record
//   record: K  head_dim x 16 tokens   (a lane's 16 tokens side by side: scores come out as vectors over tokens)
//           V  16 tokens x value_dim  (a token's lanes side by side: the weighted sum is a vector over lanes)
//           int8 only: 16 K scales, 16 V scales (f32, one per token)
// Instructions multiply neighbours and add their products, so rows are interleaved value by value: two rows of K (lanes) and
// of V (tokens) in bf16, four of K and two of V in int8. Levels of int8 keys are kept with 128 added, as unsigned bytes.
//
// bf16: queries, times scale / ln 2, and softmax weights are rounded to bf16 as well; products of two 8-bit significands are
// summed in f32. int8: a query is rounded to levels by one scale for the head, as a key is. A score is their exact sum of
// products times both scales. The weights of a tile, times the values' scales, are rounded to 16 bits by one scale.
//
// A row's result depends on its position alone, for one row as for many. Scores come in tiles of 64 positions, counted from
// position 0. An online softmax goes from tile to tile, and begins anew every 512 positions: a split. The splits are joined in
// ascending order. So one long context is shared out between threads, split by split, without changing a bit. A window moves
// neither tiles nor splits: positions before it are masked, and tiles and splits that no row sees are left out.
// Masked lanes have a weight of exactly 0. In bf16, 0 times a value that is not finite is NaN: a row of a chunk whose values
// are not finite spoils the rows beside it that do not see it.
#pragma once

#include <stddef.h>
#include <stdint.h>

namespace chairlift {

static constexpr int kBlockTokens = 16;
static constexpr int kTilePositions = 64;
static constexpr int kSplitPositions = 512;
static constexpr int kMaxHeadDim = 256;
static constexpr int kMaxTaskQueries = 32;  // rows x query heads of one attention task

// Readers fetch whole vectors and may run this far past the last record; what they read there is dropped.
static constexpr size_t kCacheSlackBytes = 64;

enum class KVType { bf16, int8 };

// Sizes and offsets of one layer's cache. Made by kv_shape() in kv.h.
struct KVShape {
    KVType type;
    int num_kv_heads;
    int head_dim;   // a multiple of 8, up to kMaxHeadDim; of queries, keys and values
    size_t value_offset;  // bytes from the start of a record
    size_t scale_offset;
    size_t record_bytes;
    size_t block_bytes;   // all KV heads of a block
};

// What a layer asks of attention; the same in every step.
struct AttendParams {
    float scale;             // of scores
    int window = INT32_MAX;  // positions that a row sees, its own included
    float softcap = 0.0F;    // a score becomes softcap * tanh(score / softcap); 0: it stays

    bool operator==(const AttendParams&) const = default;
};

// The first position that a row at `position` reads, and how many splits of positions rows from there on read.
static inline int first_read(const AttendParams& params, int position) {
    return position < params.window ? 0 : position - params.window + 1;
}
static inline int num_splits(const AttendParams& params, int position, int num_rows) {
    const int first = first_read(params, position) / kSplitPositions;
    return (position + num_rows + kSplitPositions - 1) / kSplitPositions - first;
}

// One token's keys and values, to be rounded into `slot` = block * 16 + offset.
struct KVWrite {
    const KVShape* shape;
    uint8_t* layer;
    const float* keys;    // (num_kv_heads, head_dim)
    const float* values;  // (num_kv_heads, head_dim)
    int32_t slot;
};

// Consecutive rows of one sequence against one KV head: every query head that shares it.
struct AttendTask {
    const KVShape* shape;
    const uint8_t* layer;
    const int32_t* blocks;  // the sequence's block table
    int kv_head;
    int group_size;         // query heads per KV head; num_rows * group_size <= kMaxTaskQueries
    int num_rows;
    int first_position;     // row r stands at first_position + r and reads positions from first_read() to its own
    const float* queries;   // first row, first head of the group; heads are head_dim apart
    int64_t query_stride;   // floats from a row to the next
    float* out;             // as queries
    int64_t out_stride;
    AttendParams params;
    const float* sinks;     // one logit per head of the group, which joins the softmax's sum; null: none
};

static inline int num_splits(const AttendTask& task) {
    return num_splits(task.params, task.first_position, task.num_rows);
}

// Floats that a split of a task of so many queries leaves: maximum and sum of each, and its weighted sum of the values.
static inline size_t part_floats(int head_dim, int num_queries) {
    return static_cast<size_t>(num_queries) * (2 + (static_cast<size_t>(head_dim) + 15) / 16 * 16);
}

struct AttentionKernels {
    void (*write)(const KVWrite& write);
    void (*attend)(const AttendTask& task);
    // The same split by split, on any threads and in any order: each of the num_splits(task) that are read into part_floats()
    // of its own; then all parts, which lie one after the other, into the rows' outputs.
    void (*attend_split)(const AttendTask& task, int split, float* part);
    void (*join)(const AttendTask& task, const float* parts);
};

#ifdef CHAIRLIFT_ISA_NS
namespace CHAIRLIFT_ISA_NS {
extern const AttentionKernels attention_kernels;
}
#endif

}  // namespace chairlift
