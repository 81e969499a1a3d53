// linear: out = x @ matrix.T (+ bias) (+ residual). `out` may be the residual.
#include "ops/product.h"
#include "recording.h"

namespace chairlift {
namespace {

class Linear final : public Op {
public:
    Linear(Operands& operands, Recording& recording)
        : Op({operands.lanes("x"), operands.has("residual") ? operands.lanes("residual") : Lanes{}}, operands.lanes("out")),
          matrix_(recording.matrix(operands.integer("matrix"))) {
        if (operands.has("bias")) bias_ = recording.vector(operands.integer("bias"));
    }

    void check(const Recording& recording) const override {
        const Arena& arena = recording.arena();
        arena.check_width(x(), static_cast<int>(matrix_->cols()));
        need(takes(*matrix_, arena.dtype(x())), "the matrix takes the other kind of activations");
        const int outputs = static_cast<int>(matrix_->rows());
        arena.check_f32(out(), outputs);
        if (residual().exist()) arena.check_f32(residual(), outputs);
        need(bias_ == nullptr || bias_->size() == static_cast<size_t>(outputs), "the bias has another length");
    }

    Sharing sharing() const override { return Sharing::outputs; }
    int64_t row_work() const override { return 2 * matrix_->rows() * matrix_->cols(); }

    void run(Rows rows, const RunContext& at) const override { multiply(arguments(rows, at), at.kernels); }
    void run_outputs(Rows rows, const RunContext& at) const override {
        multiply_shared(arguments(rows, at), at.kernels, at.pool);
    }

private:
    Lanes x() const { return inputs()[0]; }
    Lanes residual() const { return inputs()[1]; }

    MatmulArgs arguments(Rows rows, const RunContext& at) const {
        MatmulArgs args{};
        args.weights = matrix_->view();
        args.x = at.arena.activations(x(), rows.first);
        args.num_rows = rows.count;
        args.out = at.arena.f32(out(), rows.first);
        args.out_stride = at.arena.stride(out());
        if (bias_ != nullptr) args.bias = bias_->data();
        if (residual().exist()) {
            args.residual = at.arena.f32(residual(), rows.first);
            args.residual_stride = at.arena.stride(residual());
        }
        return args;
    }

    std::shared_ptr<const PackedMatrix> matrix_;
    std::shared_ptr<const std::vector<float>> bias_;  // null: none
};

const Registered<Linear> registered("linear");

}  // namespace
}  // namespace chairlift
