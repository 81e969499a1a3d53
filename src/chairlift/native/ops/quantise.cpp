// quantise: rounds rows to what the lanes of `out` are.
#include <algorithm>

#include "ops/rows.h"
#include "recording.h"

namespace chairlift {
namespace {

class Quantise final : public Op {
public:
    Quantise(Operands& operands, Recording&) : Op({operands.lanes("x")}, operands.lanes("out")) {}

    void check(const Recording& recording) const override {
        recording.arena().check_f32(x(), x().width);
        recording.arena().check_width(out(), x().width);
        need(recording.arena().dtype(out()) != DType::f32, "the output is not rounded");
    }

    int64_t row_work() const override { return 32 * x().width; }

    void run(Rows rows, const RunContext& at) const override {
        each_row(rows, [&](int row) {
            const float* const from = at.arena.f32(x(), row);
            at.arena.fill_row(at.kernels, out(), row,
                              [&](int lane, int count, float* to) { std::copy_n(from + lane, count, to); });
        });
    }

private:
    Lanes x() const { return inputs()[0]; }
};

const Registered<Quantise> registered("quantise");

}  // namespace
}  // namespace chairlift
