// logits: norm, head product and sampling of the step's logit rows. The last op, once.
//
// Rows go through kLogitRows at a time, so that no buffer of all rows times the vocabulary is needed.
#include <algorithm>

#include "ops/product.h"
#include "ops/rows.h"
#include "recording.h"

namespace chairlift {
namespace {

constexpr int kLogitRows = 32;  // cost.LOGIT_ROWS

class Logits final : public Op {
public:
    // `norm` and `eps` are absent where another op has normed the rows. `input` is what the head takes.
    Logits(Operands& operands, Recording& recording)
        : Op({operands.lanes("x")}, {}), head_(recording.matrix(operands.integer("matrix"))), vocab_(recording.vocab()) {
        if (operands.has("norm")) {
            norm_ = recording.vector(operands.integer("norm"));
            eps_ = operands.real("eps");
        }
        const DType dtype = dtype_from_name(operands.text("input"));
        need(takes(*head_, dtype), "the head takes the other kind of activations");
        const int rows = std::min(kLogitRows, recording.max_rows());
        Arena& arena = recording.arena();
        rows_ = arena.whole(arena.add_buffer(x().width, dtype, rows));
        logits_ = arena.whole(arena.add_buffer(vocab_, DType::f32, rows));
        scratch_ = arena.whole(arena.add_buffer(2 * vocab_, DType::f32, recording.pool().threads()));
    }

    void check(const Recording& recording) const override {
        recording.arena().check_f32(x(), static_cast<int>(head_->cols()));
        need(head_->rows() == vocab_, "the head's rows are not the vocabulary");
        need(norm_ == nullptr || norm_->size() == static_cast<size_t>(x().width), "the norm has another width");
    }

    Sharing sharing() const override { return Sharing::step; }
    bool ends_step() const override { return true; }
    int64_t row_work() const override { return 32 * x().width; }

    void run(Rows rows, const RunContext& at) const override {
        for (int first = 0; first < rows.count; first += kLogitRows) {
            const int count = std::min(kLogitRows, rows.count - first);
            share_rows(at.pool, count, row_work(), [&](int i) { take_row(first + i, i, at); });
            MatmulArgs args{};
            args.weights = head_->view();
            args.x = at.arena.activations(rows_, 0);
            args.num_rows = count;
            args.out = at.arena.f32(logits_, 0);
            args.out_stride = at.arena.stride(logits_);
            multiply_shared(args, at.kernels, at.pool);
            sample(first, count, at);
        }
    }

private:
    Lanes x() const { return inputs()[0]; }

    // Row `from` of x becomes row `to` of what the head multiplies.
    void take_row(int from, int to, const RunContext& at) const {
        const float* const row = at.arena.f32(x(), from);
        if (norm_ != nullptr) return norm_row(row, *norm_, eps_, rows_, to, at);
        at.arena.fill_row(at.kernels, rows_, to, [&](int lane, int count, float* out) { std::copy_n(row + lane, count, out); });
    }

    void sample(int first, int count, const RunContext& at) const {
        const int chunks = std::min(at.pool.threads(), count);  // each with a scratch row of its own
        at.pool.run(chunks, [&](int chunk) {
            for (int i = chunk; i < count; i += chunks) {
                sample_row(static_cast<size_t>(first + i), at.arena.f32(logits_, i), at.arena.f32(scratch_, chunk), at);
            }
        });
    }

    void sample_row(size_t row, const float* logits, float* scratch, const RunContext& at) const {
        const Step& step = at.step;
        const StepResult& result = at.result;
        if (!result.logits.empty()) std::copy_n(logits, vocab_, result.logits.data() + row * static_cast<size_t>(vocab_));
        const int32_t bias = step.bias_starts[row];
        const int32_t seen = step.seen_starts[row];
        const Adjustments adjustments{step.bias_ids.data() + bias,     step.bias_values.data() + bias,
                                      step.bias_starts[row + 1] - bias, step.seen_ids.data() + seen,
                                      step.seen_counts.data() + seen,   step.seen_starts[row + 1] - seen};
        const SampleResult sampled = reduce_logits(at.kernels.sample, logits, vocab_, step.sample[row], adjustments, scratch);
        result.tokens[row] = sampled.token;
        result.logprobs[row] = sampled.logprob;
        result.finite[row] = sampled.finite;
        std::copy_n(sampled.top_ids, kMaxTop, result.top_ids.data() + row * kMaxTop);
        std::copy_n(sampled.top_logprobs, kMaxTop, result.top_logprobs.data() + row * kMaxTop);
    }

    std::shared_ptr<const PackedMatrix> head_;
    std::shared_ptr<const std::vector<float>> norm_;  // null: none
    float eps_ = 0.0F;
    int vocab_;
    Lanes rows_;     // (kLogitRows, width): as the head takes them
    Lanes logits_;   // (kLogitRows, vocab)
    Lanes scratch_;  // (threads, 2 * vocab) for sampling
};

const Registered<Logits> registered("logits");

}  // namespace
}  // namespace chairlift
