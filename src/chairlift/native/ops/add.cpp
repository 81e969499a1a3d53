// add: a + b, lane by lane. `out` may be a or b.
#include "ops/rows.h"
#include "recording.h"

namespace chairlift {
namespace {

class Add final : public Op {
public:
    Add(Operands& operands, Recording& recording)
        : Op({operands.lanes("a"), operands.lanes("b")}, operands.lanes("out")),
          kernel_(pair_by_name(recording.kernels().elementwise, "add")) {}

    void check(const Recording& recording) const override {
        for (const Lanes lanes : {a(), b(), out()}) recording.arena().check_f32(lanes, a().width);
    }

    int64_t row_work() const override { return 16 * a().width; }

    void run(Rows rows, const RunContext& at) const override {
        each_row(rows, [&](int row) {
            kernel_(at.arena.f32(a(), row), at.arena.f32(b(), row), a().width, at.arena.f32(out(), row));
        });
    }

private:
    Lanes a() const { return inputs()[0]; }
    Lanes b() const { return inputs()[1]; }

    PairFn kernel_;
};

const Registered<Add> registered("add");

}  // namespace
}  // namespace chairlift
