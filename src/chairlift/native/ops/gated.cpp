// gated: activation(gate) * up, lane by lane. `out` may be gate or up, or rounded.
#include "ops/rows.h"
#include "recording.h"

namespace chairlift {
namespace {

class Gated final : public Op {
public:
    Gated(Operands& operands, Recording& recording)
        : Op({operands.lanes("gate"), operands.lanes("up")}, operands.lanes("out")),
          activation_(operands.text("activation")),
          kernel_(pair_by_name(recording.kernels().elementwise, activation_.c_str())) {}

    void check(const Recording& recording) const override {
        need(kernel_ != nullptr, ("there is no activation " + activation_).c_str());
        recording.arena().check_f32(gate(), gate().width);
        recording.arena().check_f32(up(), gate().width);
        recording.arena().check_width(out(), gate().width);
    }

    int64_t row_work() const override { return 64 * gate().width; }

    void run(Rows rows, const RunContext& at) const override {
        each_row(rows, [&](int row) {
            const float* const gates = at.arena.f32(gate(), row);
            const float* const ups = at.arena.f32(up(), row);
            at.arena.fill_row(at.kernels, out(), row, [&](int lane, int count, float* to) {
                kernel_(gates + lane, ups + lane, count, to);
            });
        });
    }

private:
    Lanes gate() const { return inputs()[0]; }
    Lanes up() const { return inputs()[1]; }

    std::string activation_;
    PairFn kernel_;
};

const Registered<Gated> registered("gated");

}  // namespace
}  // namespace chairlift
