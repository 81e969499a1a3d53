#include "op.h"

#include <stdexcept>

namespace chairlift {
namespace {

std::map<std::string, MakeOp, std::less<>>& registry() {
    static std::map<std::string, MakeOp, std::less<>> ops;
    return ops;
}

}  // namespace

template <class T>
T Operands::get(const char* name) {
    const auto found = values_.find(name);
    if (found == values_.end()) throw std::invalid_argument("cannot record: " + op_ + " lacks its operand " + name);
    const T* const value = std::get_if<T>(&found->second);
    if (value == nullptr) throw std::invalid_argument("cannot record: " + op_ + "'s operand " + name + " is of another kind");
    const T taken = *value;
    values_.erase(found);
    return taken;
}

template Lanes Operands::get<Lanes>(const char*);
template int64_t Operands::get<int64_t>(const char*);
template double Operands::get<double>(const char*);
template std::vector<double> Operands::get<std::vector<double>>(const char*);
template std::string Operands::get<std::string>(const char*);

int Operands::integer(const char* name) {
    const auto value = get<int64_t>(name);
    if (value == static_cast<int>(value)) return static_cast<int>(value);
    throw std::invalid_argument("cannot record: " + op_ + "'s operand " + name + " is beyond 31 bits");
}

void Operands::check_all_taken() const {
    if (!values_.empty()) throw std::invalid_argument("cannot record: " + op_ + " has no operand " + values_.begin()->first);
}

void register_op(std::string_view name, MakeOp make) { registry().emplace(name, make); }

MakeOp op_by_name(std::string_view name) {
    const auto found = registry().find(name);
    if (found == registry().end()) throw std::invalid_argument("cannot record: there is no op " + std::string(name));
    return found->second;
}

}  // namespace chairlift
