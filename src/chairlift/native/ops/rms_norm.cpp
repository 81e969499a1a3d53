// rms_norm: each group of as many lanes as the weight has, over its root mean square. `out` may be x, or rounded.
#include "ops/rows.h"
#include "recording.h"

namespace chairlift {
namespace {

class RmsNorm final : public Op {
public:
    RmsNorm(Operands& operands, Recording& recording)
        : Op({operands.lanes("x")}, operands.lanes("out")),
          weight_(recording.vector(operands.integer("weight"))),
          eps_(operands.real("eps")) {}

    void check(const Recording& recording) const override {
        const Arena& arena = recording.arena();
        arena.check_f32(x(), x().width);
        arena.check_width(out(), x().width);
        const int group = static_cast<int>(weight_->size());
        need(x().width % group == 0, "the norm's weight does not divide the row");
        need(x().width == group || arena.dtype(out()) == DType::f32, "a norm of heads cannot be rounded at once");
    }

    int64_t row_work() const override { return 32 * x().width; }

    void run(Rows rows, const RunContext& at) const override {
        each_row(rows, [&](int row) { norm_row(at.arena.f32(x(), row), *weight_, eps_, out(), row, at); });
    }

private:
    Lanes x() const { return inputs()[0]; }

    std::shared_ptr<const std::vector<float>> weight_;
    float eps_;
};

const Registered<RmsNorm> registered("rms_norm");

}  // namespace
}  // namespace chairlift
