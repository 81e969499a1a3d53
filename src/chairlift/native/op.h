// What an op is to the program that replays it. Each op is one file in ops/, which registers it by name.
//
// An op is made from named operands when it is recorded, checks them once, and then runs on rows of every step. The program
// knows no op by name: it asks each how it is shared out between threads.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include "arena.h"
#include "isa.h"
#include "pool.h"
#include "step.h"

namespace chairlift {

class Recording;

// What an op is recorded with, by name: lanes of buffers, numbers of matrices and vectors, settings.
class Operands {
public:
    using Value = std::variant<Lanes, int64_t, double, std::string, std::vector<double>>;

    Operands(std::string_view op, std::map<std::string, Value> values) : op_(op), values_(std::move(values)) {}

    // All throw std::invalid_argument, naming op and operand, when it is missing or of another kind.
    Lanes lanes(const char* name) { return get<Lanes>(name); }
    int integer(const char* name);
    float real(const char* name) { return static_cast<float>(get<double>(name)); }
    std::vector<double> reals(const char* name) { return get<std::vector<double>>(name); }
    std::string text(const char* name) { return get<std::string>(name); }
    bool has(const char* name) const { return values_.contains(name); }

    // Throws std::invalid_argument when an operand was not asked for: nothing is accepted and ignored.
    void check_all_taken() const;

private:
    template <class T>
    T get(const char* name);

    std::string op_;
    std::map<std::string, Value> values_;
};

// What an op needs to run.
struct RunContext {
    const Kernels& kernels;
    const Arena& arena;
    Pool& pool;
    const Step& step;
    const StepResult& result;
};

class Op {
public:
    // How the program shares an op out between threads.
    enum class Sharing {
        rows,     // any rows by themselves, on any thread
        outputs,  // as `rows`; when rows are few, by outputs: run_outputs() once for all of them
        step,     // run() once for all rows, when every row of the ops before is there; it shares itself out
    };

    Op(std::vector<Lanes> inputs, Lanes out) : inputs_(std::move(inputs)), out_(out) {}
    virtual ~Op() = default;
    Op(const Op&) = delete;
    Op& operator=(const Op&) = delete;

    // Throws std::invalid_argument when operands do not fit together.
    virtual void check(const Recording& recording) const = 0;
    // Multiply-adds of a product that take about as long as one row.
    virtual int64_t row_work() const = 0;
    virtual void run(Rows rows, const RunContext& context) const = 0;

    virtual Sharing sharing() const { return Sharing::rows; }
    virtual void run_outputs(Rows rows, const RunContext& context) const { run(rows, context); }
    // Whether it looks up in the step what stands at its rows (token, position, slot). What does not may run on the logit
    // rows alone, once they are gathered.
    virtual bool reads_step() const { return false; }
    // Whether it writes the step's result, as the last op alone does.
    virtual bool ends_step() const { return false; }

    const std::vector<Lanes>& inputs() const { return inputs_; }
    Lanes out() const { return out_; }

private:
    std::vector<Lanes> inputs_;
    Lanes out_;
};

// What several ops share and is made anew for each step: the rotations of its positions, say.
class StepState {
public:
    virtual ~StepState() = default;
    // Once, when nothing more is recorded.
    virtual void allocate(Pool& pool) = 0;
    virtual void prepare(const Step& step, Pool& pool) = 0;
};

// The ops of this binary, by name. An op's file defines one Registered<TheOp>.
using MakeOp = std::unique_ptr<Op> (*)(Operands& operands, Recording& recording);
void register_op(std::string_view name, MakeOp make);
// Throws std::invalid_argument for an op that there is not.
MakeOp op_by_name(std::string_view name);

template <class T>
struct Registered {
    explicit Registered(std::string_view name) {
        register_op(name, [](Operands& operands, Recording& recording) -> std::unique_ptr<Op> {
            return std::make_unique<T>(operands, recording);
        });
    }
};

}  // namespace chairlift
