// rope: turns each head by its row's position. `out` may be x.
//
// Pair i turns by position * frequencies[i]. The angles of a step's rows are computed once for all ops that turn alike.
#include <cmath>

#include "ops/rows.h"
#include "recording.h"
#include "share.h"

namespace chairlift {
namespace {

class Rotations final : public StepState {
public:
    Rotations(const Recording& recording, std::vector<double> frequencies)
        : frequencies_(std::move(frequencies)),
          cosines_(frequencies_.size() * static_cast<size_t>(recording.max_rows())),
          sines_(cosines_.size()) {}

    bool is_for(const std::vector<double>& frequencies) const { return frequencies == frequencies_; }

    int num_pairs() const { return static_cast<int>(frequencies_.size()); }
    const float* cosines(int row) const { return cosines_.data() + int64_t{row} * num_pairs(); }
    const float* sines(int row) const { return sines_.data() + int64_t{row} * num_pairs(); }

    void allocate(Pool&) override {}

    void prepare(const Step& step, Pool& pool) override {
        const size_t pairs = frequencies_.size();
        share_rows(pool, step.num_rows(), static_cast<int64_t>(pairs) * 64, [&](int row) {
            for (size_t pair = 0; pair < pairs; ++pair) {
                const double angle = step.positions[static_cast<size_t>(row)] * frequencies_[pair];
                const size_t at = static_cast<size_t>(row) * pairs + pair;
                cosines_[at] = static_cast<float>(std::cos(angle));
                sines_[at] = static_cast<float>(std::sin(angle));
            }
        });
    }

private:
    std::vector<double> frequencies_;
    std::vector<float> cosines_;  // (max_rows, pairs)
    std::vector<float> sines_;
};

class Rope final : public Op {
public:
    Rope(Operands& operands, Recording& recording)
        : Op({operands.lanes("x")}, operands.lanes("out")),
          rotations_(recording.share_state<Rotations>(operands.reals("frequencies"))),
          head_dim_(operands.integer("head_dim")),
          style_(operands.text("style")) {}

    void check(const Recording& recording) const override {
        recording.arena().check_f32(x(), x().width);
        recording.arena().check_f32(out(), x().width);
        need(rotations_->num_pairs() > 0, "a rope without pairs");
        need(2 * rotations_->num_pairs() <= head_dim_, "a rope wider than a head");
        need(x().width % head_dim_ == 0, "the row is not whole heads");
        need(style_ == "interleaved" || style_ == "halves", "a rope is interleaved or in halves");
    }

    bool reads_step() const override { return true; }
    int64_t row_work() const override { return 16 * x().width; }

    void run(Rows rows, const RunContext& at) const override {
        const int num_heads = x().width / head_dim_;
        const bool interleaved = style_ == "interleaved";
        each_row(rows, [&](int row) {
            const RopeRow turn{rotations_->cosines(row), rotations_->sines(row), rotations_->num_pairs(), num_heads, head_dim_,
                               interleaved};
            at.kernels.elementwise.rope(at.arena.f32(x(), row), turn, at.arena.f32(out(), row));
        });
    }

private:
    Lanes x() const { return inputs()[0]; }

    std::shared_ptr<Rotations> rotations_;
    int head_dim_;
    std::string style_;
};

const Registered<Rope> registered("rope");

}  // namespace
}  // namespace chairlift
