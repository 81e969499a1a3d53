// Usage: check_native [PART...]; all parts without arguments. scripts/check-native builds it with sanitizers.
#include "check.h"

#include <cstring>

namespace {

struct Part {
    const char* name;
    void (*check)();
};

constexpr Part kParts[] = {
    {"pool", chairlift::check_pool},           {"matmul", chairlift::check_matmul},
    {"sampling", chairlift::check_sampling},   {"rows", chairlift::check_rows},
    {"attention", chairlift::check_attention}, {"program", chairlift::check_program},
};

bool wanted(const Part& part, int argc, char** argv) {
    for (int i = 1; i < argc; ++i) {
        if (std::strcmp(argv[i], part.name) == 0) return true;
    }
    return argc == 1;
}

}  // namespace

int main(int argc, char** argv) {
    for (const Part& part : kParts) {
        if (!wanted(part, argc, argv)) continue;
        part.check();
        std::printf("%s ok\n", part.name);
    }
}
