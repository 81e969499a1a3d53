// embed: rows of a table at the step's tokens.
#include "ops/rows.h"
#include "recording.h"

namespace chairlift {
namespace {

class Embed final : public Op {
public:
    Embed(Operands& operands, Recording& recording)
        : Op({}, operands.lanes("out")), table_(recording.matrix(operands.integer("table"))) {}

    void check(const Recording& recording) const override {
        need(table_->rows() >= recording.vocab(), "the embedding has fewer rows than the vocabulary");
        recording.arena().check_f32(out(), static_cast<int>(table_->cols()));
    }

    bool reads_step() const override { return true; }
    int64_t row_work() const override { return 16 * out().width; }

    void run(Rows rows, const RunContext& at) const override {
        each_row(rows, [&](int row) {
            embed_row(table_->view(), at.step.tokens[static_cast<size_t>(row)], at.arena.f32(out(), row));
        });
    }

private:
    std::shared_ptr<const PackedMatrix> table_;
};

const Registered<Embed> registered("embed");

}  // namespace
}  // namespace chairlift
