#include "program.h"

#include <algorithm>
#include <set>
#include <utility>

#include "share.h"

namespace chairlift {
namespace {

// Rows that one thread takes through all ops between two attentions: few enough to stay in its cache from op to op.
constexpr int kRangeRows = 64;
// With fewer rows a thread, products are shared out by outputs, so that each weight is read by one thread only: the more
// threads read them all, the more they must do with each.
int least_range_rows(int threads) { return std::min(4 * threads, 48); }

}  // namespace

Program::Program(Parts parts) : parts_(std::move(parts)), checker_(parts_.limits) { find_tail(); }

void Program::find_tail() {
    const auto& ops = parts_.ops;
    tail_ = ops.size();
    while (tail_ > 0 && !ops[tail_ - 1]->reads_step()) --tail_;
    std::set<int> read;
    std::set<int> written;
    for (size_t at = tail_; at < ops.size(); ++at) {
        for (const Lanes lanes : ops[at]->inputs()) {
            if (!lanes.exist() || written.contains(lanes.buffer)) continue;
            need(parts_.arena->dtype(lanes) == DType::f32, "rounded lanes are read before they are written");
            read.insert(lanes.buffer);
        }
        const Lanes out = ops[at]->out();
        if (out.exist() && out.width == parts_.arena->whole(out.buffer).width) written.insert(out.buffer);
    }
    tail_buffers_.assign(read.begin(), read.end());
}

void Program::run(const Step& step, const StepResult& result) {
    const std::lock_guard one_at_a_time(running_);
    checker_.check(step, result);
    for (const std::shared_ptr<StepState>& state : parts_.states) state->prepare(step, *parts_.pool);
    const RunContext context{parts_.kernels, *parts_.arena, *parts_.pool, step, result};
    const Place begin = parts_.ops.begin();
    const Place tail = begin + static_cast<std::ptrdiff_t>(tail_);
    run_ops(begin, tail, step.num_rows(), context);
    gather_tail(step);
    run_ops(tail, parts_.ops.end(), step.num_logit_rows(), context);
}

// Moves the logit rows to the front of what the tail reads.
void Program::gather_tail(const Step& step) {
    for (const int buffer : tail_buffers_) {
        const Lanes all = parts_.arena->whole(buffer);
        for (int i = 0; i < step.num_logit_rows(); ++i) {
            const int row = step.logit_rows[static_cast<size_t>(i)];
            if (row != i) std::copy_n(parts_.arena->f32(all, row), all.width, parts_.arena->f32(all, i));
        }
    }
}

void Program::run_ops(Place begin, Place end, int num_rows, const RunContext& context) {
    const auto of_step = [](const std::unique_ptr<Op>& op) { return op->sharing() == Op::Sharing::step; };
    while (begin < end && num_rows > 0) {
        const Place whole = std::find_if(begin, end, of_step);
        run_between(begin, whole, num_rows, context);
        if (whole == end) return;
        (*whole)->run({0, num_rows}, context);
        begin = whole + 1;
    }
}

// Ops of single rows. Many rows are cut into ranges, each taken through all ops by one thread: it waits for no other between
// two ops, and finds in its cache what the last op wrote.
void Program::run_between(Place begin, Place end, int num_rows, const RunContext& context) {
    const int threads = context.pool.threads();
    if (begin == end) return;
    if (num_rows < threads * least_range_rows(threads)) return run_few(begin, end, num_rows, context);
    const int turns = (num_rows + threads * kRangeRows - 1) / (threads * kRangeRows);
    const int ranges = turns * threads;
    context.pool.run(ranges, [&](int range) {
        const int first = num_rows * range / ranges;
        const Rows rows{first, num_rows * (range + 1) / ranges - first};
        for (Place op = begin; op < end; ++op) (*op)->run(rows, context);
    });
}

// Products are shared out by their outputs, what stands between two of them by rows.
void Program::run_few(Place begin, Place end, int num_rows, const RunContext& context) {
    const auto by_outputs = [](const std::unique_ptr<Op>& op) { return op->sharing() == Op::Sharing::outputs; };
    while (begin < end) {
        const Place product = std::find_if(begin, end, by_outputs);
        int64_t work = 0;
        for (Place op = begin; op < product; ++op) work += (*op)->row_work();
        if (begin < product) {
            share(context.pool, num_rows, work, [&](int64_t first, int64_t last) {
                const Rows rows{static_cast<int>(first), static_cast<int>(last - first)};
                for (Place op = begin; op < product; ++op) (*op)->run(rows, context);
            });
        }
        if (product == end) return;
        (*product)->run_outputs({0, num_rows}, context);
        begin = product + 1;
    }
}

}  // namespace chairlift
