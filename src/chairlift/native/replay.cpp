// Replaying a recorded program: one step, shared out over the pool.
#include <algorithm>
#include <cmath>
#include <stdexcept>

#include "program.h"

namespace chairlift {
namespace {

// Below about this many multiply-adds a chunk costs less than handing it to another thread (a few microseconds).
constexpr int64_t kChunkWork = 1 << 16;
// More chunks than threads, so that a thread that lost its core is not waited for long.
constexpr int kChunksPerThread = 2;
// Lanes of a row made as f32 before they are rounded; whole blocks of 32.
constexpr int kSliceLanes = 512;
// Rows that one thread takes through all ops between two attentions: few enough to stay in its cache from op to op.
constexpr int kBlockRows = 64;
// With fewer rows a thread, an op's outputs are shared out instead, so that each weight is read by one thread only: the more
// threads read them all, the more they must do with each.
int least_block_rows(int threads) { return std::min(4 * threads, 48); }

template <class Rows, class Fn>
void each_row(Rows rows, Fn fn) {
    for (int row = rows.first; row < rows.first + rows.count; ++row) fn(row);
}

}  // namespace

// Cuts `units` into contiguous ranges and calls fn(begin, end) for each, in parallel when there is enough work.
template <class Fn>
void Program::share(int64_t units, int64_t work_per_unit, Fn fn) {
    const int64_t most = pool_->threads() == 1 ? 1 : int64_t{pool_->threads()} * kChunksPerThread;
    const int64_t worth = units * work_per_unit / kChunkWork;
    const int chunks = static_cast<int>(std::clamp<int64_t>(std::min(units, worth), 1, most));
    pool_->run(chunks, [&](int chunk) { fn(units * chunk / chunks, units * (chunk + 1) / chunks); });
}

// Calls fn(row) for each of a step's rows, in parallel when there is enough work.
template <class Fn>
void Program::share_rows(int rows, int64_t work_per_row, Fn fn) {
    share(rows, work_per_row, [&](int64_t begin, int64_t end) {
        for (int64_t row = begin; row < end; ++row) fn(static_cast<int>(row));
    });
}

// Makes a row with fill(first_lane, num_lanes, f32 destination), rounding it slice by slice unless `out` is f32.
template <class Fill>
void Program::fill_row(Lanes out, int row, Fill fill) const {
    const Buffer& buffer = buffers_[static_cast<size_t>(out.buffer)];
    if (buffer.dtype == DType::f32) {
        fill(0, out.width, f32(out, row));
        return;
    }
    alignas(64) float slice[kSliceLanes];
    for (int lane = 0; lane < out.width; lane += kSliceLanes) {
        const int count = std::min(kSliceLanes, out.width - lane);
        fill(lane, count, slice);
        if (buffer.has_levels()) {
            const auto quantise = kernels_.elementwise.quantise[buffer.level_bytes() - 1];
            quantise(slice, count, levels(buffer, int64_t{row} * buffer.width + lane));
        } else {
            kernels_.matmul_float.round(slice, lane, count, f32(out, row));
        }
    }
}

void Program::norm_row(const float* x, int width, const Op& op, Lanes out, int row) const {
    const ElementwiseKernels& kernel = kernels_.elementwise;
    const std::vector<float>& weight = vectors_[static_cast<size_t>(op.vector)];
    const int group = static_cast<int>(weight.size());
    for (int start = 0; start < width; start += group) {
        const float factor = kernel.inverse_rms(x + start, group, op.eps);
        const Lanes part = group == width ? out : Lanes{out.buffer, out.offset + start, group};
        fill_row(part, row, [&](int lane, int count, float* to) {
            kernel.scale(x + start + lane, weight.data() + lane, factor, count, to);
        });
    }
}

void Program::run(const Step& step, const StepResult& result) {
    if (arena_ == nullptr) throw std::invalid_argument("the program is not finished");
    const std::lock_guard one_at_a_time(running_);
    checker_.check(step, result);
    prepare(step);
    const Op* const tail = ops_.data() + tail_;
    for (const Op* op = ops_.data(); op < tail;) {
        const Op* const next = std::find_if(op, tail, [](const Op& o) { return o.kind == Kind::attend; });
        run_ops(op, next, step.num_rows(), step);
        if (next < tail) run_attend(*next, step);
        op = next + 1;
    }
    gather_tail(step);
    run_ops(tail, &ops_.back(), step.num_logit_rows(), step);
    run_logits(ops_.back(), step, result);
}

// Moves the logit rows to the front of what the tail reads: the others need nothing beyond the last attention.
void Program::gather_tail(const Step& step) {
    for (const int buffer : tail_buffers_) {
        const Lanes all{buffer, 0, buffers_[static_cast<size_t>(buffer)].width};
        for (int i = 0; i < step.num_logit_rows(); ++i) {
            const int row = step.logit_rows[static_cast<size_t>(i)];
            if (row != i) std::copy_n(f32(all, row), all.width, f32(all, i));
        }
    }
}

// Ops that look at one row at a time. Many rows are cut into blocks, each taken through all of them by one thread: no waiting
// for other threads between ops, and what an op writes the next finds in the cache. Of few rows, products are shared out by
// their outputs, and what stands between two of them by rows.
void Program::run_ops(const Op* begin, const Op* end, int rows, const Step& step) {
    if (rows == 0) return;
    const int threads = pool_->threads();
    if (rows >= threads * least_block_rows(threads)) {
        const int turns = (rows + threads * kBlockRows - 1) / (threads * kBlockRows);
        const int blocks = turns * threads;
        pool_->run(blocks, [&](int block) {
            const int first = rows * block / blocks;
            run_rows(begin, end, {first, rows * (block + 1) / blocks - first}, step);
        });
        return;
    }
    for (const Op* op = begin; op < end;) {
        const Op* const product = std::find_if(op, end, [](const Op& o) { return o.kind == Kind::matmul; });
        int64_t work = 0;
        for (const Op* o = op; o < product; ++o) work += row_work(*o);
        if (op < product) {
            share(rows, work, [&](int64_t first, int64_t last) {
                run_rows(op, product, {static_cast<int>(first), static_cast<int>(last - first)}, step);
            });
        }
        if (product < end) run_matmul(*product, {0, rows}, true);
        op = product + 1;
    }
}

void Program::run_rows(const Op* begin, const Op* end, Rows rows, const Step& step) {
    for (const Op* op = begin; op < end; ++op) run_op(*op, rows, step);
}

// Multiply-adds of a product that take about as long as a row of an op that is none.
int64_t Program::row_work(const Op& op) {
    switch (op.kind) {
        case Kind::swiglu:
        case Kind::write_kv: return 64 * op.a.width;
        case Kind::rms_norm:
        case Kind::quantise: return 32 * op.a.width;
        case Kind::embed: return 16 * op.out.width;
        default: return 16 * op.a.width;
    }
}

// What all layers share: the rotations of the step's positions, and how attention is shared out.
void Program::prepare(const Step& step) {
    planned_group_ = 0;
    for (Rope& rope : ropes_) {
        const size_t pairs = rope.frequencies.size();
        share_rows(step.num_rows(), static_cast<int64_t>(pairs) * 64, [&](int row) {
            for (size_t pair = 0; pair < pairs; ++pair) {
                const double angle = step.positions[static_cast<size_t>(row)] * rope.frequencies[pair];
                const size_t at = static_cast<size_t>(row) * pairs + pair;
                rope.cosines[at] = static_cast<float>(std::cos(angle));
                rope.sines[at] = static_cast<float>(std::sin(angle));
            }
        });
    }
}

void Program::run_op(const Op& op, Rows rows, const Step& step) {
    const ElementwiseKernels& kernel = kernels_.elementwise;
    switch (op.kind) {
        case Kind::embed: {
            const MatrixView& table = matrices_[static_cast<size_t>(op.matrix)]->view();
            each_row(rows, [&](int row) {
                embed_row(table, step.tokens[static_cast<size_t>(row)], f32(op.out, row));
            });
            break;
        }
        case Kind::rms_norm:
            each_row(rows, [&](int row) { norm_row(f32(op.a, row), op.a.width, op, op.out, row); });
            break;
        case Kind::quantise:
            each_row(rows, [&](int row) {
                fill_row(op.out, row, [&](int lane, int count, float* to) {
                    std::copy_n(f32(op.a, row) + lane, count, to);
                });
            });
            break;
        case Kind::swiglu:
            each_row(rows, [&](int row) {
                fill_row(op.out, row, [&](int lane, int count, float* to) {
                    kernel.swiglu(f32(op.a, row) + lane, f32(op.b, row) + lane, count, to);
                });
            });
            break;
        case Kind::add:
            each_row(rows, [&](int row) {
                kernel.add(f32(op.a, row), f32(op.b, row), op.a.width, f32(op.out, row));
            });
            break;
        case Kind::matmul: run_matmul(op, rows, false); break;
        case Kind::rope: run_rope(op, rows); break;
        case Kind::write_kv: run_write_kv(op, rows, step); break;
        case Kind::attend:
        case Kind::logits: break;  // not of single rows
    }
}

// In pairs of panels: the kernels take two at a time.
void Program::multiply(const MatmulArgs& args, bool shared) {
    const int64_t work = int64_t{args.num_rows} * 2 * kPanelRows * args.weights.cols;
    const int64_t panels = (args.weights.rows + kPanelRows - 1) / kPanelRows;
    const MatmulFn run = kernels_.product(args.weights.layout);
    if (!shared) return run(args, 0, panels);
    share((panels + 1) / 2, work, [&](int64_t begin, int64_t end) {
        run(args, 2 * begin, std::min(2 * end, panels));
    });
}

void Program::run_matmul(const Op& op, Rows rows, bool shared) {
    MatmulArgs args{};
    args.weights = matrices_[static_cast<size_t>(op.matrix)]->view();
    args.x = activations(op.a, rows.first);
    args.num_rows = rows.count;
    args.out = f32(op.out, rows.first);
    args.out_stride = stride(op.out);
    if (op.vector >= 0) args.bias = vectors_[static_cast<size_t>(op.vector)].data();
    if (op.b.buffer >= 0) {
        args.residual = f32(op.b, rows.first);
        args.residual_stride = stride(op.b);
    }
    multiply(args, shared);
}

void Program::run_rope(const Op& op, Rows rows) {
    const Rope& rope = ropes_[static_cast<size_t>(op.index)];
    const int pairs = static_cast<int>(rope.frequencies.size());
    const int head_dim = cache_->shape().head_dim;
    each_row(rows, [&](int row) {
        const float* const cosines = rope.cosines.data() + int64_t{row} * pairs;
        const float* const sines = rope.sines.data() + int64_t{row} * pairs;
        const RopeRow turn{cosines, sines, pairs, op.a.width / head_dim, head_dim, rope.interleaved};
        kernels_.elementwise.rope(f32(op.a, row), turn, f32(op.out, row));
    });
}

void Program::run_write_kv(const Op& op, Rows rows, const Step& step) {
    each_row(rows, [&](int row) {
        const int32_t slot = step.slots[static_cast<size_t>(row)];
        kernels_.attention.write({&cache_->shape(), cache_->layer(op.index), f32(op.a, row), f32(op.b, row), slot});
    });
}

void Program::norm_logit_rows(const Op& op, int first, int count) {
    share_rows(count, 32 * op.a.width, [&](int i) {
        const float* const x = f32(op.a, first + i);
        if (op.vector >= 0) {
            norm_row(x, op.a.width, op, head_in_, i);
        } else {
            fill_row(head_in_, i, [&](int lane, int lanes, float* to) { std::copy_n(x + lane, lanes, to); });
        }
    });
}

// In tiles of few rows, so that no buffer of all rows times the vocabulary is needed.
void Program::run_logits(const Op& op, const Step& step, const StepResult& result) {
    const int total = step.num_logit_rows();
    for (int first = 0; first < total; first += kLogitTile) {
        const int count = std::min(kLogitTile, total - first);
        norm_logit_rows(op, first, count);
        MatmulArgs args{};
        args.weights = matrices_[static_cast<size_t>(op.matrix)]->view();
        args.x = activations(head_in_, 0);
        args.num_rows = count;
        args.out = f32(head_out_, 0);
        args.out_stride = stride(head_out_);
        multiply(args, true);
        reduce(step, result, first, count);
    }
}

void Program::reduce(const Step& step, const StepResult& result, int first, int count) {
    const int chunks = std::min(pool_->threads(), count);  // each with a scratch row of its own
    pool_->run(chunks, [&](int chunk) {
        for (int i = chunk; i < count; i += chunks) {
            const size_t at = static_cast<size_t>(first + i);
            const float* const logits = f32(head_out_, i);
            if (!result.logits.empty()) std::copy_n(logits, vocab_, result.logits.data() + at * static_cast<size_t>(vocab_));
            const int32_t bias = step.bias_starts[at];
            const int32_t seen = step.seen_starts[at];
            const Adjustments adjustments{step.bias_ids.data() + bias,    step.bias_values.data() + bias,
                                          step.bias_starts[at + 1] - bias, step.seen_ids.data() + seen,
                                          step.seen_counts.data() + seen,  step.seen_starts[at + 1] - seen};
            const SampleResult sampled =
                reduce_logits(kernels_.sample, logits, vocab_, step.sample[at], adjustments, f32(scratch_, chunk));
            result.tokens[at] = sampled.token;
            result.logprobs[at] = sampled.logprob;
            result.finite[at] = sampled.finite;
            std::copy_n(sampled.top_ids, kMaxTop, result.top_ids.data() + at * kMaxTop);
            std::copy_n(sampled.top_logprobs, kMaxTop, result.top_logprobs.data() + at * kMaxTop);
        }
    });
}

}  // namespace chairlift
