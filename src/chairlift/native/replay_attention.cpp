// How a step's attention is shared out between the pool's threads. Nothing here touches a row's arithmetic.
#include <algorithm>
#include <bit>
#include <cmath>

#include "program.h"

namespace chairlift {
namespace {

// Below about this many multiply-adds all of it is done sooner than it is handed out.
constexpr int64_t kSharedWork = 1 << 17;
// A unit of more than one such share of a thread's part of the step would be waited for at the end.
constexpr int kSharesPerThread = 4;
// Room for 10,000 splits of three queries of 64 lanes. What does not fit stays whole: slower, and the same to the bit.
constexpr size_t kMaxPartBytes = size_t{8} << 20;

int max_cuts(const Pool& pool) { return pool.threads() == 1 ? 0 : pool.threads() * kSharesPerThread; }

}  // namespace

void Program::reserve_parts() {
    if (max_cuts(*pool_) == 0) return;
    const KVShape& shape = cache_->shape();
    const size_t splits = static_cast<size_t>(cache_->num_blocks()) * kBlockTokens / kSplitPositions + 1;
    const size_t most = splits * static_cast<size_t>(max_cuts(*pool_)) * part_floats(shape, kMaxTaskQueries) * sizeof(float);
    cuts_ = std::make_unique<Cut[]>(static_cast<size_t>(max_cuts(*pool_)));
    parts_ = std::make_unique<Memory>(std::min(most, kMaxPartBytes), *pool_);
}

// Cuts each sequence's rows so that rows times the query heads of one KV head fill a task.
void Program::cut_tiles(const Step& step, int group) {
    tiles_.clear();
    const int heads = std::min(group, kMaxTaskQueries);
    const int rows = std::max(1, kMaxTaskQueries / heads);
    for (size_t sequence = 0; sequence + 1 < step.seq_starts.size(); ++sequence) {
        const int end = step.seq_starts[sequence + 1];
        for (int row = step.seq_starts[sequence]; row < end; row += rows) {
            for (int head = 0; head < group; head += heads) {
                Tile tile{row, std::min(rows, end - row), head, std::min(heads, group - head)};
                tile.table_start = step.table_starts[sequence];
                const int64_t positions = step.positions[static_cast<size_t>(row)] + tile.num_rows;
                tile.num_splits = static_cast<int>((positions + kSplitPositions - 1) / kSplitPositions);
                tile.work = 2 * positions * tile.num_rows * tile.num_heads * cache_->shape().head_dim;
                tiles_.push_back(tile);
            }
        }
    }
}

// Adds a unit for each split of `unit`, unless the parts have no room for them.
bool Program::cut_splits(const Tile& tile, Unit unit, size_t& num_floats) {
    const size_t part = part_floats(cache_->shape(), tile.num_rows * tile.num_heads);
    const size_t needed = part * static_cast<size_t>(tile.num_splits);
    if ((num_floats + needed) * sizeof(float) > parts_->bytes()) return false;
    unit.cut = num_cuts_++;
    cuts_[static_cast<size_t>(unit.cut)].parts = reinterpret_cast<float*>(parts_->data()) + num_floats;
    num_floats += needed;
    for (unit.split = 0; unit.split < tile.num_splits; ++unit.split) units_.push_back(unit);
    return true;
}

// Long units first, so that short ones fill the end; among alike ones a KV head after the other, so that sequences with a
// common prefix find its blocks in the caches.
void Program::plan_attention(const Step& step, int group) {
    planned_group_ = group;
    cut_tiles(step, group);
    const int num_kv_heads = cache_->shape().num_kv_heads;
    attend_work_ = 0;
    for (const Tile& tile : tiles_) attend_work_ += tile.work * num_kv_heads;
    units_.clear();
    num_cuts_ = 0;
    size_t num_floats = 0;
    for (int kv_head = 0; kv_head < num_kv_heads; ++kv_head) {
        for (int index = 0; index < static_cast<int>(tiles_.size()); ++index) {
            const Tile& tile = tiles_[static_cast<size_t>(index)];
            const Unit unit{index, kv_head};
            const bool large = tile.num_splits > 1 && tile.work * max_cuts(*pool_) > attend_work_;
            if (!large || !cut_splits(tile, unit, num_floats)) units_.push_back(unit);
        }
    }
    const auto magnitude = [this](const Unit& unit) {
        const Tile& tile = tiles_[static_cast<size_t>(unit.tile)];
        const int64_t work = unit.cut < 0 ? tile.work : tile.work / tile.num_splits;
        return std::bit_width(static_cast<uint64_t>(work));
    };
    std::stable_sort(units_.begin(), units_.end(),
                     [&](const Unit& a, const Unit& b) { return magnitude(a) > magnitude(b); });
}

AttendTask Program::attend_task(const Op& op, const Step& step, const Unit& unit) const {
    const KVShape& shape = cache_->shape();
    const Tile& tile = tiles_[static_cast<size_t>(unit.tile)];
    const int lane = (unit.kv_head * planned_group_ + tile.first_head) * shape.head_dim;
    return {
        .shape = &shape,
        .layer = cache_->layer(op.index),
        .blocks = step.block_tables.data() + tile.table_start,
        .kv_head = unit.kv_head,
        .group_size = tile.num_heads,
        .num_rows = tile.num_rows,
        .first_position = step.positions[static_cast<size_t>(tile.row)],
        .queries = f32(op.a, tile.row) + lane,
        .query_stride = stride(op.a),
        .out = f32(op.out, tile.row) + lane,
        .out_stride = stride(op.out),
        .scale = 1.0F / std::sqrt(static_cast<float>(shape.head_dim)),
    };
}

void Program::run_unit(const AttendTask& task, const Unit& unit) {
    if (unit.cut < 0) {
        kernels_.attention.attend(task);
        return;
    }
    Cut& cut = cuts_[static_cast<size_t>(unit.cut)];
    const size_t part = part_floats(*task.shape, task.num_rows * task.group_size);
    kernels_.attention.attend_split(task, unit.split, cut.parts + part * static_cast<size_t>(unit.split));
    // Whoever ends last sees what the others wrote, and joins in the order of the splits, not of their ends.
    if (cut.num_left.fetch_sub(1, std::memory_order_acq_rel) == 1) kernels_.attention.join(task, cut.parts);
}

void Program::run_attend(const Op& op, const Step& step) {
    const int group = op.a.width / (cache_->shape().num_kv_heads * cache_->shape().head_dim);
    if (group != planned_group_) plan_attention(step, group);
    for (const Unit& unit : units_) {
        if (unit.split == 0) {
            const int num_splits = tiles_[static_cast<size_t>(unit.tile)].num_splits;
            cuts_[static_cast<size_t>(unit.cut)].num_left.store(num_splits, std::memory_order_relaxed);
        }
    }
    const auto attend = [&](int index) {
        const Unit& unit = units_[static_cast<size_t>(index)];
        run_unit(attend_task(op, step, unit), unit);
    };
    const int num_units = static_cast<int>(units_.size());
    if (attend_work_ < kSharedWork) {
        for (int index = 0; index < num_units; ++index) attend(index);
    } else {
        pool_->run(num_units, attend);
    }
}

}  // namespace chairlift
