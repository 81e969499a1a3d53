// How a step's attention is shared out between the pool's threads. Touches no row's arithmetic.
//
//   task   rows of one sequence x query heads of one KV group: what the kernel takes together, against each KV head
//   unit   what a thread does at a time: a task against one KV head, or one split of that
//   cut    a task and KV head whose splits are units of their own; the thread that ends the last of them joins them
#pragma once

#include <atomic>
#include <memory>
#include <vector>

#include "attention.h"
#include "kv.h"
#include "op.h"

namespace chairlift {

// What the shares of an attention depend on, beside the step. Layers of one geometry share a schedule.
struct AttentionGeometry {
    int num_kv_heads;
    int group;  // query heads per KV head
    int head_dim;
    AttendParams params;

    bool operator==(const AttentionGeometry&) const = default;
};

// Rows of one sequence and query heads of one KV group; for every KV head alike.
struct AttentionTask {
    int row;
    int num_rows;
    int first_head;  // in its group
    int num_heads;
    int table_start;
    int num_splits;
    int64_t work;  // multiply-adds
};

class AttentionSchedule final : public StepState {
public:
    AttentionSchedule(const Recording& recording, const AttentionGeometry& geometry);

    bool is_for(const AttentionGeometry& geometry) const { return geometry == geometry_; }
    void allocate(Pool& pool) override;
    void prepare(const Step& step, Pool& pool) override;

    // One layer: fill(task, kv_head) gives the kernel's arguments.
    template <class Fill>
    void run(Pool& pool, const AttentionKernels& kernels, Fill fill) {
        begin_cuts();
        const auto run_one = [&](int index) {
            const Unit& unit = units_[static_cast<size_t>(index)];
            run_unit(kernels, fill(tasks_[static_cast<size_t>(unit.task)], unit.kv_head), unit);
        };
        const int num_units = static_cast<int>(units_.size());
        if (work_ >= kSharedWork) return pool.run(num_units, run_one);
        for (int index = 0; index < num_units; ++index) run_one(index);
    }

private:
    // Below about this many multiply-adds all of it is done sooner than it is handed out.
    static constexpr int64_t kSharedWork = 1 << 17;

    struct Unit {
        int task;
        int kv_head;
        int split = -1;  // -1: all of them
        int cut = -1;    // -1: not cut
    };

    struct Cut {
        std::atomic<int> num_left;
        float* parts;
    };

    void make_tasks(const Step& step);
    bool cut_splits(const AttentionTask& task, Unit unit, size_t& num_floats);
    void begin_cuts();
    void run_unit(const AttentionKernels& kernels, const AttendTask& task, const Unit& unit);

    AttentionGeometry geometry_;
    int num_slots_;  // of the KV cache
    int max_cuts_ = 0;
    std::vector<AttentionTask> tasks_;
    std::vector<Unit> units_;
    int64_t work_ = 0;
    std::unique_ptr<Cut[]> cuts_;
    int num_cuts_ = 0;
    std::unique_ptr<Memory> parts_;  // what splits leave until they are joined
};

}  // namespace chairlift
