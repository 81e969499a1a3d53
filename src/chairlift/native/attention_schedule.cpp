#include "attention_schedule.h"

#include <algorithm>
#include <bit>

#include "recording.h"

namespace chairlift {
namespace {

// A unit of more than one such share of a thread's part of the step would be waited for at the end.
constexpr int kSharesPerThread = 4;
// Room for 10,000 splits of three queries of 64 lanes. What does not fit stays whole: slower, and the same to the bit.
constexpr size_t kMaxPartBytes = size_t{8} << 20;

}  // namespace

AttentionSchedule::AttentionSchedule(const Recording& recording, const AttentionGeometry& geometry)
    : geometry_(geometry), num_slots_(recording.cache()->num_blocks() * kBlockTokens) {}

void AttentionSchedule::allocate(Pool& pool) {
    max_cuts_ = pool.threads() == 1 ? 0 : pool.threads() * kSharesPerThread;
    if (max_cuts_ == 0) return;
    const auto cuts = static_cast<size_t>(max_cuts_);
    const size_t splits = static_cast<size_t>(num_slots_) / kSplitPositions + 1;
    const size_t most = splits * cuts * part_floats(geometry_.head_dim, kMaxTaskQueries) * sizeof(float);
    cuts_ = std::make_unique<Cut[]>(cuts);
    parts_ = std::make_unique<Memory>(std::min(most, kMaxPartBytes), pool);
}

// Cuts each sequence's rows so that rows times the query heads of one KV head fill a task.
void AttentionSchedule::make_tasks(const Step& step) {
    tasks_.clear();
    const int group = geometry_.group;
    const int heads = std::min(group, kMaxTaskQueries);
    const int rows = std::max(1, kMaxTaskQueries / heads);
    for (size_t sequence = 0; sequence + 1 < step.seq_starts.size(); ++sequence) {
        const int end = step.seq_starts[sequence + 1];
        for (int row = step.seq_starts[sequence]; row < end; row += rows) {
            for (int head = 0; head < group; head += heads) {
                AttentionTask task{row, std::min(rows, end - row), head, std::min(heads, group - head), 0, 0, 0};
                task.table_start = step.table_starts[sequence];
                const int first = step.positions[static_cast<size_t>(row)];
                const int64_t positions = first + task.num_rows - first_read(geometry_.params, first);
                task.num_splits = num_splits(geometry_.params, first, task.num_rows);
                task.work = 2 * positions * task.num_rows * task.num_heads * geometry_.head_dim;
                tasks_.push_back(task);
            }
        }
    }
}

// Adds a unit for each split of `unit`. False when the parts have no room for them.
bool AttentionSchedule::cut_splits(const AttentionTask& task, Unit unit, size_t& num_floats) {
    const size_t part = part_floats(geometry_.head_dim, task.num_rows * task.num_heads);
    const size_t needed = part * static_cast<size_t>(task.num_splits);
    if ((num_floats + needed) * sizeof(float) > parts_->bytes()) return false;
    unit.cut = num_cuts_++;
    cuts_[static_cast<size_t>(unit.cut)].parts = reinterpret_cast<float*>(parts_->data()) + num_floats;
    num_floats += needed;
    for (unit.split = 0; unit.split < task.num_splits; ++unit.split) units_.push_back(unit);
    return true;
}

// Long units first, so that short ones fill the end. Among alike ones a KV head after the other, so that sequences with a
// common prefix find its blocks in the processor's caches.
void AttentionSchedule::prepare(const Step& step, Pool&) {
    make_tasks(step);
    const int num_kv_heads = geometry_.num_kv_heads;
    work_ = 0;
    for (const AttentionTask& task : tasks_) work_ += task.work * num_kv_heads;
    units_.clear();
    num_cuts_ = 0;
    size_t num_floats = 0;
    for (int kv_head = 0; kv_head < num_kv_heads; ++kv_head) {
        for (int index = 0; index < static_cast<int>(tasks_.size()); ++index) {
            const AttentionTask& task = tasks_[static_cast<size_t>(index)];
            const Unit unit{index, kv_head};
            const bool large = task.num_splits > 1 && task.work * max_cuts_ > work_;
            if (!large || !cut_splits(task, unit, num_floats)) units_.push_back(unit);
        }
    }
    const auto magnitude = [this](const Unit& unit) {
        const AttentionTask& task = tasks_[static_cast<size_t>(unit.task)];
        const int64_t work = unit.cut < 0 ? task.work : task.work / task.num_splits;
        return std::bit_width(static_cast<uint64_t>(work));
    };
    std::stable_sort(units_.begin(), units_.end(),
                     [&](const Unit& a, const Unit& b) { return magnitude(a) > magnitude(b); });
}

void AttentionSchedule::begin_cuts() {
    for (const Unit& unit : units_) {
        if (unit.split != 0) continue;
        const int num_splits = tasks_[static_cast<size_t>(unit.task)].num_splits;
        cuts_[static_cast<size_t>(unit.cut)].num_left.store(num_splits, std::memory_order_relaxed);
    }
}

void AttentionSchedule::run_unit(const AttentionKernels& kernels, const AttendTask& task, const Unit& unit) {
    if (unit.cut < 0) return kernels.attend(task);
    Cut& cut = cuts_[static_cast<size_t>(unit.cut)];
    const size_t part = part_floats(task.shape->head_dim, task.num_rows * task.group_size);
    kernels.attend_split(task, unit.split, cut.parts + part * static_cast<size_t>(unit.split));
    // The last to end sees what the others wrote, and joins in the order of the splits, not of their ends.
    if (cut.num_left.fetch_sub(1, std::memory_order_acq_rel) == 1) kernels.join(task, cut.parts);
}

}  // namespace chairlift
