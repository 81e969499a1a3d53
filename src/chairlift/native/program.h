// A recorded forward pass, replayed once a step: ops in order over one arena of activations.
//
// Owns how ops are shared out between threads; knows none of them by name (op.h), nor how they were recorded (recording.h).
// What one op wrote the next reads: every row of it before an op of the whole step (attention), a thread's own rows else.
#pragma once

#include <memory>
#include <mutex>
#include <vector>

#include "arena.h"
#include "op.h"
#include "pool.h"
#include "step.h"

namespace chairlift {

class Program {
public:
    // What a recording leaves: checked, and allocated.
    struct Parts {
        const Kernels& kernels;
        std::shared_ptr<Pool> pool;
        StepLimits limits;
        std::unique_ptr<Arena> arena;
        std::vector<std::unique_ptr<Op>> ops;
        std::vector<std::shared_ptr<StepState>> states;
        size_t weight_bytes;
    };

    explicit Program(Parts parts);

    // Throws std::invalid_argument when the step is malformed. Callers on several threads take turns.
    void run(const Step& step, const StepResult& result);

    int num_ops() const { return static_cast<int>(parts_.ops.size()); }
    size_t weight_bytes() const { return parts_.weight_bytes; }
    size_t activation_bytes() const { return parts_.arena->bytes(); }

private:
    using Place = std::vector<std::unique_ptr<Op>>::const_iterator;

    void find_tail();
    void gather_tail(const Step& step);
    void run_ops(Place begin, Place end, int num_rows, const RunContext& context);
    void run_between(Place begin, Place end, int num_rows, const RunContext& context);
    void run_few(Place begin, Place end, int num_rows, const RunContext& context);

    Parts parts_;
    StepChecker checker_;
    // The first op beyond the last that looks at the step: from there on only the logit rows are needed.
    size_t tail_ = 0;
    std::vector<int> tail_buffers_;  // that these ops read before they write them
    std::mutex running_;
};

}  // namespace chairlift
